"""Compare answers with those of an earlier run, the baseline.

Place in the flow: stored answers of both runs (answers.py) → **checks and notes** → gate.py.

`compare_with_baseline` pairs questions by their texts and ids, sources by their texts, and
statements by equal or similar texts. A statement fails if its verdict no longer names a source that
it named, by more than noise. All other changes are notes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import chain
from math import hypot
from pathlib import Path
from textwrap import shorten
from typing import Any, Generic, NamedTuple, TypeVar

from olmo_sparsity.base.differences import differences, leaves
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.sources.answers import StoredAnswer, StoredCell, StoredStatement, identity_in
from olmo_sparsity.sources.gate_report import Check, check_of
from olmo_sparsity.sources.probe import OTHER_NATS, distance, read_probe

NOISE = 3.0
"""Standard errors of a difference of means over decoys that a changed effect must exceed."""

SIMILAR = 0.6
"""Share of letters in common (difflib) from which a statement counts as another one reworded."""

MAY_DIFFER = re.compile(
    r"questions|num_questions|decoys|random_streams|settings\.(draws|seed)|versions(\..*)?"
)
"""Keys of the identity of results that may differ from a baseline's."""

T = TypeVar("T")

StatementPlace = tuple[int | None, int | None]
"""Numbers of a question and a statement, from 1."""


# --- is it of the same model? ---------------------------------------------------------------------


def compare_identities(
    identity: Mapping[str, Any], baseline: str | Path, allow_other_model: bool
) -> list[str]:
    """Return how model, tokenizer, template or settings differ; raise unless that is allowed."""
    earlier_keys = _compared_keys(identity_in(baseline))
    keys = _compared_keys(identity)
    return _allow(differences(earlier_keys, keys), baseline, allow_other_model)


def _compared_keys(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in leaves(identity) if not MAY_DIFFER.fullmatch(key)}


def compare_servers(out: Path, baseline: Path, allow_other_model: bool) -> list[str]:
    """Return by how much the servers of both runs differ; raise unless that is allowed."""
    log_p = read_probe(out)
    earlier_log_p = read_probe(baseline)
    if log_p is None or earlier_log_p is None:
        return []
    nats = distance(log_p, earlier_log_p)
    if nats <= OTHER_NATS:
        return []
    difference = f"the server's log-probabilities differ by {nats:.2f} nats a token"
    return _allow([difference], baseline, allow_other_model)


def _allow(
    model_differences: list[str], baseline: str | Path, allow_other_model: bool
) -> list[str]:
    """Return these differences as notes; raise ConfigError unless they are allowed."""
    if not model_differences:
        return []
    note = f"baseline={baseline} is of another model: {', '.join(model_differences)}"
    if not allow_other_model:
        raise ConfigError(f"{note}; measure it again, or pass --allow-other-model")
    return [note]


# --- pairs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs(Generic[T]):
    """Items of this run with those of the baseline, and what is left of both."""

    pairs: list[tuple[T, T]]
    """An item of this run, and that of the baseline."""

    only_new: list[T]
    only_earlier: list[T]


def _pair(new: Sequence[T], earlier: Sequence[T], *keys: Callable[[T], Any]) -> Pairs[T]:
    """Pair items of equal first key, in order, then the rest by the second, and so on."""
    pairs = list[tuple[T, T]]()
    unpaired_new = [*new]
    unpaired_earlier = [*earlier]
    for key in keys:
        earlier_by_key = defaultdict[Any, list[T]](list)
        for item in unpaired_earlier:
            earlier_by_key[key(item)].append(item)
        without_match = list[T]()
        for item in unpaired_new:
            matches = earlier_by_key[key(item)]
            if matches:
                pairs.append((item, matches.pop(0)))
            else:
                without_match.append(item)
        unpaired_new = without_match
        unpaired_earlier = [*chain.from_iterable(earlier_by_key.values())]
    return Pairs(pairs, unpaired_new, unpaired_earlier)


