"""What fails a gate: an expectation, or a verdict that has changed by more than noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from olmo_sparsity.analysis.attribution.gate import check, refuse_without_expectations
from olmo_sparsity.command.cli import main
from olmo_sparsity.errors import ConfigError, DataError
from tests.support.explanations import make_tokenizer
from tests.support.sources import GIVEN, SOURCES, model_of, with_verdicts
from tests.support.sources import asked as asked_of

pytest_plugins = ["pytester"]


def written(folder: Path, *statements: dict[str, float], se: float = 0.1) -> Path:
    """Tables of one question: for each statement, what the sources give; those above 1 are its
    verdict."""
    rows, cells = [], []
    for number, gives in enumerate(statements):
        named = tuple(name for name, nats in gives.items() if nats > 1)
        verdict = f"rests on {', '.join(named) or 'no source'}"
        rows.append((0, f"text {number}", named, verdict))
        cells += [(0, number, name, nats, 0.0, se, se) for name, nats in gives.items()]
    folder.mkdir(exist_ok=True)
    pd.DataFrame(rows, columns=["question", "text", "sources", "verdict"]).to_parquet(
        folder / "statements.parquet"
    )
    columns = ["question", "statement", "source", "gives", "lost", "se_gives", "se_lost"]
    pd.DataFrame(cells, columns=columns).to_parquet(folder / "matrix.parquet")
    return folder


def asked(tmp_path: Path, expect: Any) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"sources": {}, "question": "q", "expect": expect}))
    return path


FIRST, SECOND = {"a": 4.0, "b": 0.0}, {"a": 0.2, "b": 0.1}


@pytest.mark.parametrize(
    ("expect", "passes"),
    [
        ("a", True),
        ("b", False),
        ("none", False),  # the first statement relies on a
        (["a", "none"], True),
        (["none", None], False),
        ([None, "none"], True),
        ([{"sources": ["a"], "nats": 3.5}], True),
        ([{"sources": ["a"], "nats": 4.5}], False),
        ([{"sources": ["a", "b"]}], False),
        (["a", "none", "a"], False),  # there is no third statement
    ],
)
def test_expectations(tmp_path: Path, expect: Any, passes: bool) -> None:
    out = written(tmp_path / "out", FIRST, SECOND)
    found = check(asked(tmp_path, expect), out)
    assert (not found.failures) == passes, found.describe()


def test_failures_are_written_for_people_and_machines(tmp_path: Path) -> None:
    out = written(tmp_path / "out", FIRST, SECOND)
    found = check(asked(tmp_path, ["b", "none"]), out)
    said = found.describe()
    for words in ("1 of 2 checks failed", "question 1, statement 1: text 0", "found: rests on a"):
        assert words in said
    found.write(out, "q.jsonl")
    suite = ElementTree.parse(out / "gate.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [len(case) for case in suite] == [1, 0]
    assert "expected b; found: rests on a" in str(suite[0][0].get("message"))
    about = json.loads((out / "gate.json").read_text())
    assert (about["passed"], about["cases"][0]["expected"]) == (False, "b")


def test_a_baseline_fails_changed_verdicts_beyond_noise(tmp_path: Path) -> None:
    before, path = written(tmp_path / "before", FIRST, {"a": 0.9, "b": 0.0}), asked(tmp_path, None)
    same = written(tmp_path / "same", FIRST, {"a": 1.1, "b": 0.0})  # named now, by chance
    assert not check(path, same, before).failures
    lost = written(tmp_path / "lost", {"a": 0.0, "b": 0.0}, {"a": 0.9, "b": 0.0})
    found = check(path, lost, before)
    assert [(case.statement, case.expected) for case in found.failures] == [(1, "rests on a")]
    gone = written(tmp_path / "gone", {"b": 0.0}, {"b": 0.0})  # the source itself is missing
    assert len(check(path, gone, before).failures) == 1
    assert check(path, written(tmp_path / "more", FIRST, SECOND, FIRST), before).unmatched == 1


def test_a_gate_needs_something_to_check(tmp_path: Path) -> None:
    out = written(tmp_path / "out", FIRST)
    with pytest.raises(ConfigError, match="no question has the field `expect`"):
        refuse_without_expectations(asked(tmp_path, None), None)
    (failed,) = check(asked(tmp_path, "c"), out).failures  # a prompt builder has dropped it
    assert failed.found == "the prompt has no source c"
    for wrong in (3, {"source": "a"}, {"sources": ["a"], "nats": -1}, [[3]]):
        with pytest.raises(DataError, match=r"expect=.*must be"):
            check(asked(tmp_path, wrong), out)


def test_an_assertion_shows_what_was_found() -> None:
    found = with_verdicts(asked_of())
    assert found.relies_on("a")
    assert found.relies_on("a", statement=0)
    assert found.relies_on("c", statement=1)
    assert not found.relies_on("c", statement=0)
    assert not found.relies_on(None)
    said = repr(found.relies_on("b", statement=0))
    assert said == "expected: b; found: statement 0, 'w1 w2 w3', relies on a (8.0 nats)"
    with pytest.raises(ConfigError, match="no source is named d"):
        found.relies_on("d")
    with pytest.raises(ConfigError, match="statements 0 to 2"):
        found.relies_on("a", statement=3)
    assert found.sources.statements.tolist() == [(0, 1, 2), (2,), (1,)]
    assert "statement 3 relies on it" in found.sources.verdict[1]


def test_pytest_shows_it_without_a_plugin(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        from dataclasses import replace
        from tests.support.sources import asked, made_up

        def test_it():
            gives = [[8.0, 0.0, 0.1]] * 4 + [[0.0, 8.0, 0.0]]
            e = asked(answer=["w1 w2 w3"] * 4 + ["w5 " * 20])
            assert not replace(e, losses=[made_up(gives, gives)]).relies_on("b")
    """)
    shown = pytester.runpytest_inprocess("-p", "no:cacheprovider").stdout
    shown.fnmatch_lines(
        [
            "E *assert not expected: b; found: statement 4, 'w5 w5 *…', relies on b (8.0 nats); "
            "statement 0, 'w1 w2 w3', relies on a (8.0 nats); statement 1, *; 2 more"
        ]
    )


