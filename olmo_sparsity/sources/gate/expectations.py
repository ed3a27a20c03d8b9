"""Read what a questions file expects of verdicts, and compare a verdict with it.

Place in the flow: field `expect` of a line → **`read_expectations`** → gate.py, which asks
**`meets`** of each stored statement. Forms of `expect`, for all statements together:

    "faq.md"                          a statement rests on this source
    "none"                            no statement rests on a source
    {"both": ["a.md", "b.md"]}        a statement needs both
    {"either": ["a.md", "b.md"]}      a statement rests on one of them, or on both
    {"sources": "a.md", "nats": 2}    a statement rests on it, with an effect of at least 2 nats

or in a list with one for each statement, in which null accepts any verdict:

    {"answer": ["It opened in 1921.", "Thank you."], "expect": ["faq.md", null]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.base.errors import DataError, UserError
from olmo_sparsity.sources.gate.answers import StoredStatement
from olmo_sparsity.sources.gate.questions_file import QuestionLine, names_by_id, read_lines

# The forms of an entry, for messages.
FORMS = '{"both": [name, …]}, {"either": [name, …]}, each with "nats": least number if wanted'

NO_SOURCE = "none"
"""What `expect` says in place of a name for a statement that rests on no source."""

MAX_NATS = 1e6
"""No effect is so large: a larger number, such as 1e999, is a slip, and nothing could meet it."""


@dataclass(frozen=True)
class Expectation:
    """What a statement, or all statements together, must rely on."""

    sources: tuple[str, ...]
    """Sources that the verdict must name. Empty: it must name none."""

    nats: float = 0.0
    """Nats that each of them must give, or that must be lost without it."""

    statement: int | None = None
    """The index of the statement, from 0. None means that one statement must rely on the sources;
    or, without sources, none on any."""

    is_either: bool = False
    """Whether one of the sources is enough."""

    names_by_id: Mapping[str, set[str]] = field(default_factory=dict, compare=False, repr=False)
    """Names of the question's sources by the ids of documents: a source may be a chunk of one."""

    def names_of(self, source: str) -> set[str]:
        """Return the names that meet an expected one: the name itself, and those of the sources
        that have it as their id."""
        return {source, *self.names_by_id.get(source, ())}

    def __str__(self) -> str:
        if not self.sources:
            return "no source"
        condition = f", {self.nats:g} nats or more" if self.nats else ""
        conjunction = " or " if self.is_either else " and "
        return conjunction.join(self.sources) + condition


# --- read the field `expect` ----------------------------------------------------------------------


def read_expectations(path: str | Path) -> list[list[Expectation]]:
    """Return what each question of a .jsonl file expects; an empty list for one that expects
    nothing."""
    return [_expectations_of(line) for line in read_lines(path)]


def _expectations_of(line: QuestionLine) -> list[Expectation]:
    """Return an expectation for each entry of the field `expect` of a line."""
    expect = line.record.get("expect")
    expectations: list[Expectation] = []
    if isinstance(expect, list):
        _check_length(expect, line.record.get("answer"), line.location)
        for index, entry in enumerate(expect):
            if entry is not None:
                expectations.append(_read_entry(entry, index, line.location))
    elif expect is not None:
        expectations.append(_read_entry(expect, None, line.location))
    if not expectations:
        return []

    # An entry may name a document, of which the sources are chunks.
    try:
        ids = names_by_id(line)
    except (UserError, ValueError):  # `read_questions` says what is wrong with the sources
        ids = {}
    return [replace(expectation, names_by_id=ids) for expectation in expectations]


def _check_length(expect: list[Any], answer: Any, location: str) -> None:
    """Raise DataError unless each statement has an entry. An answer that is a text is split into
    statements later, and checked then (gate.py)."""
    if not expect:
        raise DataError(f"{location}: expect=[] checks nothing; omit it, or write one for each")
    if isinstance(answer, Mapping):
        answer = answer.get("spans")
    if isinstance(answer, list) and len(answer) != len(expect):
        raise DataError(
            f"{location}: expect has {len(expect)} entries, and the answer {len(answer)} "
            "statements; null accepts any verdict of a statement"
        )


