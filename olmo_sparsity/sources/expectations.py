"""Read what a questions file expects of verdicts, and compare a verdict with it.

Place in the flow: field `expect` of a line → **expectations** (`read_expectations`) → gate.py,
which asks of each whether a stored statement `fits` it. Forms of `expect`, for all statements
together or in a list with one for each:

    "faq.md"                          names this source
    "none"                            rests on no source
    {"both": ["a.md", "b.md"]}        names both
    {"either": ["a.md", "b.md"]}      names one of them, or both
    {"sources": "a.md", "nats": 2}    names it, with an effect of at least 2 nats
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.base.errors import DataError, UserError
from olmo_sparsity.sources.answers import StoredStatement
from olmo_sparsity.sources.questions_file import QuestionLine, names_by_id, read_lines

FORMS = '{"both": [name, …]}, {"either": [name, …]}, each with "nats": least number if wanted'

MOST_NATS = 1e6
"""No effect is so large: a larger number, such as 1e999, is a slip, and its check cannot pass."""


@dataclass(frozen=True)
class Expectation:
    """What a statement, or all statements together, must rely on."""

    sources: tuple[str, ...]
    """Sources that the verdict must name. Empty: it must name none."""

    nats: float = 0.0
    """Nats that each of them must give, or that must be lost without it."""

    statement: int | None = None
    """The number of the statement, from 0. None: one statement must rely on the sources; or,
    without sources, none on any."""

    is_either: bool = False
    """Whether one of the sources is enough."""

    names_by_id: Mapping[str, set[str]] = field(default_factory=dict, compare=False, repr=False)
    """Names of the question's sources by the ids of the documents of which they are chunks."""

    def names_of(self, source: str) -> set[str]:
        """Return the names of the sources that an expected one stands for: its own, and those that
        have it as their id."""
        return {source, *self.names_by_id.get(source, ())}

    def __str__(self) -> str:
        if not self.sources:
            return "no source"
        condition = f", {self.nats:g} nats or more" if self.nats else ""
        conjunction = " or " if self.is_either else " and "
        return conjunction.join(self.sources) + condition


def read_expectations(path: str | Path) -> list[list[Expectation]]:
    """Return the field `expect` of each question of a .jsonl file: `none`, the name of a source,
    or {"both": …} or {"either": …} with several, for all statements together; or a list of these,
    one for each statement, in which null accepts any verdict."""
    return [_expectations_of(line) for line in read_lines(path)]


def _expectations_of(line: QuestionLine) -> list[Expectation]:
    """Return what the field `expect` of a line requires, an expectation for each entry."""
    expect = line.record.get("expect")
    expectations = list[Expectation]()
    if isinstance(expect, list):
        _check_length(expect, line.record.get("answer"), line.place)
        for number, entry in enumerate(expect):
            if entry is not None:
                expectations.append(_read_entry(entry, number, line.place))
    elif expect is not None:
        expectations.append(_read_entry(expect, None, line.place))
    try:
        ids = names_by_id(line) if expectations else {}
    except (UserError, ValueError):  # `read_questions` names what is wrong with the sources
        ids = {}
    return [replace(expectation, names_by_id=ids) for expectation in expectations]


def _check_length(expect: list[Any], answer: Any, place: str) -> None:
    """Raise unless each statement has an entry. A text is split later, and checked then."""
    if not expect:
        raise DataError(f"{place}: expect=[] checks nothing; omit it, or write one for each")
    if isinstance(answer, Mapping):
        answer = answer.get("spans")
    if isinstance(answer, list) and len(answer) != len(expect):
        raise DataError(
            f"{place}: expect has {len(expect)} entries, and the answer {len(answer)} statements; "
            "null accepts any verdict of a statement"
        )


class _Entry(NamedTuple):
    """An entry of `expect` by its parts, as JSON has them; nothing is checked yet."""

    names: Any
    """A name, or a list of names."""

    key: str = ""
    """The key with the names: sources, both or either. Empty: the entry is the names alone."""

    nats: Any = 0.0


def _read_entry(entry: Any, statement: int | None, place: str) -> Expectation:
    """Read one form of `expect`.

    statement: The number of the statement, from 0. None: the entry is about all of them.
    place: The line, for messages.
    """
    names, key, nats = _parts_of_entry(entry)
    if key == "sources" and isinstance(names, list) and len(names) > 1:
        # Some would read it as "both", others as "either".
        several = json.dumps(names, ensure_ascii=False)
        forms = f'{{"both": {several}}} or {{"either": {several}}}'
        raise DataError(f"{place}: expect names several sources; write {forms}")
    if isinstance(names, str):
        names = [names]
    is_number = isinstance(nats, int | float) and not isinstance(nats, bool)
    is_number = is_number and 0 <= nats <= MOST_NATS
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not are_names or not names or not is_number:
        raise DataError(f"{place}: expect={entry!r:.60} must be none, a source, {FORMS}, or a list")
    if len(names) > 1 and "none" in names:
        raise DataError(f"{place}: expect={entry!r:.60} mixes none with sources; write one of them")
    if len(set(names)) < len(names):
        raise DataError(f"{place}: expect={entry!r:.60} names a source twice; name it once")
    if names == ["none"] and nats:
        raise DataError(f"{place}: expect={entry!r:.60} has nats of no source; omit nats")
    return Expectation(
        sources=() if names == ["none"] else tuple(names),
        nats=float(nats),
        statement=statement,
        is_either=key == "either",
    )


def _parts_of_entry(entry: Any) -> _Entry:
    """Return names, key and nats of an object with one of the keys; of anything else the names
    alone."""
    if isinstance(entry, Mapping):
        keys = [key for key in ("sources", "both", "either") if key in entry]
        if len(keys) == 1 and set(entry) <= {keys[0], "nats"}:
            return _Entry(entry[keys[0]], keys[0], entry.get("nats", 0.0))
    return _Entry(entry)


def fits(expected: Expectation, row: StoredStatement, margin: float) -> bool:
    """Return whether a verdict is as expected, up to `margin` nats of an effect. An undecided
    statement rests on no source only if what it may lose is within the margin."""
    if not expected.sources:
        return row.rests_on_none or (margin > 0 and row.largest_effect <= margin)
    are_named = [
        any(_is_named(row, name, expected.nats, margin) for name in expected.names_of(source))
        for source in expected.sources
    ]
    if expected.is_either:
        return any(are_named)
    # A verdict "either" names both sources, but the statement needs one of them only.
    if len(expected.sources) > 1 and row.kind == "either":
        return False
    return all(are_named)


def _is_named(row: StoredStatement, name: str, nats: float, margin: float) -> bool:
    """Return whether a verdict names a source, or would with `margin` nats more. A source whose
    effect is small, or a small share of the nats, is not open, and no margin names it."""
    cell = row.cells.get(name)
    is_candidate = name in row.sources or name in row.open
    if cell is None or not is_candidate:
        # Through reasoning a source has no nats of its own.
        return name in row.origins and not nats
    is_near = margin > 0 and cell.above is not None and cell.above >= -margin
    return (name in row.sources or is_near) and cell.largest_effect >= nats - margin
