"""Check stored answers against what a questions file expects, and against an earlier run.

Place in the flow: suite.py → stored answers (answers.py) → **`check`** → a `GateReport`
(gate/report.py). suite.py calls `check_has_expectations` before anything is measured, so that a
file that expects nothing fails at once. A `Check` compares one verdict with one expectation:

    field `expect` of a question   → expectations.py   → checks of the kind "expect"
    verdicts of an earlier run     → baseline.py       → checks of the kinds "baseline" and "new"

For example, two questions of which the first expects a source:

    question 1   "expect": "faq.md"   rests on report.pdf    fails
    question 2   (without `expect`)   rests on faq.md        passes, if the baseline has it, too
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from olmo_sparsity.base.errors import ConfigError, DataError, check_type, printable
from olmo_sparsity.base.progress import say
from olmo_sparsity.sources.gate.answers import (
    IDENTITY,
    StoredAnswer,
    StoredStatement,
    identity_in,
    read_answers,
)
from olmo_sparsity.sources.gate.baseline import StatementKey, compare_with_baseline
from olmo_sparsity.sources.gate.expectations import Expectation, meets, read_expectations
from olmo_sparsity.sources.gate.questions_file import read_lines
from olmo_sparsity.sources.gate.report import Check, GateReport, check_of
from olmo_sparsity.sources.gate.same_model import compare_identities, compare_servers
from olmo_sparsity.sources.verdicts.evidence import SEVERAL_NATS

MOST_MARGIN = SEVERAL_NATS
"""Largest margin in nats. With a larger one, a statement that loses several nats could pass as
resting on no source."""


# --- before anything is computed ------------------------------------------------------------------


def check_has_expectations(
    questions: str | Path,
    out: str | Path,
    identity: Mapping[str, Any],
    baseline: str | Path | None,
    allow_other_model: bool = False,
    must_pass: float = 1.0,
) -> None:
    """Raise if `check` would have nothing to check against.

    Args:
        questions: The questions file.
        out: The folder of the results of this run.
        identity: What identity.json of this run will say.
        baseline: The folder of the earlier run; None means that `expect` alone is checked.
        allow_other_model: The earlier run may be of another model.
        must_pass: The fraction of the checks of `expect` that must pass.
    """
    _warn_of_missing_sources(questions)
    # `must_pass` is a fraction of the checks of `expect` alone.
    if must_pass < 1 and baseline is not None and not any(read_expectations(questions)):
        raise ConfigError(
            f"must_pass={must_pass} is a share of the checks of `expect`, and no question of "
            f"{questions} has it; add `expect`, or omit must_pass (a baseline's checks must all "
            "pass)"
        )
    if baseline is None:
        _check_each_has_expectation(questions)
        return
    if Path(baseline).resolve() == Path(out).resolve():
        raise ConfigError(f"baseline={baseline} is also --out; pass the folder of an earlier run")
    if not Path(baseline, IDENTITY).exists():
        raise ConfigError(
            f"--baseline {baseline} holds no results of questions; pass the --out folder of an "
            "earlier run"
        )
    # Both raise errors about the baseline, before hours of work.
    compare_identities(identity, baseline, allow_other_model)
    read_answers(baseline)


def _warn_of_missing_sources(questions: str | Path) -> None:
    """Print which expected sources a question does not have: a prompt builder has dropped them, or
    a name is misspelt. Their checks will fail, and a user need not wait for that."""
    for line, expectations in zip(read_lines(questions), read_expectations(questions), strict=True):
        sources = line.record.get("sources")
        if not isinstance(sources, Mapping):
            continue  # passages of messages have names when they are read
        expected_names = {name for expectation in expectations for name in expectation.sources}
        missing = sorted(expected_names - sources.keys())
        if missing:
            known = printable(", ".join(sources)[:200])
            names = printable(", ".join(missing))
            say(f"{line.location} expects {names}, which is none of its sources ({known})")


def _check_each_has_expectation(questions: str | Path) -> None:
    """Raise unless each question has `expect`: without a baseline it would check nothing."""
    expectations_of_questions = read_expectations(questions)
    if not any(expectations_of_questions):
        raise ConfigError(f"{questions}: no question has `expect`; add it, or pass --baseline")
    for line in read_lines(questions):
        if "expect" not in line.record:
            raise DataError(
                f"{line.location} has no `expect`, so nothing is checked; add it (null accepts any "
                "verdict), or pass --baseline"
            )


def check_margin(margin: float) -> None:
    """Raise ConfigError unless the margin is a number of nats that is not too large."""
    accepted = f"a number of nats from 0 to {MOST_MARGIN:g}"
    check_type("margin", margin, Real, accepted)
    if not 0 <= margin <= MOST_MARGIN:
        raise ConfigError(f"margin={margin} must be {accepted}")


def check_must_pass(must_pass: float) -> None:
    """Raise ConfigError unless this is a fraction by which some checks must pass, and no more than
    there are."""
    accepted = "a share above 0 and at most 1, as 0.9"
    check_type("must_pass", must_pass, Real, accepted)
    if not 0 < must_pass <= 1:
        raise ConfigError(f"must_pass={must_pass} must be {accepted}")


# --- the checks -----------------------------------------------------------------------------------


def check(
    questions: str | Path,
    out: str | Path,
    baseline: str | Path | None = None,
    allow_other_model: bool = False,
    *,
    margin: float = 0.0,
    must_pass: float = 1.0,
    new_need_source: bool = False,
) -> GateReport:
    """Check the results in `out` against `expect` of the questions, and against an earlier run.

    Args:
        questions: The questions file that was answered.
        out: The folder of the results.
        baseline: The folder of the earlier run; None means that `expect` alone is checked.
        allow_other_model: The earlier run may be of another model.
        margin: Nats by which an effect may miss, or exceed, what a verdict requires.
        must_pass: The fraction of the checks of `expect` that must pass. All of a baseline must.
        new_need_source: Fail statements that the baseline does not have and that rest on no source.
    """
    check_margin(margin)
    check_must_pass(must_pass)
    answers = read_answers(out)
    checks = _check_expectations(questions, out, answers, margin)
    notes = [_note_of_margin(check) for check in checks if check.by_margin]
    if baseline is None:
        return GateReport(checks, notes, must_pass)

    notes += compare_identities(identity_in(out), baseline, allow_other_model)
    notes += compare_servers(Path(out), Path(baseline), allow_other_model)
    comparison = compare_with_baseline(
        answers, read_answers(baseline), baseline, _as_expected(checks), new_need_source
    )
    notes += comparison.notes
    # A statement whose earlier verdict says nothing is checked if `expect` is about it.
    expected_keys = {StatementKey(check.question, check.statement) for check in checks}
    unchecked = [key for key in comparison.unchecked if key not in expected_keys]
    if unchecked:
        notes.append(_note_of_unchecked(unchecked))
    return GateReport([*checks, *comparison.checks], notes, must_pass)


def _check_expectations(
    questions: str | Path, out: str | Path, answers: Sequence[StoredAnswer], margin: float
) -> list[Check]:
    """Return a check of each expectation of a questions file."""
    expectations_of_questions = read_expectations(questions)
    num_questions = len(expectations_of_questions)
    if num_questions != len(answers):
        raise DataError(
            f"{out} has {len(answers)} questions, and {questions} {num_questions}; "
            "pass the file that the results are of"
        )

    checks: list[Check] = []
    for answer, expectations in zip(answers, expectations_of_questions, strict=True):
        checks += [_check_expectation(expected, answer, margin) for expected in expectations]

    # A text is split into statements only when it is answered, so the length of the list was not
    # checked when the file was read.
    for answer, line in zip(answers, read_lines(questions), strict=True):
        expect = line.record.get("expect")
        if isinstance(expect, list) and len(expect) < len(answer.statements):
            checks.append(_check_of_too_few(answer, len(expect)))
    return checks


def _check_of_too_few(answer: StoredAnswer, num_entries: int) -> Check:
    """Return the failed check of an answer with more statements than `expect` has entries."""
    return check_of(
        answer,
        statement=None,
        text=answer.asked,
        expected=f"{num_entries} statements, as `expect` has entries",
        found=f"{len(answer.statements)} statements",
        passed=False,
    )


def _check_expectation(expected: Expectation, answer: StoredAnswer, margin: float) -> Check:
    """Return the check of one expectation. It fails, too, if the prompt has no such source, or the
    answer no such statement."""
    # Statements are counted from 1 where people read it.
    number = None if expected.statement is None else expected.statement + 1
    statements = answer.statements if number is None else answer.statements[number - 1 : number]
    text = " ".join(statement.text for statement in statements)

    missing = _missing_sources(expected, answer)
    if missing:
        return check_of(
            answer,
            statement=number,
            text=text,
            expected=str(expected),
            found=f"the prompt has no source {', '.join(missing)}",
            passed=False,
        )
    if not statements:
        return check_of(
            answer,
            statement=number,
            text="",
            expected=f"{expected} in statement {number}",
            found="no such statement",
            passed=False,
        )

    # Both, so that a check that passes only by the margin gets a note.
    passes_strictly = _is_met(expected, statements, margin=0.0)
    passes = _is_met(expected, statements, margin)
    return check_of(
        answer,
        statement=number,
        text=text,
        expected=str(expected),
        found="; ".join(statement.verdict for statement in statements),
        passed=passes,
        by_margin=passes and not passes_strictly,
    )


def _missing_sources(expected: Expectation, answer: StoredAnswer) -> list[str]:
    """Return the expected sources that the prompt lacks, if the expectation cannot be met without
    them."""
    in_prompt = answer.source_texts.keys()
    missing = sorted(name for name in expected.sources if not expected.names_of(name) & in_prompt)
    # Of alternatives, one in the prompt is enough.
    if expected.is_either and len(missing) < len(expected.sources):
        return []
    return missing


def _is_met(expected: Expectation, statements: Sequence[StoredStatement], margin: float) -> bool:
    """Return whether statements meet an expectation. Of all statements together one must rely on
    the sources; but if no source is expected, none of them may rely on any."""
    meets_expected = [meets(statement, expected, margin) for statement in statements]
    if expected.statement is None and not expected.sources:
        return all(meets_expected)
    return any(meets_expected)


def _as_expected(checks: Sequence[Check]) -> set[StatementKey]:
    """Return the statements that pass an expectation of their own, without help of the margin. What
    a person expects outweighs what an earlier run found."""
    return {
        StatementKey(check.question, check.statement)
        for check in checks
        if check.passed and not check.by_margin and check.statement is not None
    }


# --- notes ----------------------------------------------------------------------------------------


def _note_of_margin(check: Check) -> str:
    """Return the note of a check that passes only by the margin."""
    return f"{check.where} passes by the margin: expected {check.expected}; found: {check.found}"


SHOWN_STATEMENTS = 5
"""Statements that a note lists by their numbers."""


def _note_of_unchecked(keys: Sequence[StatementKey]) -> str:
    """Return a note of the statements that neither `expect` nor the baseline checks."""
    shown = [str(key) for key in keys[:SHOWN_STATEMENTS]]
    if len(keys) > SHOWN_STATEMENTS:
        shown.append("…")
    subject = "1 statement" if len(keys) == 1 else f"{len(keys)} statements"
    verb = "is" if len(keys) == 1 else "are"
    return (
        f"{subject} of the baseline {verb} undecided, so that any verdict passes; "
        f"write `expect` for {'; '.join(shown)}"
    )
