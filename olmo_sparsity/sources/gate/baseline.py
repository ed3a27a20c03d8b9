"""Compare answers with the answers of an earlier run, the baseline.

Place in the flow: matching.py pairs questions and statements of both runs →
**`compare_with_baseline`** → gate.py. renamed_sources.py finds the names that sources have now,
statement_changes.py compares two verdicts, and same_model.py has checked before that both runs are
of one model.

A statement fails if its verdict no longer names a source that it named. All other changes are
notes:

    earlier run             this run                   result
    rests on a              rests on a                 passes
    rests on a              rests on no source         fails, if beyond noise
    rests on a              rests on a and b           passes, with a note
    rests on no source      rests on b                 passes, with a note
    undecided               anything                   passes, and is counted as unchecked
    (has no such statement) a new statement            a note; fails on request if it has no source
    a statement             (it is gone)               a note
    an answer               no statement in common     the question fails: nothing was compared
    all its questions       no question in common      the run fails: nothing was compared
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from olmo_sparsity.sources.gate.answers import StoredAnswer, StoredStatement
from olmo_sparsity.sources.gate.matching import match_questions, match_statements
from olmo_sparsity.sources.gate.renamed_sources import (
    current_names,
    describe_changes,
    with_current_names,
)
from olmo_sparsity.sources.gate.report import Check, check_of
from olmo_sparsity.sources.gate.statement_changes import StatementChange


class StatementKey(NamedTuple):
    """Which statement is meant: the numbers of its question and of itself, both from 1. None means
    that a check is about all of them."""

    question: int | None
    statement: int | None

    @staticmethod
    def of(answer: StoredAnswer, statement: StoredStatement) -> StatementKey:
        """Return the key of a statement. Stored numbers are from 0."""
        return StatementKey(answer.question + 1, statement.number + 1)

    def __str__(self) -> str:
        return f"question {self.question}, statement {self.statement}"


class NewStatement(NamedTuple):
    """A statement that the earlier run does not have, and its answer."""

    answer: StoredAnswer
    statement: StoredStatement


@dataclass(frozen=True)
class Comparison:
    """What a comparison with an earlier run finds."""

    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What differs without failing."""

    new_statements: list[NewStatement] = field(default_factory=list)
    """Statements that the earlier run does not have."""

    unchecked: list[StatementKey] = field(default_factory=list)
    """Statements that were undecided and named no source, so that any verdict passes."""

    def extend(self, other: Comparison) -> None:
        """Append the results of another comparison."""
        self.checks.extend(other.checks)
        self.notes.extend(other.notes)
        self.new_statements.extend(other.new_statements)
        self.unchecked.extend(other.unchecked)


def compare_with_baseline(
    answers: Sequence[StoredAnswer],
    earlier_answers: Sequence[StoredAnswer],
    baseline: str | Path,
    as_expected: Set[StatementKey],
    new_need_source: bool,
) -> Comparison:
    """Check each statement that both runs have, and note what else differs.

    Args:
        answers: The answers of this run.
        earlier_answers: The answers of the baseline.
        baseline: The folder of the baseline, for messages.
        as_expected: Statements that pass their `expect`, so that the baseline cannot fail them.
        new_need_source: Fail statements that the baseline does not have and that rest on no source.
    """
    questions = match_questions(answers, earlier_answers)
    comparison = Comparison()
    for answer in questions.only_new:
        comparison.notes.append(f"not in the baseline: {_describe_question(answer)}")
        comparison.new_statements.extend(
            NewStatement(answer, statement) for statement in answer.statements
        )
    for answer in questions.only_earlier:
        comparison.notes.append(f"only in the baseline: {_describe_question(answer)}")

    # In the order of this run's file, not of what the pairs were matched by.
    for answer, earlier_answer in sorted(questions.pairs, key=lambda pair: pair.new.question):
        comparison.extend(_compare_answers(answer, earlier_answer, as_expected))

    if not comparison.checks:
        # A gate that compares nothing must not pass.
        comparison.checks.append(_check_of_no_common_question(baseline))
    if new_need_source:
        for new in comparison.new_statements:
            if StatementKey.of(new.answer, new.statement) not in as_expected:
                comparison.checks.append(_check_of_new_statement(new))
    return comparison


def _describe_question(answer: StoredAnswer) -> str:
    """Return a question in words, for the note that only one of the runs has it."""
    return f"question {answer.question + 1}, '{shorten(answer.asked, 60)}'"