def _pair_questions(
    answers: Sequence[StoredAnswer], earlier_answers: Sequence[StoredAnswer]
) -> Pairs[StoredAnswer]:
    return _pair(
        answers,
        earlier_answers,
        # Equal questions are told apart by what else is equal: first all, then less and less.
        lambda answer: (answer.asked, answer.texts, tuple(sorted(answer.source_texts.items()))),
        lambda answer: (answer.asked, answer.texts),
        lambda answer: (answer.asked, answer.id),
        lambda answer: answer.asked,
        # A reworded question keeps its id. Questions without an id are equal to no other.
        lambda answer: answer.id or object(),
    )


def _pair_reworded(
    rows: Sequence[StoredStatement], earlier_rows: Sequence[StoredStatement]
) -> Pairs[StoredStatement]:
    """Pair statements of similar text, the most similar first."""
    similarities = list[_Similarity]()
    for i, row in enumerate(rows):
        for j, earlier_row in enumerate(earlier_rows):
            # With `autojunk`, frequent letters of texts above 200 letters would not count.
            matcher = SequenceMatcher(None, row.text, earlier_row.text, autojunk=False)
            if matcher.quick_ratio() >= SIMILAR:  # an upper bound that is cheap
                similarities.append(_Similarity(-matcher.ratio(), i, j))
    partners = dict[int, int]()
    for negative_share, i, j in sorted(similarities):
        if -negative_share >= SIMILAR and i not in partners and j not in partners.values():
            partners[i] = j
    return Pairs(
        pairs=[(rows[i], earlier_rows[j]) for i, j in sorted(partners.items())],
        only_new=[row for i, row in enumerate(rows) if i not in partners],
        only_earlier=[row for j, row in enumerate(earlier_rows) if j not in partners.values()],
    )


class _Similarity(NamedTuple):
    """How similar two statements are. Sorted, the most similar come first, then in their order."""

    negative_share: float
    """Share of letters in common, times −1."""

    row: int
    earlier_row: int


# --- checks ---------------------------------------------------------------------------------------


def compare_with_baseline(
    answers: Sequence[StoredAnswer],
    earlier_answers: Sequence[StoredAnswer],
    baseline: str | Path,
    as_expected: Set[StatementPlace],
    new_need_source: bool,
) -> tuple[list[Check], list[str]]:
    """Return a check of each statement that both runs have, and notes of what else differs.

    earlier_answers: The answers of the baseline.
    as_expected: Statements that pass their `expect`, so that the baseline cannot fail them.
    new_need_source: Fail statements that the baseline does not have and that rest on no source.
    """
    questions = _pair_questions(answers, earlier_answers)
    checks = list[Check]()
    notes = [_note_of_question("not in", answer) for answer in questions.only_new]
    notes += [_note_of_question("only in", answer) for answer in questions.only_earlier]
    new_rows = list[tuple[StoredAnswer, StoredStatement]]()
    for answer in questions.only_new:
        new_rows += [(answer, row) for row in answer.statements]
    for answer, earlier_answer in sorted(questions.pairs, key=lambda pair: pair[0].question):
        comparison = _compare_answers(answer, earlier_answer, as_expected)
        checks += comparison.checks
        notes += comparison.notes
        new_rows += [(answer, row) for row in comparison.new_rows]
    if not checks:
        # A gate that compares nothing must not pass.
        checks.append(
            Check(
                question=None,
                statement=None,
                text="",
                expected="questions in common",
                found=f"nothing was compared: no question is also in {baseline}",
                passed=False,
                kind="baseline",
            )
        )
    if new_need_source:
        for answer, row in new_rows:
            if (answer.question + 1, row.number + 1) not in as_expected:
                checks.append(_check_of_new(answer, row))
    return checks, notes


def _note_of_question(where: str, answer: StoredAnswer) -> str:
    text = shorten(answer.asked, 60)
    return f"{where} the baseline: question {answer.question + 1}, '{text}'"