class _Entry(NamedTuple):
    """An entry of `expect` in its elements, as JSON has them; nothing is checked yet."""

    names: Any
    """A name, or a list of names."""

    key: str = ""
    """The key with the names: sources, both or either. Empty: the entry is the names alone."""

    nats: Any = 0.0


def _elements_of(entry: Any) -> _Entry:
    """Return names, key and nats of an object with one of the keys. Anything else is taken for the
    names alone."""
    if isinstance(entry, Mapping):
        keys = [key for key in ("sources", "both", "either") if key in entry]
        if len(keys) == 1 and set(entry) <= {keys[0], "nats"}:
            return _Entry(entry[keys[0]], keys[0], entry.get("nats", 0.0))
    return _Entry(entry)


def _read_entry(entry: Any, statement: int | None, location: str) -> Expectation:
    """Read one form of `expect`; raise DataError for any other.

    Args:
        statement: The index of the statement, from 0. None means that the entry is about all of
            them.
        location: File and number of the line, for messages.
    """
    names, key, nats = _elements_of(entry)
    if key == "sources" and isinstance(names, list) and len(names) > 1:
        # Some would read it as "both", others as "either".
        several = json.dumps(names, ensure_ascii=False)
        forms = f'{{"both": {several}}} or {{"either": {several}}}'
        raise DataError(f"{location}: expect names several sources; write {forms}")
    if isinstance(names, str):
        names = [names]
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    are_names = are_names and "" not in names  # an empty name is a field that was left out
    if not are_names or not names or not _is_number_of_nats(nats):
        raise DataError(
            f"{location}: expect={entry!r:.60} must be none, a source, {FORMS}, or a list"
        )

    # What the form allows, but no verdict could meet, or nobody means.
    shown = f"{location}: expect={entry!r:.60}"
    if len(names) > 1 and NO_SOURCE in names:
        raise DataError(f"{shown} mixes none with sources; write one of them")
    if len(set(names)) < len(names):
        raise DataError(f"{shown} names a source twice; name it once")
    if names == [NO_SOURCE] and nats:
        raise DataError(f"{shown} has nats of no source; omit nats")
    return Expectation(
        sources=() if names == [NO_SOURCE] else tuple(names),
        nats=float(nats),
        statement=statement,
        is_either=key == "either",
    )


def _is_number_of_nats(value: Any) -> bool:
    """Return whether a value from JSON is a number that an effect can reach."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= MAX_NATS


# --- compare a verdict ----------------------------------------------------------------------------


def meets(statement: StoredStatement, expected: Expectation, margin: float) -> bool:
    """Return whether the verdict on a statement is as expected, up to `margin` nats of an effect.

    An undecided statement counts as resting on no source only if none of its effects exceeds the
    margin.
    """
    if not expected.sources:
        return statement.rests_on_none or (margin > 0 and statement.largest_effect <= margin)
    is_named = [
        any(_is_named(statement, name, expected.nats, margin) for name in expected.names_of(source))
        for source in expected.sources
    ]
    if expected.is_either:
        return any(is_named)
    # A verdict "either" names both sources, but the statement needs one of them only.
    if len(expected.sources) > 1 and statement.kind == "either":
        return False
    return all(is_named)


def _is_named(statement: StoredStatement, name: str, nats: float, margin: float) -> bool:
    """Return whether a verdict names a source with an effect of `nats`, or would do so if the
    effect were `margin` nats larger. Only an open source can be near enough: other effects are
    small, or a small fraction of the statement's nats."""
    cell = statement.cells.get(name)
    is_candidate = name in statement.sources or name in statement.open
    if cell is None or not is_candidate:
        # A source that is reached through reasoning has no nats of its own.
        return name in statement.origins and not nats
    is_near = margin > 0 and cell.above is not None and cell.above >= -margin
    return (name in statement.sources or is_near) and cell.largest_effect >= nats - margin