def _check_of_no_common_question(baseline: str | Path) -> Check:
    """Return the failed check of a baseline of other questions."""
    return Check(
        question=None,
        statement=None,
        text="",
        expected="questions in common",
        found=f"nothing was compared: no question is also in {baseline}",
        passed=False,
        kind="baseline",
    )


def _check_of_new_statement(new: NewStatement) -> Check:
    """Return the check that a statement without an earlier one rests on a source."""
    return check_of(
        new.answer,
        statement=new.statement.number + 1,
        text=new.statement.text,
        expected="a source, as the statement is new",
        found=new.statement.verdict,
        passed=bool(new.statement.origins),
        kind="new",
    )


# --- one answer -----------------------------------------------------------------------------------


def _compare_answers(
    answer: StoredAnswer, earlier_answer: StoredAnswer, as_expected: Set[StatementKey]
) -> Comparison:
    """Compare the answer to a question with the earlier answer to it."""
    comparison = Comparison()
    new_names = current_names(answer.source_texts, earlier_answer.source_texts)
    comparison.notes.extend(_notes_of_rewording(answer, earlier_answer))
    comparison.notes.extend(_notes_of_names(answer, new_names))
    # From here on the earlier answer has the names of today, so that names can be compared.
    earlier_answer = with_current_names(earlier_answer, new_names)
    comparison.notes.extend(_notes_of_sources(answer, earlier_answer))

    # Statements that both answers have.
    matches = match_statements(answer.statements, earlier_answer.statements)
    for statement, earlier in matches.pairs:
        change = StatementChange(statement, earlier)
        key = StatementKey.of(answer, statement)
        is_as_expected = key in as_expected
        if change.cannot_get_worse:
            comparison.unchecked.append(key)
        comparison.notes.extend(change.notes(str(key), is_as_expected))
        comparison.checks.append(_check_of_change(answer, change, is_as_expected))

    # Statements that only one of them has.
    num_new = len(matches.only_new)
    num_gone = len(matches.only_earlier)
    if not matches.pairs:
        # Nothing was compared, and a gate that compares nothing must not pass.
        comparison.checks.append(_check_of_no_common_statement(answer, earlier_answer))
    elif num_new or num_gone:
        number = answer.question + 1
        comparison.notes.append(f"question {number}: {num_new} statements are new, {num_gone} gone")
    for statement in matches.only_new:
        comparison.new_statements.append(NewStatement(answer, statement))
    return comparison


def _check_of_change(answer: StoredAnswer, change: StatementChange, is_as_expected: bool) -> Check:
    """Return the check that a statement is not worse than it was. `is_as_expected`: whether it
    passes its `expect`, which outweighs the earlier verdict."""
    return check_of(
        answer,
        statement=change.statement.number + 1,
        text=change.statement.text,
        expected=change.earlier.verdict,
        found=change.statement.verdict,
        passed=is_as_expected or not change.is_worse,
        kind="baseline",
    )


def _check_of_no_common_statement(answer: StoredAnswer, earlier_answer: StoredAnswer) -> Check:
    """Return the failed check of an answer that is another one altogether."""
    return check_of(
        answer,
        statement=None,
        text=answer.asked,
        expected=" ".join(earlier_answer.texts),
        found=" ".join(answer.texts),
        passed=False,
        kind="baseline",
    )


def _notes_of_rewording(answer: StoredAnswer, earlier_answer: StoredAnswer) -> list[str]:
    """Return a note if the question is reworded."""
    if answer.asked == earlier_answer.asked:
        return []
    id_in_words = f" ({answer.id})" if answer.id else ""
    earlier_question = shorten(earlier_answer.asked, 60)
    return [f"question {answer.question + 1}{id_in_words} is reworded, before '{earlier_question}'"]


def _notes_of_names(answer: StoredAnswer, new_names: dict[str, str]) -> list[str]:
    """Return a note of each source that has another name now."""
    return [
        f"question {answer.question + 1}: source {earlier_name} is now {name}"
        for earlier_name, name in new_names.items()
        if earlier_name != name
    ]


def _notes_of_sources(answer: StoredAnswer, earlier_answer: StoredAnswer) -> list[str]:
    """Return a note of all sources that are new, are gone or have another text."""
    changes = describe_changes(answer.source_texts, earlier_answer.source_texts)
    if not changes:
        return []
    return [f"question {answer.question + 1}, sources: {', '.join(changes)}"]
