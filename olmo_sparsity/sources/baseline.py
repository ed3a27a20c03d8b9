"""Compare answers with the answers of an earlier run, the baseline.

Place in the flow: matching.py pairs questions and statements of both runs →
**`compare_with_baseline`** → gate.py. renamed_sources.py finds the names that sources have now, and
same_model.py has checked before that both runs are of one model.

A statement fails if its verdict no longer names a source that it named. All other changes are
notes:

    earlier run             this run                   result
    rests on a              rests on a                 passes
    rests on a              rests on no source         fails, if beyond noise
    rests on a              rests on a and b           passes, with a note
    rests on no source      rests on b                 passes, with a note
    undecided               anything                   passes, and is counted as unchecked
    does not have it        a new statement            a note; fails on request if it has no source
    had it                  the statement is gone      a note
    had none of these statements                       the question fails: nothing was compared
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from math import hypot
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from olmo_sparsity.sources.answers import StoredAnswer, StoredCell, StoredStatement
from olmo_sparsity.sources.gate_report import Check, check_of
from olmo_sparsity.sources.matching import match_questions, match_statements
from olmo_sparsity.sources.renamed_sources import (
    current_names,
    describe_changes,
    with_current_names,
)

NOISE = 3.0
"""An effect has changed if the difference of its means over decoys exceeds so many standard errors.
With other decoys and the same model, 4 of 720 comparisons then failed by chance
(docs/sources.md)."""


class StatementKey(NamedTuple):
    """Which statement is meant: the numbers of its question and of itself, both from 1. None: a
    check is about all of them."""

    question: int | None
    statement: int | None


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

    answers: The answers of this run.
    earlier_answers: The answers of the baseline.
    baseline: The folder of the baseline, for messages.
    as_expected: Statements that pass their `expect`, so that the baseline cannot fail them.
    new_need_source: Fail statements that the baseline does not have and that rest on no source.
    """
    questions = match_questions(answers, earlier_answers)
    comparison = Comparison()
    for answer in questions.only_new:
        comparison.notes.append(_note_of_question("not in", answer))
        comparison.new_statements.extend(
            NewStatement(answer, statement) for statement in answer.statements
        )
    for answer in questions.only_earlier:
        comparison.notes.append(_note_of_question("only in", answer))

    # In the order of this run's file, not of what the pairs were matched by.
    for answer, earlier_answer in sorted(questions.pairs, key=lambda pair: pair.new.question):
        comparison.extend(_compare_answers(answer, earlier_answer, as_expected))

    if not comparison.checks:
        # A gate that compares nothing must not pass.
        comparison.checks.append(_check_of_no_common_question(baseline))
    if new_need_source:
        for new in comparison.new_statements:
            if _key_of(new.answer, new.statement) not in as_expected:
                comparison.checks.append(_check_of_new_statement(new))
    return comparison


def _key_of(answer: StoredAnswer, statement: StoredStatement) -> StatementKey:
    return StatementKey(answer.question + 1, statement.number + 1)


