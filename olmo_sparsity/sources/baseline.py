"""Compare answers with those of an earlier run, the baseline.

Place in the flow: stored answers of both runs (answers.py) → **checks and notes** → gate.py.

Questions are paired by their texts and ids, sources by their texts, statements by equal or similar
texts. A verdict fails if it no longer names a source that it named, by more than noise.
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
from typing import Any, Generic, TypeVar

from olmo_sparsity.base.differences import differences, leaves
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.sources.answers import StoredAnswer, StoredCell, StoredStatement, identity_in
from olmo_sparsity.sources.gate_report import Check, check_of
from olmo_sparsity.sources.probe import OTHER_NATS, distance, read_probe

NOISE = 3.0
"""Standard errors of a difference of means over decoys that a changed verdict must exceed."""

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
    before = _compared_keys(identity_in(baseline))
    now = _compared_keys(identity)
    return _allow(differences(before, now), baseline, allow_other_model)


def _compared_keys(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in leaves(identity) if not MAY_DIFFER.fullmatch(key)}


def compare_servers(out: Path, baseline: Path, allow_other_model: bool) -> list[str]:
    """Return by how much the servers of both runs differ; raise unless that is allowed."""
    now = read_probe(out)
    before = read_probe(baseline)
    if now is None or before is None:
        return []
    nats = distance(now, before)
    if nats <= OTHER_NATS:
        return []
    difference = f"the server's log-probabilities differ by {nats:.2f} nats a token"
    return _allow([difference], baseline, allow_other_model)


def _allow(
    found_differences: list[str], baseline: str | Path, allow_other_model: bool
) -> list[str]:
    if not found_differences:
        return []
    note = f"baseline={baseline} is of another model: {', '.join(found_differences)}"
    if not allow_other_model:
        raise ConfigError(f"{note}; measure it again, or pass --allow-other-model")
    return [note]


# --- pairs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs(Generic[T]):
    """Items of now with those of the baseline, and what is left of both."""

    pairs: list[tuple[T, T]]
    only_now: list[T]
    only_before: list[T]


def _pair(now: Sequence[T], before: Sequence[T], *keys: Callable[[T], Any]) -> Pairs[T]:
    """Pair items of equal first key, in order, then the rest by the second, and so on."""
    pairs = list[tuple[T, T]]()
    left_now = [*now]
    left_before = [*before]
    for key in keys:
        before_by_key = defaultdict[Any, list[T]](list)
        for item in left_before:
            before_by_key[key(item)].append(item)
        unpaired = list[T]()
        for item in left_now:
            matches = before_by_key[key(item)]
            if matches:
                pairs.append((item, matches.pop(0)))
            else:
                unpaired.append(item)
        left_now = unpaired
        left_before = [*chain.from_iterable(before_by_key.values())]
    return Pairs(pairs, left_now, left_before)


def _pair_questions(
    now: Sequence[StoredAnswer], before: Sequence[StoredAnswer]
) -> Pairs[StoredAnswer]:
    return _pair(
        now,
        before,
        # Equal questions are told apart by what else is equal: first all, then less and less.
        lambda answer: (answer.asked, answer.texts, tuple(sorted(answer.source_texts.items()))),
        lambda answer: (answer.asked, answer.texts),
        lambda answer: (answer.asked, answer.id),
        lambda answer: answer.asked,
        # A reworded question keeps its id. Questions without an id are equal to no other.
        lambda answer: answer.id or object(),
    )


def _pair_reworded(
    now: Sequence[StoredStatement], before: Sequence[StoredStatement]
) -> Pairs[StoredStatement]:
    """Pair statements of similar text, the most similar first."""
    shares = list[tuple[float, int, int]]()
    for i, row in enumerate(now):
        for j, earlier_row in enumerate(before):
            # With `autojunk`, frequent letters of texts above 200 letters would not count.
            matcher = SequenceMatcher(None, row.text, earlier_row.text, autojunk=False)
            if matcher.quick_ratio() >= SIMILAR:  # an upper bound that is cheap
                shares.append((matcher.ratio(), i, j))
    partner = dict[int, int]()
    for share, i, j in sorted(shares, key=lambda item: (-item[0], item[1], item[2])):
        if share >= SIMILAR and i not in partner and j not in partner.values():
            partner[i] = j
    return Pairs(
        pairs=[(now[i], before[j]) for i, j in sorted(partner.items())],
        only_now=[row for i, row in enumerate(now) if i not in partner],
        only_before=[row for j, row in enumerate(before) if j not in partner.values()],
    )


# --- checks ---------------------------------------------------------------------------------------


def compare_with_baseline(
    answers: Sequence[StoredAnswer],
    earlier: Sequence[StoredAnswer],
    baseline: str | Path,
    as_expected: Set[StatementPlace],
    new_need_source: bool,
) -> tuple[list[Check], list[str]]:
    """Return a check of each statement that both runs have, and notes of what else differs.

    earlier: The answers of the baseline.
    as_expected: Statements that pass their `expect`, so that the baseline cannot fail them.
    new_need_source: Fail statements that the baseline does not have and that rest on no source.
    """
    questions = _pair_questions(answers, earlier)
    checks = list[Check]()
    notes = [_note_of_question("not in", answer) for answer in questions.only_now]
    notes += [_note_of_question("only in", answer) for answer in questions.only_before]
    new_rows = list[tuple[StoredAnswer, StoredStatement]]()
    for answer in questions.only_now:
        new_rows += [(answer, row) for row in answer.statements]
    for now, before in sorted(questions.pairs, key=lambda pair: pair[0].question):
        comparison = _compare_answers(now, before, as_expected)
        checks += comparison.checks
        notes += comparison.notes
        new_rows += [(now, row) for row in comparison.new_rows]
    if not checks:
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
    now: StoredAnswer, before: StoredAnswer, as_expected: Set[StatementPlace]
) -> _Comparison:
    number = now.question + 1
    notes = list[str]()
    if now.asked != before.asked:
        notes.append(f"{_place(now)} is reworded, before '{shorten(before.asked, 60)}'")
    before, renamed = _with_new_names(now, before)
    notes += [f"question {number}: source {old} is now {new}" for old, new in renamed.items()]
    changed = _changed_sources(now, before)
    if changed:
        notes.append(f"question {number}, sources: {', '.join(changed)}")

    same = _pair(now.statements, before.statements, lambda row: row.text)
    if len(now.statements) == len(before.statements) == 1:
        # The only statement of an answer is the same one, in whatever words.
        reworded = _pair(same.only_now, same.only_before, lambda row: None)
    else:
        reworded = _pair_reworded(same.only_now, same.only_before)
    checks = list[Check]()
    for row, earlier_row in [*same.pairs, *reworded.pairs]:
        is_as_expected = (number, row.number + 1) in as_expected
        is_worse = _is_worse(row, earlier_row)
        place = f"question {number}, statement {row.number + 1}"
        notes += _notes_of_statement(place, row, earlier_row, is_worse, is_as_expected)
        checks.append(
            check_of(
                now,
                statement=row.number + 1,
                text=row.text,
                expected=earlier_row.verdict,
                found=row.verdict,
                passed=is_as_expected or not is_worse,
                kind="baseline",
            )
        )
    num_new = len(reworded.only_now)
    num_gone = len(reworded.only_before)
    if not checks:
        # The answer has no statement in common with the earlier one, so nothing was compared.
        checks.append(
            check_of(
                now,
                statement=None,
                text=now.asked,
                expected=" ".join(before.texts),
                found=" ".join(now.texts),
                passed=False,
                kind="baseline",
            )
        )
    elif num_new or num_gone:
        notes.append(f"question {number}: {num_new} statements are new, {num_gone} gone")
    return _Comparison(checks, notes, reworded.only_now)


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
    name = f" ({answer.id})" if answer.id else ""
    return f"question {answer.question + 1}{name}"


# --- sources --------------------------------------------------------------------------------------


def _with_new_names(now: StoredAnswer, before: StoredAnswer) -> tuple[StoredAnswer, dict[str, str]]:
    """Return an earlier answer with the names that its sources have now, and those that changed."""
    new_names = _new_names(now.source_texts, before.source_texts)

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
        for row in before.statements
    ]
    texts = {new_names[name]: text for name, text in before.source_texts.items()}
    changed = {old: new for old, new in new_names.items() if old != new}
    return replace(before, source_texts=texts, statements=rows), changed


def _new_names(now: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return, for each earlier source, its name now: that of its text. A retriever that returns
    chunks in another order gives their numbers to other texts."""
    # Names that still have their text keep it, …
    new_names = {name: name for name, text in before.items() if now.get(name) == text}
    names_by_text = defaultdict[str, list[str]](list)
    for name, text in now.items():
        if name not in new_names:
            names_by_text[text].append(name)
    # … then texts that have another name now get that.
    for name, text in before.items():
        if name not in new_names and names_by_text[text]:
            new_names[name] = names_by_text[text].pop(0)
    taken = set(new_names.values())
    for name in before:
        if name in new_names:
            continue
        # Its text is gone. Its name may now be that of a source which had another name.
        free_name = name
        while free_name in taken:
            free_name = f"{free_name} (earlier)"
        new_names[name] = free_name
        taken.add(free_name)
    return new_names


