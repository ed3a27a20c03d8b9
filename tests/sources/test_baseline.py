"""Which changes since an earlier run fail a gate (baseline.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.sources.gate.answers import read_answers
from olmo_sparsity.sources.gate.baseline import compare_with_baseline
from olmo_sparsity.sources.gate.gate import check
from tests.support.stored_answers import (
    RESTS_ON_A,
    RESTS_ON_NONE,
    NatsBySource,
    answer_of,
    cell,
    compare_answers,
    statement_of,
    write_answers,
    write_run,
)

NEARLY_ON_A: NatsBySource = {"a": 0.9, "b": 0.0}
"""A statement that rests on no source, near the threshold."""

JUST_ON_A: NatsBySource = {"a": 1.1, "b": 0.0}
ON_B: NatsBySource = {"a": 0.0, "b": 4.0}
ON_BOTH: NatsBySource = {"a": 4.0, "b": 4.0}
NO_EFFECT: NatsBySource = {"a": 0.0, "b": 0.0}
WITHOUT_A: NatsBySource = {"b": 0.0}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "fails", "note"),
    [
        pytest.param(RESTS_ON_A, NEARLY_ON_A, False, "", id="nothing changed"),
        pytest.param(RESTS_ON_A, JUST_ON_A, False, "2 now rests on a", id="named by chance"),
        pytest.param(RESTS_ON_A, {"a": 6.0, "b": 0.0}, False, "2 now rests on a", id="named"),
        pytest.param(ON_BOTH, NEARLY_ON_A, False, "1 now rests on b", id="one more source"),
        pytest.param(NO_EFFECT, NEARLY_ON_A, True, "", id="source lost"),
        pytest.param(ON_B, NEARLY_ON_A, True, "", id="another source in its place"),
        pytest.param(WITHOUT_A, WITHOUT_A, True, "sources: a is gone", id="source not in prompt"),
    ],
)
def test_a_statement_fails_if_it_loses_a_source_beyond_noise(
    questions: Callable[[Any], Path],
    tmp_path: Path,
    first: NatsBySource,
    second: NatsBySource,
    fails: bool,
    note: str,
    early: bool,
) -> None:
    """Before, the first of two statements rests on a, and the second nearly does."""
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A, NEARLY_ON_A, early=early)
    now = write_run(tmp_path / "now", first, second, early=early)
    report = check(questions(None), now, earlier)
    assert [failure.statement for failure in report.failures] == ([1] if fails else [])
    assert len(report.notes) == (1 if note else 0)
    assert note in "".join(report.notes)


@pytest.mark.parametrize(
    ("statements", "note"),
    [
        ([RESTS_ON_A, NEARLY_ON_A, RESTS_ON_A], "1 statements are new, 0 gone"),
        ([RESTS_ON_A], "0 statements are new, 1 gone"),
    ],
)
def test_statements_that_are_new_or_gone_are_noted(
    questions: Callable[[Any], Path], tmp_path: Path, statements: list[NatsBySource], note: str
) -> None:
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A, NEARLY_ON_A)
    report = check(questions(None), write_run(tmp_path / "now", *statements), earlier)
    assert not report.failures
    assert report.notes == [f"question 1: {note}"]


def test_checks_follow_the_order_of_the_questions(tmp_path: Path) -> None:
    row = statement_of("text", [], {})
    changed = answer_of([row], {"a": "x"}, asked="p")
    same = answer_of([row], {"a": "x"}, number=1, asked="q")
    # The second question is equal in all, and so is matched before the first.
    now = [replace(changed, source_texts={"a": "new"}), same]
    comparison = compare_with_baseline(now, [changed, same], "earlier", set(), False)
    assert [check.question for check in comparison.checks] == [1, 2]


def test_a_source_that_is_lost_by_noise_is_noted(tmp_path: Path) -> None:
    named = statement_of("text", ["a"], {"a": cell(1.6, 0.1)})
    not_named = statement_of("text", [], {"a": cell(1.4, -0.1)})
    earlier = answer_of([named], {"a": "x"})
    report = compare_answers(tmp_path, replace(earlier, statements=[not_named]), earlier)
    assert report
    assert any("lost a by no more than noise" in note for note in report.notes)


def test_a_source_behind_the_reasoning_may_not_be_lost(tmp_path: Path) -> None:
    step = {"reasoning 1": cell(4.0, 3.0)}
    leads_to_a = statement_of("text", ["reasoning 1"], step, origins=["a"])
    leads_to_none = statement_of("text", ["reasoning 1"], step, origins=[])
    earlier = answer_of([leads_to_a], {"a": "x", "reasoning 1": "r"})
    assert not compare_answers(tmp_path, replace(earlier, statements=[leads_to_none]), earlier)


def test_another_sentence_of_the_reasoning_may_lead_to_the_source(tmp_path: Path) -> None:
    first = statement_of("text", ["reasoning 1"], {"reasoning 1": cell(4.0, 3.0)}, origins=["a"])
    second = statement_of("text", ["reasoning 2"], {"reasoning 2": cell(4.0, 3.0)}, origins=["a"])
    earlier = answer_of([first], {"a": "x", "reasoning 1": "r"})
    now = answer_of([second], {"a": "x", "reasoning 2": "s"})
    assert compare_answers(tmp_path, now, earlier)


def test_what_is_expected_outweighs_the_baseline(tmp_path: Path) -> None:
    text = "It was opened in June 1921."
    on_a = statement_of(text, ["a"], {"a": cell(4.0, 1.0)})
    on_b = statement_of(text, ["b"], {"a": cell(0.0, -1.0), "b": cell(4.0, 1.0)})
    earlier = answer_of([on_a], {"a": "x"})
    now = answer_of([on_b], {"a": "x", "b": "y"})
    assert compare_answers(tmp_path, now, earlier).failures
    report = compare_answers(tmp_path, now, earlier, answer=[text], expect=["b"])
    assert not report.failures
    assert any("as `expect` says" in note for note in report.notes)


def test_a_new_statement_that_rests_on_nothing_fails_on_request(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A)
    out = write_run(tmp_path / "out", RESTS_ON_A, RESTS_ON_NONE, RESTS_ON_A)
    assert check(questions(None), out, earlier)
    report = check(questions(None), out, earlier, new_need_source=True)
    assert [(failure.kind, failure.statement) for failure in report.failures] == [("new", 2)]
    # Unless that is what it should rest on.
    assert check(questions([None, "none", None]), out, earlier, new_need_source=True)


# --- what an undecided statement of the baseline checks ---


def test_undecided_statements_of_the_baseline_are_counted_unless_expect_checks_them(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out", *[RESTS_ON_NONE] * 3)
    earlier = write_run(tmp_path / "earlier", *[RESTS_ON_NONE] * 3)
    (answer,) = read_answers(earlier)
    undecided = [
        replace(row, is_undecided=number > 0) for number, row in enumerate(answer.statements)
    ]
    write_answers(earlier, [replace(answer, statements=undecided)])
    report = check(questions([None, None, None]), out, earlier)
    assert report.passed
    assert "2 statements of the baseline are undecided" in report.notes[-1]
    assert "question 1, statement 2; question 1, statement 3" in report.notes[-1]
    report = check(questions([None, None, "none"]), out, earlier)
    assert report.notes[-1] == (
        "1 statement of the baseline is undecided, so that any verdict passes; write `expect` for "
        "question 1, statement 2"
    )
    assert not check(questions([None, "none", "none"]), out, earlier).notes


# --- a share of checks excuses no regression ------------------------------------------------------


def test_a_share_does_not_excuse_a_regression(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out", *[RESTS_ON_A] * 9, NO_EFFECT)
    earlier = write_run(tmp_path / "earlier", *[RESTS_ON_A] * 10)
    report = check(questions([*["a"] * 9, None]), out, earlier, must_pass=0.5)
    assert [failure.kind for failure in report.failures] == ["baseline"]
    assert not report


def test_a_share_does_not_excuse_a_baseline_without_common_questions(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    out = write_run(tmp_path / "out", *[RESTS_ON_A] * 30)
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A, asked="another")
    report = check(questions(["a"] * 30), out, earlier, must_pass=0.9)
    assert len(report.failures) == 1
    assert not report


# --- nothing in common, or a damaged baseline -----------------------------------------------------


def failures_beside(earlier: Path, questions: Callable[[Any], Path], tmp_path: Path) -> list[str]:
    """Return the kinds of failures of one question whose statement is as expected."""
    out = write_run(tmp_path / "out", RESTS_ON_A)
    return [failure.kind for failure in check(questions("a"), out, earlier).failures]


def test_a_baseline_without_questions_fails(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    write_answers(tmp_path / "earlier", [])
    assert failures_beside(tmp_path / "earlier", questions, tmp_path) == ["baseline"]


def test_a_baseline_of_other_questions_fails(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A, asked="another")
    assert failures_beside(earlier, questions, tmp_path) == ["baseline"]


def test_an_answer_without_a_similar_statement_fails(
    questions: Callable[[Any], Path], tmp_path: Path
) -> None:
    statements = [
        statement_of("It rained.", ["a"], {"a": cell(4.0, 3.0)}),
        statement_of("He left.", ["a"], {"a": cell(4.0, 3.0)}, number=1),
    ]
    write_answers(tmp_path / "earlier", [answer_of(statements, {"a": "x"})])
    assert failures_beside(tmp_path / "earlier", questions, tmp_path) == ["baseline"]


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
def test_a_baseline_edited_by_hand_is_named(
    questions: Callable[[Any], Path], tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    earlier = write_run(tmp_path / "earlier", RESTS_ON_A)
    out = write_run(tmp_path / "out", RESTS_ON_A)
    file = earlier / "questions" / "000000.json"
    content = json.loads(file.read_text())
    change(content["gate"])
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"earlier/questions/000000\.json"):
        check(questions(None), out, earlier)