def _note_of_question(where: str, answer: StoredAnswer) -> str:
    """Return the note of a question that only one of the runs has.

    where: "not in" the baseline, or "only in" it.
    """
    text = shorten(answer.asked, 60)
    return f"{where} the baseline: question {answer.question + 1}, '{text}'"


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
    # From here on the earlier answer has the names of today, so that names can be compared.
    new_names = current_names(answer.source_texts, earlier_answer.source_texts)
    notes = _notes_of_question(answer, earlier_answer)
    notes += _notes_of_names(answer, new_names)
    earlier_answer = with_current_names(earlier_answer, new_names)
    notes += _notes_of_sources(answer, earlier_answer)

    matches = match_statements(answer.statements, earlier_answer.statements)
    checks = list[Check]()
    unchecked = list[StatementKey]()
    for statement, earlier in matches.pairs:
        key = _key_of(answer, statement)
        if earlier.is_undecided and not earlier.origins:
            # It named no source that could be lost, so the comparison below always passes.
            unchecked.append(key)
        is_as_expected = key in as_expected
        is_worse = _is_worse(statement, earlier)
        notes += _notes_of_statement(key, statement, earlier, is_worse, is_as_expected)
        checks.append(
            check_of(
                answer,
                statement=statement.number + 1,
                text=statement.text,
                expected=earlier.verdict,
                found=statement.verdict,
                passed=is_as_expected or not is_worse,
                kind="baseline",
            )
        )

    num_new = len(matches.only_new)
    num_gone = len(matches.only_earlier)
    if not checks:
        # The answer has no statement in common with the earlier one, so nothing was compared.
        checks.append(_check_of_no_common_statement(answer, earlier_answer))
    elif num_new or num_gone:
        number = answer.question + 1
        notes.append(f"question {number}: {num_new} statements are new, {num_gone} gone")
    new_statements = [NewStatement(answer, statement) for statement in matches.only_new]
    return Comparison(
        checks=checks, notes=notes, new_statements=new_statements, unchecked=unchecked
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


def _notes_of_question(answer: StoredAnswer, earlier_answer: StoredAnswer) -> list[str]:
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


def _notes_of_statement(
    key: StatementKey,
    statement: StoredStatement,
    earlier: StoredStatement,
    is_worse: bool,
    is_as_expected: bool,
) -> list[str]:
    """Return what differs from the earlier statement without failing.

    key: The numbers of the statement, for the notes.
    is_worse: Whether the statement has lost a source beyond noise.
    is_as_expected: Whether it passes its `expect`, so that it may lose a source.
    """
    numbers = f"question {key.question}, statement {key.statement}"
    notes = list[str]()
    gained_sources = sorted(set(statement.origins) - set(earlier.origins))
    lost_sources = sorted(set(earlier.origins) - set(statement.origins))
    if is_worse and is_as_expected:
        verdict = statement.verdict
        notes.append(f"{numbers} differs from the baseline, as `expect` says: {verdict}")
    elif not is_worse:
        if gained_sources:
            names = ", ".join(gained_sources)
            notes.append(f"{numbers} now rests on {names}: {statement.verdict}")
        if lost_sources:
            names = ", ".join(lost_sources)
            notes.append(f"{numbers} lost {names} by no more than noise: {statement.verdict}")
    if statement.text != earlier.text:
        notes.append(f"{numbers} is reworded: '{statement.text}', before '{earlier.text}'")
    return notes


# --- one statement --------------------------------------------------------------------------------


def _is_worse(statement: StoredStatement, earlier: StoredStatement) -> bool:
    """Return whether a statement no longer relies on a source that it relied on, beyond noise."""
    lost_names = set(earlier.origins) - set(statement.origins)
    # Noise is known only for a source whose effect both runs measured on the same words. So a
    # reworded statement may lose no source.
    if statement.text != earlier.text:
        return bool(lost_names)
    return any(_is_lost_beyond_noise(name, statement, earlier) for name in lost_names)


def _is_lost_beyond_noise(name: str, statement: StoredStatement, earlier: StoredStatement) -> bool:
    """Return whether the effect of a source on a statement has changed by more than noise."""
    was_named_itself = name in earlier.sources
    has_effects = name in earlier.cells and name in statement.cells
    if not was_named_itself or not has_effects:
        # It was reached through reasoning, and has no effect of its own, or one run lacks it.
        return True
    return _has_changed(statement.cells[name], earlier.cells[name])


def _has_changed(cell: StoredCell, earlier_cell: StoredCell) -> bool:
    """Return whether what the source gives, or what is lost without it, has changed by more than
    noise. It counts as changed, too, if no effect was evaluated in both runs."""
    num_compared = 0
    for effect, earlier_effect in zip(cell.effects, earlier_cell.effects, strict=True):
        if effect is None or earlier_effect is None:
            continue
        num_compared += 1
        # The standard error of a difference of two independent means.
        standard_error = hypot(effect.se, earlier_effect.se)
        if abs(effect.nats - earlier_effect.nats) > NOISE * standard_error:
            return True
    return num_compared == 0
