"""What fails a gate: an expectation, a verdict that has changed by more than noise, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.files import sha256_of
from olmo_sparsity.command.cli import main
from olmo_sparsity.sources.gate import check, refuse_without_checks
from olmo_sparsity.sources.questions import (
    VERSION,
    StoredAnswer,
    StoredCell,
    StoredStatement,
    identity_in,
)
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
    """Results of one question: of each statement, what sources give; above 1 it relies on them.
    `early`: what is lost without them decides, so that what they give is null in all rows."""
    rows = []
    for number, gives in enumerate(statements):
        named = [name for name, nats in gives.items() if nats > 1]
        cells = {
            name: StoredCell(*((None, nats, None) if early else (nats, 0.0, se)), se, nats - 1)
            for name, nats in gives.items()
        }
        verdict = f"rests on {', '.join(named) or 'no source'}"
        rows.append(StoredStatement(number, f"text {number}", named, named, verdict, cells))
    names = {name for row in rows for name in row.cells}
    write(folder, [StoredAnswer(0, question, dict.fromkeys(names, "hash"), rows)], **other)
    return folder


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
    ("expect", "margin", "passes"),
    [
        ("a", 0, True),
        ("b", 0, False),
        (["a", "none"], 0, True),
        (["none", None], 0, False),
        ([{"sources": ["a"], "nats": 3.5}], 0, True),
        ([{"sources": ["a"], "nats": 4.5}], 0, False),
        ([{"sources": ["a"], "nats": 4.5}], 0.5, True),
        ([{"sources": ["a", "b"]}], 0, False),
        (["a", "none", "a"], 0, False),  # there is no third statement
        ("c", 9, False),  # a prompt builder has dropped it
        (["none", None], 2.9, False),  # a gives 3 nats more than it must to be named
        (["none", None], 3.0, True),
        ([None, "a"], 0.7, False),  # and lacks 0.8
        ([None, "a"], 0.81, True),
    ],
)
def test_expectations(
    questions: Any, tmp_path: Path, expect: Any, margin: float, passes: bool
) -> None:
    path, out = questions(expect), stored(tmp_path / "out", FIRST, SECOND)
    strict, found = check(path, out), check(path, out, margin=margin)
    assert (not found.failures) == passes, found.describe()
    pairs = zip(found.checks, strict.checks, strict=True)
    marked = [now.passed and not one.passed for now, one in pairs]
    assert [one.by_margin for one in found.checks] == marked
    assert len(found.notes) == sum(marked)


def test_failures_are_written_for_people_and_machines(questions: Any, tmp_path: Path) -> None:
    out = stored(tmp_path / "out", FIRST, SECOND)
    found = check(questions(["b", "none"]), out)
    assert "1 of 2 checks failed\nquestion 1, statement 1: text 0\n" in found.describe()
    found.write(out, "q\0.jsonl")
    suite = ElementTree.parse(out / "gate.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [len(case) for case in suite.iter("testcase")] == [1, 0]
    about = json.loads((out / "gate.json").read_text())
    assert (about["passed"], about["checks"][0]["expected"]) == (False, "b")


BEFORE = {"a": 4.0, "b": 0.0}, {"a": 0.9, "b": 0.0}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("now", "fails"),
    [
        (BEFORE, []),
        ((FIRST, {"a": 1.1, "b": 0.0}), []),  # named now, by chance
        (({"a": 0.0, "b": 0.0}, BEFORE[1]), [1]),
        (({"a": 4.0, "b": 4.0}, BEFORE[1]), [1]),  # one source has become two
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
    assert bool(found.notes) == (len(now) != 2 or "a" not in now[0])


def test_questions_match_by_content(tmp_path: Path) -> None:
    """A question put before others, equal ones with other sources, one that is gone."""

    def one(number: int, asked: str, text: str, nats: float) -> StoredAnswer:
        cell, named = StoredCell(nats, 0.0, 0.1, 0.1, 0.0), ["a"] * (nats > 1)
        row = StoredStatement(0, "text", named, named, f"{text}, {nats}", {"a": cell})
        return StoredAnswer(number, asked, {"a": text}, [row])

    before = [one(0, "p", "x", 4.0), one(1, "p", "y", 0.0), one(2, "gone", "z", 4.0)]
    now = [one(0, "new", "w", 4.0), one(1, "p", "y", 0.0), one(2, "p", "x", 0.0)]
    write(tmp_path / "before", before)
    write(tmp_path / "now", now)
    path = tmp_path / "q.jsonl"
    path.write_text("{}\n" * 3)
    found = check(path, tmp_path / "now", tmp_path / "before")
    assert [(case.question, case.passed) for case in found.checks] == [(2, True), (3, False)]
    assert [note[:20] for note in found.notes] == ["not in the baseline:", "only in the baseline"]


def test_a_check_that_compares_nothing_fails(questions: Any, tmp_path: Path) -> None:
    path, out = questions("a"), stored(tmp_path / "out", FIRST)
    write(tmp_path / "empty", [])
    other = stored(tmp_path / "other", FIRST, question="another")
    answer = stored(tmp_path / "answer", FIRST)
    file = answer / "questions" / "000000.json"
    file.write_text(file.read_text().replace("text 0", "another text"))
    for baseline in (tmp_path / "empty", other, answer):
        assert [case.kind for case in check(path, out, baseline).failures] == ["baseline"]
    identity = identity_in(out)
    for baseline in (out, tmp_path / "x" / ".." / "out", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="baseline"):
            refuse_without_checks(path, out, identity, baseline)
    with pytest.raises(ConfigError, match="expect"):
        refuse_without_checks(questions([None]), out, identity, None)


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
        refuse_without_checks(questions(None), out, identity_in(out), before)
    found = check(questions(None), out, before, allow_other_model=True)
    assert not found.failures
    assert name in found.notes[0]


def test_an_assertion_shows_what_was_found() -> None:
    found = with_verdicts(asked())
    assert found.relies_on("a")
    assert found.relies_on("a", statement=0)
    assert found.relies_on("c", statement=1)
    assert not found.relies_on("c", statement=0)
    assert not found.relies_on(None)
    assert "'w1 w2 w3', relies on a (8.0 nats)" in repr(found.relies_on("b", statement=0))
    assert len(repr(found.relies_on("b"))) <= 240  # of which pytest prints no more
    for wrong in ({"source": "d"}, {"source": "a", "statement": 3}):
        with pytest.raises(ConfigError):
            found.relies_on(**wrong)
    assert found.sources.statements.tolist() == [(0, 1, 2), (2,), (1,)]


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
    out = tmp_path / "out"
    assert run("out", [RECORD], "--gate") == 2  # nothing is expected
    assert run("out", [RECORD | {"expect": {"source": "a"}}], "--gate", "--dry-run") == 2
    assert run("out", [RECORD | {"expect": "none"}], "--gate") in (0, 1)
    (named,) = pd.read_parquet(out / "statements.parquet").sources
    wrong = "a" if "a" not in named else "none"
    assert run("out", [RECORD | {"expect": wrong}], "--gate") == 1  # nothing is measured again
    assert "1 of 1 checks failed" in capsys.readouterr().out
    for more in (["--baseline", str(out)], ["--shard", "0/2"], ["--margin", "nan"]):
        assert run("out", [RECORD | {"expect": wrong}], "--gate", *more) == 2
    assert run("out", [RECORD], "--margin", "1") == 2
    assert run("out", [RECORD], "--allow-other-model", "--gate") == 2
