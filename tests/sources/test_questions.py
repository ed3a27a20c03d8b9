"""Many questions in one file: the same verdicts as one by one, resumed and shared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity import Answer, attribute, check
from olmo_sparsity.analysis.options import ModelOptions
from olmo_sparsity.analysis.request import build_group
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.command.cli import main
from olmo_sparsity.models.load import wrap_model
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.sources.gate import gate
from olmo_sparsity.sources.gate.expectations import read_expectations
from olmo_sparsity.sources.gate.questions import count_questions, measure_questions
from olmo_sparsity.sources.gate.questions_file import read_questions
from olmo_sparsity.sources.options import SourceSettings
from olmo_sparsity.sources.request import AttributeRequest
from tests.support.explanations import make_tokenizer
from tests.support.sources import GIVEN, SOURCES, model_of

RECORDS: list[dict[str, Any]] = [
    {"sources": SOURCES, "question": "w20 w21", "answer": ["w1 w2 w3", "w8 w9"]},
    {"sources": ["w13 w14 w15 w16 w17", "w18 w19 w22"], "question": "w23", "answer": "w18 w19"},
    {
        "sources": {"d": "w24 w25 w26", "e": "w27 w28"},
        "question": "w29 w30",
        "answer": "w1",
        "reasoning": "w5 w6 w7 w8 w9",
    },
]


@pytest.fixture
def model() -> LoadedModel:
    return wrap_model(model_of(), make_tokenizer())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, RECORDS)) + "\n\n")
    return tmp_path / "q.jsonl"


def measured(
    model: LoadedModel, questions: Path, out: Path, *, decoys: Any = None,
    shard: tuple[int, int] = (0, 1), **given: Any,
) -> Any:  # fmt: skip
    return measure_questions(common(model, decoys=decoys, **given), questions, out, shard=shard)


def common(model: Any, *, decoys: Any = None, **given: Any) -> AttributeRequest:
    settings, loading = build_group(SourceSettings, given), build_group(ModelOptions, given)
    return AttributeRequest(model=model, decoys=decoys, settings=settings, loading=loading)


def test_each_question_is_explained(model: LoadedModel, path: Path, tmp_path: Path) -> None:
    found = measured(model, path, tmp_path / "out", decoys=GIVEN["decoys"])
    assert isinstance(found, pd.DataFrame)
    matrix = pd.read_parquet(tmp_path / "out" / "matrix.parquet")
    assert found.question.tolist() == [0, 0, 1, 2]
    for number, record in enumerate(RECORDS):
        sources = record["sources"]
        if isinstance(sources, list):
            sources = {f"source {i}": text for i, text in enumerate(sources, 1)}
        one = attribute(model, **record | {"sources": sources}, decoys=GIVEN["decoys"])
        rows = found[found.question == number]
        assert rows.verdict.tolist() == one.statements.verdict.tolist()
        cells = matrix[matrix.question == number]
        np.testing.assert_allclose(cells.lost, one.matrix.lost, atol=1e-6)


def test_each_question_has_a_page(model: LoadedModel, path: Path, tmp_path: Path) -> None:
    out, pages, request = tmp_path / "out", tmp_path / "pages", common(model, draws=2)
    assert measure_questions(request, path, out) is not None
    assert measure_questions(request, path, out, pages=pages) is not None
    written = {page.name: page.stat().st_mtime_ns for page in pages.iterdir()}
    assert sorted(written) == ["000000.html", "000001.html", "000002.html", "index.html"]
    index = (pages / "index.html").read_text()
    assert re.search(r'<a href="000000.html">w20 w21</a></td><td>2</td><td>\d</td><td>\d<', index)
    (pages / "000001.html").unlink()
    measure_questions(request, path, out, pages=pages)
    again = {page.name: page.stat().st_mtime_ns for page in pages.iterdir()}
    changed = {name for name in written if again[name] != written[name]}
    assert changed == {"000001.html", "index.html"}


def test_a_file_in_place_of_the_folder_of_pages_is_refused_before_anything_is_computed(
    model: LoadedModel, path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"'.*q\.jsonl' is a file; pass a folder"):
        measure_questions(common(model, draws=2), path, out, pages=path)
    assert not out.exists()


def test_other_questions_give_decoys_and_the_cost_is_counted(
    model: LoadedModel, path: Path, tmp_path: Path
) -> None:
    cost = count_questions(common(model, draws=4), path)
    measured(model, path, tmp_path / "out", draws=4)
    files = sorted((tmp_path / "out" / "questions").iterdir())
    spent = [json.loads(file.read_text())["token_forwards"] for file in files]
    assert 0 < sum(spent) <= cost.token_forwards
    texts = [*RECORDS[1]["sources"], *RECORDS[2]["sources"].values()]
    one = attribute(model, **RECORDS[0], decoys=texts, draws=4)
    found = pd.read_parquet(tmp_path / "out" / "statements.parquet")
    assert found[found.question == 0].nats.tolist() == one.statements.nats.tolist()


def test_it_resumes_and_processes_share_it(
    model: LoadedModel, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert measured(model, path, out, shard=(0, 2)) is None
    finished = {file.name: file.read_text() for file in (out / "questions").iterdir()}
    assert set(finished) == {"000000.json", "000002.json"}
    shared = measured(model, path, out, shard=(1, 2))
    assert {name: (out / "questions" / name).read_text() for name in finished} == finished
    whole = measured(model, path, tmp_path / "whole")
    pd.testing.assert_frame_equal(shared, whole)
    monkeypatch.setattr("olmo_sparsity.sources.gate.questions.LoadedRequest", None)
    pd.testing.assert_frame_equal(measured(model, path, out), whole)


def test_results_of_other_options_or_tokenizers_are_not_resumed(
    model: LoadedModel, path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    measured(model, path, out)
    with pytest.raises(ConfigError, match="draws"):
        measured(model, path, out, draws=5)
    with pytest.raises(ConfigError, match="prefix"):
        measured(model, path, out, prefix="none")
    with_template = make_tokenizer()
    with_template.chat_template = "{{ messages }}"
    with_token = make_tokenizer()
    with_token.add_tokens(["w1 w2"])
    for tokenizer, name in ((with_template, "chat_template"), (with_token, "tokenizer")):
        with pytest.raises(ConfigError, match=name):
            measured(wrap_model(model_of(), tokenizer), path, out)


def test_a_question_without_sources_rests_on_none(
    model: LoadedModel, path: Path, tmp_path: Path
) -> None:
    """A prompt builder that finds nothing does not end the suite."""
    empty = {"sources": {}, "question": "w20", "answer": "w1 w2 w3", "id": "empty"}
    path.write_text("\n".join(map(json.dumps, [empty | {"expect": "none"}, RECORDS[0]])))
    found = measured(model, path, tmp_path / "out", decoys=GIVEN["decoys"], draws=2)
    assert found[found.question == 0].kind.tolist() == ["none"]
    assert count_questions(common(model), path).token_forwards > 0
    assert not gate.check(path, tmp_path / "out").failures
    path.write_text("\n".join(map(json.dumps, [empty | {"expect": "a"}, RECORDS[0]])))
    (failure,) = gate.check(path, tmp_path / "out").failures
    assert (failure.id, failure.found) == ("empty", "the prompt has no source a")
    path.write_text(json.dumps(empty | {"answer": None}))
    with pytest.raises(DataError, match=r"q\.jsonl:1.*answer"):
        read_questions(common(None), path)


def test_a_test_calls_the_gate(tmp_path: Path) -> None:
    given = {"tokenizer": make_tokenizer(), "decoys": GIVEN["decoys"], "draws": 2}
    asked = [RECORDS[0] | {"expect": [None, None]}, RECORDS[1] | {"expect": "gone.md"}]
    with pytest.raises(ConfigError, match="expect"):
        check(model_of(), [RECORDS[0] | {"expect": None}], tmp_path / "none", **given)
    report = check(model_of(), asked, tmp_path / "out", pages=tmp_path / "pages", **given)
    assert not report
    assert "the prompt has no source gone.md" in repr(report)
    index = (tmp_path / "pages" / "index.html").read_text()
    assert re.findall(r"<td>(passed|failed|none)</td>", index) == ["none", "failed"]
    assert (tmp_path / "out" / "gate.xml").exists()
    with pytest.raises(TypeError, match="drawz"):
        check(model_of(), asked, tmp_path / "out", **given, drawz=3)


GOOD = json.dumps(RECORDS[0], ensure_ascii=False)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (GOOD.replace('"b"', '"a"'), "a"),
        (GOOD[:-1] + ', "expect": "a", "expect": "none"}', "expect"),
        (GOOD.replace('"question"', '"answer": "w1", "question"'), "answer"),
    ],
)
def test_a_key_that_a_line_has_twice_is_named(line: str, key: str, path: Path) -> None:
    path.write_text(GOOD + "\n" + line)
    with pytest.raises(DataError, match=rf"q\.jsonl:2: the key '{key}' is there twice"):
        read_questions(common(None), path)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        f"[{GOOD}]",
        '{"question": "w1"}',
        json.dumps(RECORDS[0] | {"anwser": "w1"}),
        json.dumps(RECORDS[0] | {"sources": {"\ud800": "w1"}}),
        json.dumps(RECORDS[0] | {"\ud800": "w1"}),
        *(
            json.dumps(RECORDS[0] | wrong)
            for wrong in (
                {"answer": True},
                {"answer": ["w1", None]},
                {"answer": {}},
                {"answer": {"text": "w1 w2", "spans": 3}},
                {"answer": {"text": "w1 w2", "spans": [[0, 2, 3]]}},
                {"message": 1},
                {"passages": "document"},
                {"sources": ["w1", "", "w2"]},
                {"sources": {"a": 3}},
                {"sources": 3},
                {"question": None},
                {"reasoning": ["w1"]},
                {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
                {"messages": [{"role": r, "content": "w1"} for r in ("tool", "user", "assistant")]},
            )
        ),
    ],
)
def test_lines_that_are_no_questions_are_named(line: str, path: Path) -> None:
    path.write_text(GOOD + "\n" + line)
    with pytest.raises(DataError, match=r"q\.jsonl:2") as caught:
        read_questions(common(None), path)
    assert "\n" not in str(caught.value)
    path.write_text("\n")
    with pytest.raises(DataError, match=r"q\.jsonl"):
        read_questions(common(None), path)


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("1921", "1921"),
        ("[3, 1.50, 1e3]", ["3", "1.50", "1e3"]),
        ("null", None),
        ('"a\u2028b\x85c"', "a\u2028b\x85c"),
        ('{"text": "w1 w2", "spans": [[0, 2]]}', Answer("w1 w2", [(0, 2)])),
    ],
)
def test_an_answer_is_read_as_it_is_written(answer: str, read: Any, path: Path) -> None:
    """Numbers as their digits, and marks of line ends within a text."""
    path.write_text(GOOD.replace('["w1 w2 w3", "w8 w9"]', answer) + "\n" + GOOD)
    found = read_questions(common(None), path)
    assert [one.answer for one in found] == [read, ["w1 w2 w3", "w8 w9"]]


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"question": "w1 \ud83d"}, r"q\.jsonl:2: question: character 3 is \\ud83d"),
        ({"sources": {"a": "w1", "b": "\udc00"}}, r"q\.jsonl:2: sources, key 'b': character 0"),
        ({"answer": ["w1", "w\udc00"]}, r"q\.jsonl:2: answer, number 1: character 1"),
    ],
)
def test_half_a_letter_is_named_by_line_and_field(
    wrong: dict[str, Any], place: str, path: Path
) -> None:
    path.write_text(GOOD + "\n" + json.dumps(RECORDS[0] | wrong))
    with pytest.raises(DataError, match=place):
        read_questions(common(None), path)


@pytest.mark.parametrize("second", ["opening", 7])
def test_two_questions_of_one_id_are_refused_by_their_lines(second: Any, path: Path) -> None:
    ids = [str(second), "other", None, None, second]
    records = [RECORDS[0] | ({} if id is None else {"id": id}) for id in ids]
    path.write_text("\n".join(map(json.dumps, records)))
    lines = rf"q\.jsonl:5 and .*q\.jsonl:1 have the same id, '{second}'"
    with pytest.raises(DataError, match=lines):
        read_questions(common(None), path)
    with pytest.raises(DataError, match=r"q\.jsonl:5"):
        read_expectations(path)
    path.write_text("\n".join(map(json.dumps, records[:-1])))
    assert len(read_questions(common(None), path)) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--questions", "q.jsonl"], "stopped; the same command goes on"),
        (["--source", "a"], "stopped"),
    ],
)
def test_questions_that_were_stopped_go_on(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("olmo_sparsity.command.attribute.run_attribute", stop)
    assert main(["attribute", "demo", *words]) == 130
    assert capsys.readouterr().err == f"olmo-sparsity: {message}\n"


def test_a_log_says_which_question_is_read(
    model: LoadedModel, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Progress, "LEAST_PAUSE_S", 0)
    records = [RECORDS[0] | {"id": "opening"}, RECORDS[1]]
    path.write_text("\n".join(map(json.dumps, records)))
    measured(model, path, tmp_path / "out")
    lines = [line for line in capsys.readouterr().err.splitlines() if "reading " in line]
    begun = [line for line in lines if line.startswith("explaining · questions")]
    assert begun == [
        f"explaining · questions 1/2 · reading opening: {', '.join(SOURCES)}",
        "explaining · questions 2/2 · reading question 2: source 1, source 2",
    ]