def _check_of_new(answer: StoredAnswer, row: StoredStatement) -> Check:
    return check_of(
        answer,
        statement=row.number + 1,
        text=row.text,
        expected="a source, as the statement is new",
        found=row.verdict,
        passed=bool(row.origins),
        kind="new",
    )


@dataclass(frozen=True)
class _Comparison:
    """What comparing an answer with that of an earlier run finds."""

    checks: list[Check]
    notes: list[str]
    new_rows: list[StoredStatement]
    """Statements that the earlier answer does not have."""


def _compare_answers(
    answer: StoredAnswer, earlier_answer: StoredAnswer, as_expected: Set[StatementPlace]
) -> _Comparison:
    number = answer.question + 1
    notes = list[str]()
    if answer.asked != earlier_answer.asked:
        earlier_question = shorten(earlier_answer.asked, 60)
        notes.append(f"{_place(answer)} is reworded, before '{earlier_question}'")
    new_names = _new_names(answer.source_texts, earlier_answer.source_texts)
    earlier_answer = _with_new_names(earlier_answer, new_names)
    for old, new in new_names.items():
        if old != new:
            notes.append(f"question {number}: source {old} is now {new}")
    changed = _changed_sources(answer.source_texts, earlier_answer.source_texts)
    if changed:
        notes.append(f"question {number}, sources: {', '.join(changed)}")

    statements = _pair_statements(answer.statements, earlier_answer.statements)
    checks = list[Check]()
    for row, earlier_row in statements.pairs:
        is_as_expected = (number, row.number + 1) in as_expected
        is_worse = _is_worse(row, earlier_row)
        place = f"question {number}, statement {row.number + 1}"
        notes += _notes_of_statement(place, row, earlier_row, is_worse, is_as_expected)
        checks.append(
            check_of(
                answer,
                statement=row.number + 1,
                text=row.text,
                expected=earlier_row.verdict,
                found=row.verdict,
                passed=is_as_expected or not is_worse,
                kind="baseline",
            )
        )
    num_new = len(statements.only_new)
    num_gone = len(statements.only_earlier)
    if not checks:
        # The answer has no statement in common with the earlier one, so nothing was compared.
        checks.append(
            check_of(
                answer,
                statement=None,
                text=answer.asked,
                expected=" ".join(earlier_answer.texts),
                found=" ".join(answer.texts),
                passed=False,
                kind="baseline",
            )
        )
    elif num_new or num_gone:
        notes.append(f"question {number}: {num_new} statements are new, {num_gone} gone")
    return _Comparison(checks, notes, statements.only_new)


def _pair_statements(
    rows: Sequence[StoredStatement], earlier_rows: Sequence[StoredStatement]
) -> Pairs[StoredStatement]:
    """Pair statements of equal text, then those that were reworded."""
    same = _pair(rows, earlier_rows, lambda row: row.text)
    if len(rows) == len(earlier_rows) == 1:
        # The only statement of an answer is the same one, in whatever words.
        reworded = _pair(same.only_new, same.only_earlier, lambda row: None)
    else:
        reworded = _pair_reworded(same.only_new, same.only_earlier)
    pairs = [*same.pairs, *reworded.pairs]
    return Pairs(pairs, reworded.only_new, reworded.only_earlier)


def _notes_of_statement(
    place: str,
    row: StoredStatement,
    earlier_row: StoredStatement,
    is_worse: bool,
    is_as_expected: bool,
) -> list[str]:
    """Return what differs from the earlier run without failing."""
    notes = list[str]()
    gained = sorted(set(row.origins) - set(earlier_row.origins))
    lost = sorted(set(earlier_row.origins) - set(row.origins))
    if is_worse and is_as_expected:
        notes.append(f"{place} differs from the baseline, as `expect` says: {row.verdict}")
    elif not is_worse:
        if gained:
            notes.append(f"{place} now rests on {', '.join(gained)}: {row.verdict}")
        if lost:
            notes.append(f"{place} lost {', '.join(lost)} by no more than noise: {row.verdict}")
    if row.text != earlier_row.text:
        notes.append(f"{place} is reworded: '{row.text}', before '{earlier_row.text}'")
    return notes