def _changed_sources(now: StoredAnswer, before: StoredAnswer) -> list[str]:
    """Return which sources are new or gone, or have another text, in words."""
    pairs = before.source_texts.items() ^ now.source_texts.items()
    changes = list[str]()
    for name in sorted({name for name, _ in pairs}):
        if name not in now.source_texts:
            changes.append(f"{name} is gone")
        elif name not in before.source_texts:
            changes.append(f"{name} is new")
        else:
            changes.append(f"{name} has another text")
    return changes


def _is_worse(now: StoredStatement, before: StoredStatement) -> bool:
    """Return whether a statement no longer relies on a source that it relied on. Nats of the same
    text are compared, and may change by noise; those of another text may not be. What was reached
    through reasoning has no nats of its own, and may not be lost either."""
    is_reworded = now.text != before.text
    for name in set(before.origins) - set(now.origins):
        is_compared = name in before.sources and name in before.cells and name in now.cells
        if is_reworded or not is_compared:
            return True
        if _has_changed(now.cells[name], before.cells[name]):
            return True
    return False


def _has_changed(now: StoredCell, before: StoredCell) -> bool:
    """Return whether what the source gives, or what is lost without it, has changed by more than
    noise. An effect that only one of the runs evaluated shows nothing."""
    num_compared = 0
    for effect, earlier_effect in zip(now.means, before.means, strict=True):
        if effect is None or earlier_effect is None:
            continue
        num_compared += 1
        nats, se = effect
        earlier_nats, earlier_se = earlier_effect
        if abs(nats - earlier_nats) > NOISE * hypot(se, earlier_se):
            return True
    return num_compared == 0