def test_the_command_exits_with_1_where_a_check_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path, out = tmp_path / "model", tmp_path / "q.jsonl", tmp_path / "out"
    model_of().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    record = {"sources": SOURCES, "question": "w20", "answer": ["w30"]}
    decoys = tmp_path / "decoys.txt"
    decoys.write_text("\n".join(GIVEN["decoys"]))

    def run(expect: Any, *more: str) -> int:
        path.write_text(json.dumps(record | ({} if expect is None else {"expect": expect})))
        words = ["attribute", str(folder), "--questions", str(path), "--out", str(out), "--gate"]
        return main([*words, "--draws", "4", "--decoys", str(decoys), *more])

    assert run(None) == 2
    assert "no question has the field `expect`" in capsys.readouterr().err
    assert run("none") in (0, 1)  # of a model that knows nothing
    (named,) = pd.read_parquet(out / "statements.parquet").sources
    wrong = "a" if "a" not in named else "none"
    assert run(wrong) == 1  # nothing is measured again
    said = capsys.readouterr()
    assert "1 of 1 checks failed" in said.out
    assert f"expected (expect): {wrong if wrong == 'a' else 'no source'}" in said.out
    assert run(None, "--baseline", str(out)) == 0
    assert json.loads((out / "gate.json").read_text())["passed"]
    assert run("none", "--message", "2") == 2


def test_the_command_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = tmp_path / "model", tmp_path / "log.json"
    read = make_tokenizer(bos=False)
    read.chat_template = "{% for m in messages %} {{ m.content }}{% endfor %} A:"
    model_of().save_pretrained(folder)
    read.save_pretrained(folder)
    log = [
        {"role": "system", "content": "w1 w2 w3\n\nw5 w6 w7"},
        {"role": "user", "content": "w20 w21"},
        {"role": "assistant", "content": "w1 w2 w3"},
    ]
    path.write_text(json.dumps(log))
    (tmp_path / "decoys.txt").write_text("\n".join(GIVEN["decoys"]))
    words = ["attribute", str(folder), "--messages", str(path)]
    words += ["--decoys", str(tmp_path / "decoys.txt"), "--draws", "4"]
    assert main([*words, "--dry-run"]) == 0
    assert main(words) == 0
    assert "system: w5 w6 w7: " in capsys.readouterr().out
    assert main([*words, "--message", "0"]) == 2
    assert "is of system" in capsys.readouterr().err
    assert main([*words, "--question", "w1"]) == 2
