"""What fails a gate: an expectation, a verdict that has changed by more than noise, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.files import sha256_of
from olmo_sparsity.command.cli import main
from olmo_sparsity.sources.answers import (
    VERSION,
    StoredAnswer,
    StoredCell,
    StoredStatement,
    identity_in,
    read_answers,
)
from olmo_sparsity.sources.baseline import SIMILAR
from olmo_sparsity.sources.expectations import read_expectations
from olmo_sparsity.sources.gate import check, check_has_expectations
from tests.support.sources import SOURCES, asked, saved, with_verdicts

FIRST, SECOND = {"a": 4.0, "b": 0.0}, {"a": 0.2, "b": 0.1}
MODEL = {"model": "m", "dtype": "d", "tokenizer": "t", "chat_template": "c", "prefix": "auto"}

Nats = dict[str, float]


def stored(
    folder: Path,
    *statements: Nats,
    question: str = "q",
    se: float | None = 0.1,
    early: bool = False,
    **other: Any,
) -> Path:
    """Write results of one question.

    statements: What each source gives to the statement; above 1 the statement relies on it.
    early: What is lost without them decides, so that what they give is null in all rows.
    """
    rows = []
    for number, gives in enumerate(statements):
        named = [name for name, nats in gives.items() if nats > 1]
        cells = {
            name: StoredCell(*((None, nats, None) if early else (nats, 0.0, se)), se, nats - 1)
            for name, nats in gives.items()
        }
        rows.append(row_of(number, f"text {number}", named, cells))
    names = {name for row in rows for name in row.cells}
    hashes = {name: f"hash of {name}" for name in names}
    write(folder, [StoredAnswer(0, "", question, 0.0, hashes, rows)], **other)
    return folder


def row_of(
    number: int, text: str, named: list[str], cells: dict[str, StoredCell], **changed: Any
) -> StoredStatement:
    row = StoredStatement(
        number=number,
        text=text,
        kind=["none", "one", "both"][len(named)],
        nats=max((cell.largest_effect for cell in cells.values()), default=0.0),
        sources=named,
        open=[],
        origins=named,
        is_undecided=False,
        verdict=f"rests on {', '.join(named) or 'no source'}",
        cells=cells,
    )
    return replace(row, **changed)


def write(folder: Path, answers: list[StoredAnswer], **other: Any) -> None:
    (folder / "questions").mkdir(parents=True, exist_ok=True)
    about = MODEL | {"version": VERSION, "num_questions": len(answers), "settings": {"draws": 8}}
    (folder / "identity.json").write_text(json.dumps(about | other))
    for number, answer in enumerate(answers):
        rest = {"question": number, "identity": sha256_of(folder / "identity.json")}
        file = folder / "questions" / f"{number:06d}.json"
        file.write_text(json.dumps(rest | {"gate": asdict(answer)}))


@pytest.fixture
def questions(tmp_path: Path) -> Callable[[Any], Path]:
    def written(expect: Any) -> Path:
        path = tmp_path / "q.jsonl"
        path.write_text(json.dumps({"sources": {}, "question": "q", "expect": expect}))
        return path

    return written


@pytest.mark.parametrize(
    ("expect", "passes"),
    [
        ("a", True),
        ("b", False),
        (["a", "none"], True),
        (["none", None], False),
        ([{"sources": ["a"], "nats": 3.5}, None], True),
        ([{"sources": ["a"], "nats": 4.5}, None], False),
        ([{"both": ["a", "b"]}, None], False),
        ([{"either": ["a", "b"]}, None], True),
        ([{"either": ["a", "dropped"]}, None], True),
        (["a", "none", "a"], False),  # there is no third statement
        ("c", False),  # a prompt builder has dropped it
        (["a"], False),  # the second statement has no entry
    ],
)
def test_a_check_passes_if_the_verdict_is_as_expected(
    questions: Any, tmp_path: Path, expect: Any, passes: bool
) -> None:
    found = check(questions(expect), stored(tmp_path / "out", FIRST, SECOND))
    assert (not found.failures) == passes, found.describe()


CHUNKS: list[Any] = [
    {"name": "a", "text": "w1", "id": "report.pdf"},
    {"name": "b", "text": "w2", "id": ["report.pdf", "DOC-7"]},
]
LANGCHAIN: list[Any] = [
    {"page_content": "w1", "metadata": {"source": "a", "doc_id": "DOC-7"}, "type": "Document"},
    {"page_content": "w2", "metadata": {"source": "b"}, "id": None},
]


@pytest.mark.parametrize(
    ("sources", "expect", "passes"),
    [
        (CHUNKS, "report.pdf", True),  # either chunk
        (CHUNKS, "a", True),  # its name
        (CHUNKS, "DOC-7", False),  # the id of the other chunk alone
        (CHUNKS, {"either": ["DOC-7", "report.pdf"]}, True),
        (CHUNKS, {"both": ["DOC-7", "report.pdf"]}, False),
        (CHUNKS, {"sources": ["report.pdf"], "nats": 99.0}, False),
        (CHUNKS, "other.pdf", False),
        (LANGCHAIN, "DOC-7", True),
        (LANGCHAIN, "b", False),
    ],
)
def test_an_id_of_a_document_stands_for_its_chunks(
    sources: list[Any], expect: Any, passes: bool, tmp_path: Path
) -> None:
    """The first statement rests on the chunk `a`, the second on none; `b` is in the prompt."""
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"sources": sources, "question": "q", "expect": expect}))
    found = check(path, stored(tmp_path / "out", FIRST, SECOND))
    assert (not found.failures) == passes, found.describe()


def judged(folder: Path, nats: float, cells: dict[str, StoredCell], **row: Any) -> Path:
    """Write results of one question with one statement."""
    named = row.pop("named", [])
    statement = row_of(0, "text", named, cells, nats=nats, **row)
    hashes = {name: f"hash of {name}" for name in cells}
    write(folder, [StoredAnswer(0, "", "q", 0.0, hashes, [statement])])
    return folder


def cell(nats: float, above: float) -> StoredCell:
    return StoredCell(None, nats, None, 0.3, above)


UNDECIDED = {"kind": "undecided", "is_undecided": True}


@pytest.mark.parametrize(
    ("nats", "cells", "row", "expect", "margin", "passes"),
    [
        # "The capital of France is Paris": 0.6 nats, near every threshold.
        (0.6, {"a": cell(0.4, -0.2)}, {}, "a", 3, False),
        (0.6, {"a": cell(0.4, -0.2)}, {}, "none", 0, True),
        # Undecided is neither, and a margin decides near its threshold only.
        (8.1, {"a": cell(8.4, -0.3)}, UNDECIDED | {"open": ["a"]}, "none", 0, False),
        (8.1, {"a": cell(8.4, -0.3)}, UNDECIDED | {"open": ["a"]}, "none", 3, False),
        (8.1, {"a": cell(8.4, -0.3)}, UNDECIDED | {"open": ["a"]}, "a", 0, False),
        (8.1, {"a": cell(8.4, -0.3)}, UNDECIDED | {"open": ["a"]}, "a", 0.2, False),
        (8.1, {"a": cell(8.4, -0.3)}, UNDECIDED | {"open": ["a"]}, "a", 0.5, True),
        (1.3, {"a": cell(1.3, -0.3)}, UNDECIDED | {"open": ["a"]}, "none", 1, False),
        (1.3, {"a": cell(1.3, -0.3)}, UNDECIDED | {"open": ["a"]}, "none", 1.5, True),
        # A small share of the nats: not open, so no margin names it.
        (9.0, {"a": cell(8.4, 2), "b": cell(1.2, -0.1)}, {"named": ["a"]}, "b", 3, False),
        # A named source passes as none if all that is lost is within the margin.
        (4.0, {"a": cell(4.0, 0.1)}, {"named": ["a"]}, "none", 3, False),
        (0.8, {"a": cell(0.8, 0.1)}, {"named": ["a"]}, "none", 1, True),
    ],
)
def test_a_margin_bounds_an_effect(
    questions: Any, tmp_path: Path, nats: float, cells: Any, row: Any, expect: Any, margin: float,
    passes: bool,
) -> None:  # fmt: skip
    out = judged(tmp_path / "out", nats, cells, **row)
    strict, found = check(questions(expect), out), check(questions(expect), out, margin=margin)
    assert (not found.failures) == passes, found.describe()
    marked = passes and bool(strict.failures)
    assert [item.by_margin for item in found.checks] == [marked]
    assert len(found.notes) == marked


def test_a_margin_of_several_nats_is_refused(questions: Any, tmp_path: Path) -> None:
    out = stored(tmp_path / "out", FIRST)
    for margin in (3.1, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="margin"):
            check(questions("a"), out, margin=margin)


@pytest.mark.parametrize(
    ("kind", "either", "both"), [("either", True, False), ("both", True, True)]
)
def test_either_does_not_pass_for_both(
    questions: Any, tmp_path: Path, kind: str, either: bool, both: bool
) -> None:
    cells = {"a": cell(4.0, 1.0), "b": cell(4.0, 1.0)}
    out = judged(tmp_path / "out", 8.0, cells, named=["a", "b"], kind=kind)
    assert bool(check(questions({"either": ["a", "b"]}), out)) == either
    assert bool(check(questions({"both": ["a", "b"]}), out)) == both


GOOD = {"sources": {"a": "x"}, "question": "q", "answer": ["w1", "w2"], "expect": ["a", None]}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"expects": "a"}, "did you mean expect"),
        ({"answers": "a"}, "did you mean answer"),
        ({"expect": ["a"]}, "1 entries, and the answer 2"),
        ({"expect": []}, "checks nothing"),
        ({"expect": {"sources": ["a", "b"]}}, '{"both"'),
        ({"expect": {"sources": []}}, "expect"),
        ({"expect": {"both": ["a"], "either": ["b"]}}, "expect"),
        ({"expect": ["a", ["none", "b"]]}, "mixes none"),
        ({"id": ["a"]}, "id="),
    ],
)
def test_a_line_that_would_check_nothing_is_an_error(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | wrong))
    with pytest.raises(DataError, match=r"q\.jsonl:2") as caught:
        read_expectations(path)
    assert said in str(caught.value)


def test_a_question_without_expectation_is_an_error_without_a_baseline(tmp_path: Path) -> None:
    path, out = tmp_path / "q.jsonl", stored(tmp_path / "out", FIRST)
    without = {key: value for key, value in GOOD.items() if key != "expect"}
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(without))
    with pytest.raises(DataError, match=r"q\.jsonl:2"):
        check_has_expectations(path, out, identity_in(out), None)
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(without | {"expect": None}))
    check_has_expectations(path, out, identity_in(out), None)


def test_a_request_to_a_chat_api_keeps_its_own_fields(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"messages": [], "model": "m", "tools": [], "temperature": 0}))
    assert read_expectations(path) == [[]]


def test_a_share_of_the_checks_may_be_enough(questions: Any, tmp_path: Path) -> None:
    out = stored(tmp_path / "out", *[FIRST] * 9, SECOND)
    path = questions(["a"] * 10)
    assert not check(path, out)
    assert check(path, out, must_pass=0.9)
    assert not check(path, out, must_pass=0.91)


@pytest.mark.parametrize("share", [0.0, -0.5, 90, float("nan")])
def test_a_share_lies_above_0_and_at_most_at_1(
    questions: Any, tmp_path: Path, share: float
) -> None:
    out = stored(tmp_path / "out", FIRST)
    with pytest.raises(ConfigError, match=r"must_pass=.* must be a share"):
        check(questions(["a"]), out, must_pass=share)


def test_failures_of_a_gate_that_passes_are_written_as_skipped(
    questions: Any, tmp_path: Path
) -> None:
    out = stored(tmp_path / "out", *[FIRST] * 9, SECOND)
    found = check(questions(["a"] * 10), out, must_pass=0.9)
    assert "1 of 10 checks failed" in found.describe()
    found.write(out, "q")
    assert json.loads((out / "gate.json").read_text())["passed"]
    suite = ElementTree.parse(out / "gate.xml").getroot()[0]
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert [item.tag for case in suite.iter("testcase") for item in case] == ["skipped"]


@pytest.fixture
def failed(questions: Any, tmp_path: Path) -> Any:
    """A report of one failure among two checks, written into `out`."""
    out = stored(tmp_path / "out", FIRST, SECOND)
    (answer,) = read_answers(out)
    write(out, [replace(answer, id="opening-hours", asked="When is it open?", seconds=3.0)])
    report = check(questions(["b", "none"]), out)
    report.write(out, "q\0.jsonl")
    return report


def test_a_failure_is_shown_with_its_question(failed: Any) -> None:
    first = "1 of 2 checks failed\nquestion 1 (opening-hours), statement 1: text 0\n"
    assert first in failed.describe()


def test_failures_are_written_as_junit(failed: Any, tmp_path: Path) -> None:
    suite = ElementTree.parse(tmp_path / "out" / "gate.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("time")) == ("2", "1", "3.000")
    cases = list(suite.iter("testcase"))
    assert [len(case) for case in cases] == [1, 0]
    assert [case.get("time") for case in cases] == ["1.500", "1.500"]
    name = cases[0].get("name") or ""
    assert "opening-hours" in name
    assert "When is it open?" in name
    assert (cases[0][0].text or "").splitlines()[0] == "text 0"


def test_failures_are_written_as_json(failed: Any, tmp_path: Path) -> None:
    report = json.loads((tmp_path / "out" / "gate.json").read_text())
    assert (report["passed"], report["checks"][0]["expected"]) == (False, "b")


BEFORE = {"a": 4.0, "b": 0.0}, {"a": 0.9, "b": 0.0}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("now", "fails"),
    [
        (BEFORE, []),
        ((FIRST, {"a": 1.1, "b": 0.0}), []),  # named now, by chance
        (({"a": 0.0, "b": 0.0}, BEFORE[1]), [1]),
        (({"a": 4.0, "b": 4.0}, BEFORE[1]), []),  # it rests on one more
        (({"a": 0.0, "b": 4.0}, BEFORE[1]), [1]),  # and here on another
        ((BEFORE[0], {"a": 6.0, "b": 0.0}), []),  # what rested on none rests on a source
        (({"b": 0.0}, {"b": 0.0}), [1]),  # the source itself is missing
        ((*BEFORE, FIRST), []),
        (BEFORE[:1], []),
    ],
)
def test_a_baseline_fails_changed_verdicts_beyond_noise(
    questions: Any, tmp_path: Path, now: Any, fails: list[int], early: bool
) -> None:
    before = stored(tmp_path / "before", *BEFORE, early=early)
    found = check(questions(None), stored(tmp_path / "now", *now, early=early), before)
    assert [case.statement for case in found.failures] == fails
    named = [{name for name, nats in row.items() if nats > 1} for row in now]
    gains = "b" in named[0] or (len(named) > 1 and bool(named[1]))
    assert bool(found.notes) == ((gains and not fails) or len(now) != 2 or "a" not in now[0])


def changed(tmp_path: Path, now: StoredStatement, texts: dict[str, str], **given: Any) -> Any:
    """Compare with a baseline of one statement, which rests on `chunk 1` of text `x`."""
    before = row_of(0, "It was opened in June 1921.", ["chunk 1"], {"chunk 1": cell(4.0, 1.0)})
    write(tmp_path / "before", [StoredAnswer(0, "", "q", 0.0, {"chunk 1": "x"}, [before])])
    write(tmp_path / "now", [StoredAnswer(0, "", "q", 0.0, texts, [now])])
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"sources": {}, "question": "q", "expect": None} | given))
    return check(path, tmp_path / "now", tmp_path / "before")


def test_a_renamed_source_is_no_regression(tmp_path: Path) -> None:
    text, cells = "It was opened in June 1921.", {"chunk 7": cell(4.0, 1.0)}
    found = changed(tmp_path, row_of(0, text, ["chunk 7"], cells), {"chunk 7": "x"})
    assert not found.failures
    assert any("chunk 1 is now chunk 7" in note for note in found.notes)
    # Another text under a new name is another source.
    other = changed(tmp_path, row_of(0, text, ["chunk 7"], cells), {"chunk 7": "y"})
    assert [item.statement for item in other.failures] == [1]


@pytest.mark.parametrize("named", [["chunk 1"], []])
def test_a_reworded_statement_must_rest_on_the_same_source(
    tmp_path: Path, named: list[str]
) -> None:
    cells = {"chunk 1": cell(4.0, 1.0)}
    now = row_of(0, "It was opened in June of 1921.", named, cells)
    found = changed(tmp_path, now, {"chunk 1": "x"})
    assert bool(found.failures) == (not named)
    assert any("is reworded" in note for note in found.notes)


def compared(tmp_path: Path, now: StoredAnswer, before: StoredAnswer, **given: Any) -> Any:
    write(tmp_path / "before", [before])
    write(tmp_path / "now", [now])
    path = tmp_path / "q.jsonl"
    path.write_text('{"expect": null}')
    return check(path, tmp_path / "now", tmp_path / "before", **given)


@pytest.mark.parametrize(("named", "passes"), [("faq (2)", True), ("faq", False)])
def test_chunks_that_exchange_their_numbers_are_known_by_their_texts(
    tmp_path: Path, named: str, passes: bool
) -> None:
    high, low = cell(4.0, 3.0), cell(0.0, -1.0)
    row = row_of(0, "text", ["faq"], {"faq": high, "faq (2)": low})
    before = StoredAnswer(0, "", "q", 0.0, {"faq": "x", "faq (2)": "y"}, [row])
    cells = {"faq": low, "faq (2)": low} | {named: high}
    row = row_of(0, "text", [named], cells)
    now = StoredAnswer(0, "", "q", 0.0, {"faq": "y", "faq (2)": "x"}, [row])
    assert bool(compared(tmp_path, now, before)) == passes


def test_a_source_of_another_text_has_no_other_name(tmp_path: Path) -> None:
    """Text x is now called b, and a is another text: the statement rests on b, as before."""
    row = row_of(0, "text", ["a"], {"a": cell(4.0, 3.0)})
    before = StoredAnswer(0, "", "q", 0.0, {"a": "x"}, [row])
    row = row_of(0, "text", ["a"], {"a": cell(4.0, 3.0), "b": cell(0.0, -1.0)})
    now = StoredAnswer(0, "", "q", 0.0, {"a": "new", "b": "x"}, [row])
    assert not compared(tmp_path, now, before)


def test_a_source_behind_the_reasoning_may_not_be_lost(tmp_path: Path) -> None:
    step = {"reasoning 1": cell(4.0, 3.0)}
    texts = {"a": "x", "reasoning 1": "r"}
    reached = row_of(0, "text", ["reasoning 1"], step, origins=["a"])
    lost = row_of(0, "text", ["reasoning 1"], step, origins=[])
    before = StoredAnswer(0, "", "q", 0.0, texts, [reached])
    assert not compared(tmp_path, replace(before, statements=[lost]), before)
    # Another sentence of the reasoning may lead to it.
    other = row_of(0, "text", ["reasoning 2"], {"reasoning 2": cell(4.0, 3.0)}, origins=["a"])
    texts = {"a": "x", "reasoning 2": "s"}
    assert compared(tmp_path, replace(before, statements=[other], source_texts=texts), before)


def test_a_source_that_is_lost_by_noise_is_noted(tmp_path: Path) -> None:
    before = StoredAnswer(
        0, "", "q", 0.0, {"a": "x"}, [row_of(0, "text", ["a"], {"a": cell(1.6, 0.1)})]
    )
    now = replace(before, statements=[row_of(0, "text", [], {"a": cell(1.4, -0.1)})])
    found = compared(tmp_path, now, before)
    assert found
    assert any("lost a by no more than noise" in note for note in found.notes)


def test_long_statements_are_compared_by_all_their_letters(tmp_path: Path) -> None:
    """Frequent letters of a text above 200 letters count, too."""
    text = "The bridge was opened in June and the mayor was there with all of the council. " * 4
    reworded = text.replace("June", "July").replace("all of", "most of")
    cells = {"a": cell(4.0, 3.0)}
    before = StoredAnswer(0, "", "q", 0.0, {"a": "x"}, [row_of(0, text, ["a"], cells)])
    assert SequenceMatcher(None, reworded, text).ratio() < SIMILAR
    now = replace(before, statements=[row_of(0, reworded, [], {"a": cell(0.0, -1.0)})])
    (failure,) = compared(tmp_path, now, before).failures
    assert failure.statement == 1


def test_a_reworded_question_is_known_by_its_id(tmp_path: Path) -> None:
    row = row_of(0, "text", ["a"], {"a": cell(4.0, 3.0)})
    before = StoredAnswer(0, "opening", "When did it open?", 0.0, {"a": "x"}, [row])
    lost = row_of(0, "text", [], {"a": cell(0.0, -1.0)})
    now = replace(before, asked="Since when is it open?", statements=[lost])
    found = compared(tmp_path, now, before)
    assert [item.statement for item in found.failures] == [1]
    assert "question 1 (opening) is reworded" in found.notes[0]


def test_a_share_does_not_excuse_a_baseline_without_common_questions(
    questions: Any, tmp_path: Path
) -> None:
    out = stored(tmp_path / "out", *[FIRST] * 30)
    other = stored(tmp_path / "other", FIRST, question="another")
    found = check(questions(["a"] * 30), out, other, must_pass=0.9)
    assert len(found.failures) == 1
    assert not found


def test_a_share_of_no_expectation_is_refused(questions: Any, tmp_path: Path) -> None:
    before = stored(tmp_path / "before", FIRST)
    identity = json.loads((before / "identity.json").read_text())
    with pytest.raises(ConfigError, match=r"must_pass=0.9 is a share of the checks of `expect`"):
        check_has_expectations(questions(None), tmp_path / "out", identity, before, must_pass=0.9)
    check_has_expectations(questions("a"), tmp_path / "out", identity, before, must_pass=0.9)


def test_a_share_does_not_excuse_a_regression(questions: Any, tmp_path: Path) -> None:
    out = stored(tmp_path / "out", *[FIRST] * 9, {"a": 0.0, "b": 0.0})
    before = stored(tmp_path / "before", *[FIRST] * 10)
    found = check(questions([*["a"] * 9, None]), out, before, must_pass=0.5)
    assert [item.kind for item in found.failures] == ["baseline"]
    assert not found


@pytest.mark.parametrize(("named", "fails"), [(["a"], []), ([], [1])])
def test_the_only_statement_of_an_answer_is_compared_in_any_words(
    tmp_path: Path, named: list[str], fails: list[int]
) -> None:
    cells = {"a": cell(4.0, 3.0)}
    row = row_of(0, "Somebody had fitted the valve backwards.", ["a"], cells)
    before = StoredAnswer(0, "", "q", 0.0, {"a": "x"}, [row])
    reworded = row_of(0, "It broke as an intern put it in the wrong way round.", named, cells)
    found = compared(tmp_path, replace(before, statements=[reworded]), before)
    assert [item.statement for item in found.failures] == fails


def test_an_expected_source_that_a_question_lacks_is_named_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(
        json.dumps({"sources": {"warranty": "x"}, "question": "q", "expect": "waranty"})
    )
    check_has_expectations(path, tmp_path / "out", {}, None)
    assert "q.jsonl:1 expects waranty, which is none of its sources (warranty)" in (
        capsys.readouterr().err
    )


def test_a_check_of_a_missing_source_shows_the_statement(questions: Any, tmp_path: Path) -> None:
    out = stored(tmp_path / "out", FIRST)
    (failure,) = check(questions(["dropped"]), out).failures
    assert failure.text == "text 0"


def test_what_is_expected_outweighs_the_baseline(tmp_path: Path) -> None:
    cells = {"chunk 1": cell(0.0, -1.0), "b": cell(4.0, 1.0)}
    now = row_of(0, "It was opened in June 1921.", ["b"], cells)
    texts = {"chunk 1": "x", "b": "y"}
    assert changed(tmp_path, now, texts).failures
    found = changed(tmp_path, now, texts, answer=["It was opened in June 1921."], expect=["b"])
    assert not found.failures
    assert any("as `expect` says" in note for note in found.notes)


def test_a_new_statement_that_rests_on_nothing_fails_on_request(
    questions: Any, tmp_path: Path
) -> None:
    before = stored(tmp_path / "before", FIRST)
    out = stored(tmp_path / "out", FIRST, SECOND, FIRST)
    assert check(questions(None), out, before)
    found = check(questions(None), out, before, new_need_source=True)
    assert [(item.kind, item.statement) for item in found.failures] == [("new", 2)]
    assert check(questions([None, "none", None]), out, before, new_need_source=True)


def test_questions_match_by_content(tmp_path: Path) -> None:
    """A question put before others, equal ones with other sources, one that is gone."""

    def one(number: int, asked: str, text: str, nats: float) -> StoredAnswer:
        numbers, named = StoredCell(nats, 0.0, 0.1, 0.1, 0.0), ["a"] * (nats > 1)
        row = row_of(0, "text", named, {"a": numbers}, verdict=f"{text}, {nats}")
        return StoredAnswer(number, "", asked, 0.0, {"a": text}, [row])

    before = [one(0, "p", "x", 4.0), one(1, "p", "y", 0.0), one(2, "gone", "z", 4.0)]
    now = [one(0, "new", "w", 4.0), one(1, "p", "y", 0.0), one(2, "p", "x", 0.0)]
    write(tmp_path / "before", before)
    write(tmp_path / "now", now)
    path = tmp_path / "q.jsonl"
    path.write_text('{"expect": null}\n' * 3)
    found = check(path, tmp_path / "now", tmp_path / "before")
    assert [(case.question, case.passed) for case in found.checks] == [(2, True), (3, False)]
    assert [note[:20] for note in found.notes] == ["not in the baseline:", "only in the baseline"]


def test_a_check_that_compares_nothing_fails(questions: Any, tmp_path: Path) -> None:
    path = questions("a")
    out = stored(tmp_path / "out", FIRST)
    write(tmp_path / "empty", [])
    other = stored(tmp_path / "other", FIRST, question="another")
    # Two statements, neither of which is similar to the one of today.
    answer = stored(tmp_path / "answer", FIRST, SECOND)
    file = answer / "questions" / "000000.json"
    changed_texts = file.read_text().replace("text 0", "It rained.").replace("text 1", "He left.")
    file.write_text(changed_texts)
    for baseline in (tmp_path / "empty", other, answer):
        assert [case.kind for case in check(path, out, baseline).failures] == ["baseline"]


@pytest.mark.parametrize("baseline", ["out", "x/../out", "nowhere", "."])
def test_a_folder_that_is_no_earlier_run_is_no_baseline(
    questions: Any, tmp_path: Path, baseline: str
) -> None:
    out = stored(tmp_path / "out", FIRST)
    with pytest.raises(ConfigError, match="baseline"):
        check_has_expectations(questions("a"), out, identity_in(out), tmp_path / baseline)


def test_a_file_in_which_null_is_all_that_is_expected_checks_nothing(
    questions: Any, tmp_path: Path
) -> None:
    out = stored(tmp_path / "out", FIRST)
    with pytest.raises(ConfigError, match="expect"):
        check_has_expectations(questions([None]), out, identity_in(out), None)


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.pop("source_texts"),
        lambda answer: answer["statements"][0].pop("sources"),
        lambda answer: answer["statements"][0].update(sources=None),
        lambda answer: answer["statements"][0]["cells"]["a"].update(lost="0"),
        lambda answer: answer.update(question="0"),
        lambda answer: answer.update(statements=None),
    ],
)
def test_a_baseline_edited_by_hand_is_named(questions: Any, tmp_path: Path, change: Any) -> None:
    before, out = stored(tmp_path / "before", FIRST), stored(tmp_path / "out", FIRST)
    file = before / "questions" / "000000.json"
    content = json.loads(file.read_text())
    change(content["gate"])
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"before/questions/000000\.json"):
        check(questions(None), out, before)


@pytest.mark.parametrize("name", [*MODEL, "settings"])
def test_a_baseline_of_another_model_is_refused(questions: Any, tmp_path: Path, name: str) -> None:
    other = {name: {"draws": 8, "units": "words"} if name == "settings" else "other"}
    before, out = stored(tmp_path / "before", FIRST, **other), stored(tmp_path / "out", FIRST)
    with pytest.raises(ConfigError, match=name):
        check(questions(None), out, before)
    with pytest.raises(ConfigError, match=name):
        check_has_expectations(questions(None), out, identity_in(out), before)
    found = check(questions(None), out, before, allow_other_model=True)
    assert not found.failures
    assert name in found.notes[0]


def test_an_answer_relies_on_the_sources_that_verdicts_name() -> None:
    found = with_verdicts(asked())
    assert found.relies_on("a")
    assert found.relies_on("a", statement=0)
    assert found.relies_on("c", statement=1)
    assert not found.relies_on("c", statement=0)
    assert not found.relies_on(None)
    assert found.sources.statements.tolist() == [(0, 1, 2), (2,), (1,)]


def test_an_assertion_shows_what_was_found_in_what_pytest_prints() -> None:
    found = with_verdicts(asked())
    assert "'w1 w2 w3', relies on a (8.0 nats)" in repr(found.relies_on("b", statement=0))
    assert len(repr(found.relies_on("b"))) <= 240


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"source": "d"}, "no source is named d; the names are a, b, c"),
        ({"source": "a", "statement": 3}, "statement=3 must be a whole number from 0 to 2"),
    ],
)
def test_an_assertion_about_what_is_not_there_is_an_error(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_verdicts(asked()).relies_on(**wrong)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    """The command, with one decoy for each source of a model that knows nothing."""
    folder, decoys = saved(tmp_path)

    def run(out: str, records: list[dict[str, Any]], *more: str) -> int:
        path = tmp_path / "q.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        words = ["attribute", folder, "--questions", str(path), "--out", str(tmp_path / out)]
        return main([*words, "--draws", "4", "--decoys", decoys, *more])

    return run


RECORD = {"sources": SOURCES, "question": "w20", "answer": ["w30"]}


def test_the_command_exits_with_1_where_a_check_fails(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("out", [RECORD | {"expect": "none"}], "--gate") in (0, 1)
    (named,) = pd.read_parquet(tmp_path / "out" / "statements.parquet").sources
    wrong = "a" if "a" not in named else "none"
    assert run("out", [RECORD | {"expect": wrong}], "--gate") == 1  # nothing is measured again
    assert "1 of 1 checks failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("expect", "options"),
    [
        ({}, ["--gate"]),  # nothing is expected
        ({"expect": {"source": "a"}}, ["--gate", "--dry-run"]),
        ({"expect": "a"}, ["--gate", "--baseline", "OUT"]),
        ({"expect": "a"}, ["--gate", "--shard", "0/2"]),
        ({"expect": "a"}, ["--gate", "--margin", "nan"]),
        ({}, ["--margin", "1"]),  # without a gate
        ({}, ["--allow-other-model", "--gate"]),  # without a baseline
    ],
)
def test_the_command_exits_with_2_where_nothing_could_be_checked(
    run: Any, tmp_path: Path, expect: dict[str, Any], options: list[str]
) -> None:
    words = [str(tmp_path / "out") if word == "OUT" else word for word in options]
    assert run("out", [RECORD | expect], *words) == 2
