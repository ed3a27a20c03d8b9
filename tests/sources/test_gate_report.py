"""How failures are shown: as text, JUnit and JSON (gate/report.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.sources.gate import suite
from olmo_sparsity.sources.gate.answers import (
    read_answers,
)
from olmo_sparsity.sources.gate.gate import check
from olmo_sparsity.sources.gate.report import GateReport
from tests.support.stored_answers import (
    RESTS_ON_A,
    RESTS_ON_NONE,
    write_answers,
    write_run,
)


@pytest.fixture
def failed(questions: Callable[[Any], Path], tmp_path: Path) -> GateReport:
    """A report of one failure among two checks, written into `out`."""
    out = write_run(tmp_path / "out", RESTS_ON_A, RESTS_ON_NONE)
    (answer,) = read_answers(out)
    write_answers(out, [replace(answer, id="opening-hours", asked="When is it open?", seconds=3.0)])
    report = check(questions(["b", "none"]), out)
    report.write(out, "q\0.jsonl")
    return report


def test_a_failure_is_shown_with_its_question(failed: GateReport) -> None:
    first, second, *_ = failed.describe().splitlines()
    assert first == "1 of 2 checks of `expect` failed: failed"
    assert second == "question 1 (opening-hours), statement 1: text 0"


def test_failures_are_written_as_junit(failed: GateReport, tmp_path: Path) -> None:
    suite = ElementTree.parse(tmp_path / "out" / "gate.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("time")) == ("2", "1", "3.000")
    cases = list(suite.iter("testcase"))
    assert [len(case) for case in cases] == [1, 0]
    assert [case.get("time") for case in cases] == ["1.500", "1.500"]
    name = cases[0].get("name") or ""
    assert "opening-hours" in name
    assert "When is it open?" in name
    assert (cases[0][0].text or "").splitlines()[0] == "text 0"


def test_failures_are_written_as_json(failed: GateReport, tmp_path: Path) -> None:
    report = json.loads((tmp_path / "out" / "gate.json").read_text())
    assert (report["passed"], report["checks"][0]["expected"]) == (False, "b")


def test_failures_of_a_gate_that_passes_are_written_as_skipped(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out", *[RESTS_ON_A] * 9, RESTS_ON_NONE)
    report = check(questions(["a"] * 10), out, must_pass=0.9)
    first = "1 of 10 checks of `expect` failed (90% must pass): passed\n"
    assert report.describe().startswith(first)
    report.write(out, "q")
    assert json.loads((out / "gate.json").read_text())["passed"]
    suite = ElementTree.parse(out / "gate.xml").getroot()[0]
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "1")
    assert [item.tag for case in suite.iter("testcase") for item in case] == ["skipped"]


def test_failures_are_counted_by_what_expects_them(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out", RESTS_ON_A, RESTS_ON_NONE)
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A, RESTS_ON_NONE)
    report = check(questions(["b", "none"]), out, earlier, must_pass=0.9)
    (first, *_) = report.describe().splitlines()
    assert first == (
        "1 of 2 checks of `expect` failed (90% must pass), 0 of 2 of the baseline: failed"
    )
    report = check(questions([None, None]), out, earlier)
    assert report.describe() == "0 of 2 checks of the baseline failed: passed"


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "questions is an empty list"),
        ([{"question": "Who?", "expect": {"a"}}], "question 1 cannot be written as JSON"),
    ],
)
def test_questions_in_memory_that_cannot_be_a_file_are_refused(
    tmp_path: Path, questions: Any, message: str
) -> None:
    """The message was about a file that the user did not write, or an error of the library."""
    with pytest.raises(ConfigError, match=message):
        suite.check("demo", questions, tmp_path / "gate")
    assert not [*tmp_path.iterdir()]