def _place(answer: StoredAnswer) -> str:
    """Return the number and the id of a question, in words."""
    name = f" ({answer.id})" if answer.id else ""
    return f"question {answer.question + 1}{name}"


# --- sources --------------------------------------------------------------------------------------


def _with_new_names(earlier_answer: StoredAnswer, new_names: Mapping[str, str]) -> StoredAnswer:
    """Return an earlier answer with the names that its sources have now."""

    def renamed(names: Sequence[str]) -> list[str]:
        return [new_names.get(name, name) for name in names]

    rows = [
        replace(
            row,
            sources=renamed(row.sources),
            open=renamed(row.open),
            origins=renamed(row.origins),
            cells={new_names.get(name, name): cell for name, cell in row.cells.items()},
        )
        for row in earlier_answer.statements
    ]
    texts = {new_names[name]: text for name, text in earlier_answer.source_texts.items()}
    return replace(earlier_answer, source_texts=texts, statements=rows)


def _new_names(texts: Mapping[str, str], earlier_texts: Mapping[str, str]) -> dict[str, str]:
    """Return, for each earlier source, its name now: that of its text. A retriever that returns
    chunks in another order gives their numbers to other texts. Both arguments: texts, or hashes of
    them, by name."""
    # Names that still have their text keep it, …
    new_names = {name: name for name, text in earlier_texts.items() if texts.get(name) == text}
    names_by_text = defaultdict[str, list[str]](list)
    for name, text in texts.items():
        if name not in new_names:
            names_by_text[text].append(name)

    # … then texts that have another name now get that.
    for name, text in earlier_texts.items():
        if name not in new_names and names_by_text[text]:
            new_names[name] = names_by_text[text].pop(0)

    taken = set(new_names.values())
    for name in earlier_texts:
        if name in new_names:
            continue
        # Its text is gone. Its name may now be that of a source which had another name.
        free_name = name
        while free_name in taken:
            free_name = f"{free_name} (earlier)"
        new_names[name] = free_name
        taken.add(free_name)
    return new_names


def _changed_sources(texts: Mapping[str, str], earlier_texts: Mapping[str, str]) -> list[str]:
    """Return which sources are new or gone, or have another text, in words."""
    changed_names = {name for name, _ in earlier_texts.items() ^ texts.items()}
    changes = list[str]()
    for name in sorted(changed_names):
        if name not in texts:
            changes.append(f"{name} is gone")
        elif name not in earlier_texts:
            changes.append(f"{name} is new")
        else:
            changes.append(f"{name} has another text")
    return changes


def _is_worse(row: StoredStatement, earlier_row: StoredStatement) -> bool:
    """Return whether a statement no longer relies on a source that it relied on. Nats of the same
    text are compared, and may change by noise; those of another text may not be. What was reached
    through reasoning has no nats of its own, and may not be lost either."""
    is_reworded = row.text != earlier_row.text
    for name in set(earlier_row.origins) - set(row.origins):
        has_nats = name in earlier_row.cells and name in row.cells
        is_compared = name in earlier_row.sources and has_nats
        if is_reworded or not is_compared:
            return True
        if _has_changed(row.cells[name], earlier_row.cells[name]):
            return True
    return False


def _has_changed(cell: StoredCell, earlier_cell: StoredCell) -> bool:
    """Return whether what the source gives, or what is lost without it, has changed by more than
    noise. An effect that only one of the runs evaluated shows nothing."""
    num_compared = 0
    for effect, earlier_effect in zip(cell.effects, earlier_cell.effects, strict=True):
        if effect is None or earlier_effect is None:
            continue
        num_compared += 1
        # The standard error of a difference of two independent means.
        se_of_difference = hypot(effect.se, earlier_effect.se)
        if abs(effect.nats - earlier_effect.nats) > NOISE * se_of_difference:
            return True
    return num_compared == 0
