"""Compare verdicts with what a questions file expects, and with an earlier run.

Place in the flow: tables of measure_questions → **cases that pass or fail** → a table, JUnit XML
and JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd

from olmo_sparsity.analysis.attribution.questions import read_objects
from olmo_sparsity.analysis.engines.server import OTHER_NATS, distance, read_probe
from olmo_sparsity.errors import ConfigError, DataError, printable
from olmo_sparsity.io import read_parquet, write_atomically

NOISE = 3.0
"""Standard errors of a difference of means over decoys that a changed verdict must exceed."""

FILES = ("gate.xml", "gate.json")


@dataclass(frozen=True)
class Expectation:
    sources: tuple[str, ...]
    """Sources that the verdict must name; empty: it must name none."""

    nats: float = 0.0
    """Nats that each of them must give, or that must be lost without it."""

    statement: int | None = None
    """None: one of the statements must rely on the sources, or none of them on any."""

    def __str__(self) -> str:
        if not self.sources:
            return "no source"
        least = f", {self.nats:g} nats or more" if self.nats else ""
        return " and ".join(self.sources) + least


@dataclass(frozen=True)
class Case:
    question: int
    """From 1, as all numbers here."""

    statement: int | None
    """None: all of them."""

    text: str
    expected: str
    found: str
    passed: bool
    kind: str = "expect"
    """`expect` or `baseline`."""


@dataclass(frozen=True)
class Gate:
    cases: Sequence[Case]
    unmatched: int = 0
    """Statements that the earlier run does not have, because the answer is another one."""

    other_model: float = 0.0
    """Nats a token by which the server's numbers for a fixed text differ from the earlier run's;
    0: within rounding, or no server."""

    @property
    def failures(self) -> list[Case]:
        return [case for case in self.cases if not case.passed]

    def describe(self) -> str:
        """Return the failures as a table."""
        lines = [f"{len(self.failures)} of {len(self.cases)} checks failed"]
        if self.unmatched:
            lines.append(f"{self.unmatched} statements are not in the baseline")
        if self.other_model:
            lines.append(
                "the server has another model than in the baseline: its log-probabilities of one "
                f"text differ by {self.other_model:.2f} nats a token"
            )
        for case in self.failures:
            number = "" if case.statement is None else f", statement {case.statement}"
            lines += [
                f"question {case.question}{number}: {printable(case.text)}",
                f"  expected ({case.kind}): {printable(case.expected)}",
                f"  found: {printable(case.found)}",
            ]
        return "\n".join(lines)

    def write(self, folder: Path, suite: str) -> None:
        """Write gate.xml (JUnit) and gate.json."""
        counts = {"tests": str(len(self.cases)), "failures": str(len(self.failures))}
        root = ElementTree.Element("testsuites", counts)
        inner = ElementTree.SubElement(root, "testsuite", {"name": suite} | counts)
        for case in self.cases:
            number = "all statements" if case.statement is None else f"statement {case.statement}"
            name = f"question {case.question}, {number} ({case.kind})"
            element = ElementTree.SubElement(inner, "testcase", {"classname": suite, "name": name})
            if not case.passed:
                message = printable(f"expected {case.expected}; found: {case.found}")
                failed = ElementTree.SubElement(element, "failure", {"message": message})
                failed.text = printable(case.text)
        xml = ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
        write_atomically(folder / FILES[0], xml)
        about = {"schema": "olmo-sparsity/gate", "version": 1, "passed": not self.failures}
        about |= {"unmatched": self.unmatched, "other_model": self.other_model}
        about |= {"cases": [asdict(case) for case in self.cases]}
        write_atomically(folder / FILES[1], json.dumps(about, ensure_ascii=False, indent=1))


def read_expectations(path: str | Path) -> list[list[Expectation]]:
    """Return the field `expect` of each question of a .jsonl file: `none`, the name of a source,
    several names, or {"sources": …, "nats": …}, for all statements together; or a list of these,
    one for each statement, in which null accepts any verdict."""
    found = list[list[Expectation]]()
    for where, record, _ in read_objects(path):
        given = record.get("expect")
        several = enumerate(given) if isinstance(given, list) else [(None, given)]
        found.append([_expectation(one, i, where) for i, one in several if one is not None])
    return found


def _expectation(given: Any, statement: int | None, where: str) -> Expectation:
    nats = 0.0
    names = given
    if isinstance(given, Mapping) and set(given) <= {"sources", "nats"} and "sources" in given:
        names, nats = given["sources"], given.get("nats", 0.0)
    names = [names] if isinstance(names, str) else names
    is_number = isinstance(nats, int | float) and not isinstance(nats, bool) and nats >= 0
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or not is_number:
        raise DataError(
            f'{where}: expect={given!r:.60} must be "none", the name of a source, or '
            '{"sources": [name, …], "nats": least number}; or a list of these, one a statement'
        )
    names = [] if names == ["none"] else names
    return Expectation(tuple(names), float(nats), statement)


def refuse_without_expectations(questions: str | Path, baseline: str | Path | None) -> None:
    """Raise if no question has a field `expect`, before anything is computed."""
    if not any(read_expectations(questions)) and baseline is None:
        raise ConfigError(
            f"{questions}: no question has the field `expect`; add it, or pass --baseline"
        )
    if baseline is not None:
        _tables(baseline)


def check(questions: str | Path, out: str | Path, baseline: str | Path | None = None) -> Gate:
    """Check the tables in `out` against `expect` of the questions, and against the tables of an
    earlier run."""
    expected = read_expectations(questions)
    statements, matrix = _tables(out)
    cases = [
        _case(one, number, statements[statements.question == number], matrix)
        for number, several in enumerate(expected)
        for one in several
    ]
    if baseline is None:
        return Gate(cases)
    others, unmatched = _against(statements, matrix, *_tables(baseline))
    now, before = read_probe(Path(out)), read_probe(Path(baseline))
    nats = 0.0 if now is None or before is None else distance(now, before)
    return Gate([*cases, *others], unmatched, nats if nats > OTHER_NATS else 0.0)


def _tables(folder: str | Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    remedy = "measure the questions again"
    statements, matrix = (
        read_parquet(Path(folder) / f"{name}.parquet", remedy).to_pandas()
        for name in ("statements", "matrix")
    )
    if "se_gives" not in matrix:
        raise DataError(f"{folder}/matrix.parquet has no column se_gives; {remedy}")
    if "origins" not in statements:  # written before reasoning was followed
        statements["origins"] = statements.sources
    statements["statement"] = statements.groupby("question").cumcount()
    return statements, matrix.set_index(["question", "statement", "source"])


def _case(one: Expectation, number: int, rows: pd.DataFrame, matrix: pd.DataFrame) -> Case:
    known = set(matrix.loc[number].index.get_level_values("source"))
    if missing := sorted(set(one.sources) - known):
        found = f"the prompt has no source {', '.join(missing)}"
        return Case(number + 1, _from_1(one.statement), "", str(one), found, False)
    if one.statement is not None:
        rows = rows[rows.statement == one.statement]
        if rows.empty:
            expected = f"{one} in statement {one.statement + 1}"
            return Case(number + 1, one.statement + 1, "", expected, "no such statement", False)
    fits = [_fits(one, row, matrix) for row in rows.itertuples()]
    passed = any(fits) if one.statement is not None or one.sources else all(fits)
    text = " ".join(rows.text)
    return Case(number + 1, _from_1(one.statement), text, str(one), "; ".join(rows.verdict), passed)


def _from_1(number: int | None) -> int | None:
    return None if number is None else number + 1


def _fits(one: Expectation, row: Any, matrix: pd.DataFrame) -> bool:
    """Through reasoning a source has no nats of its own."""
    if not one.sources:
        return len(row.origins) == 0
    cells = matrix.loc[row.question, row.statement]
    return all(
        cells.loc[name, ["gives", "lost"]].max() >= one.nats
        if name in row.sources
        else name in row.origins and not one.nats
        for name in one.sources
    )


def _against(
    statements: pd.DataFrame, matrix: pd.DataFrame, before: pd.DataFrame, its_matrix: pd.DataFrame
) -> tuple[list[Case], int]:
    """A case for each statement that the earlier run has, too: it fails if the verdict is another
    one, and a source by which they differ has changed by more than noise."""
    keys = ["question", "statement", "text"]
    both = statements.merge(before, on=keys, suffixes=("", "_before"))
    cases = []
    for row in both.itertuples():
        place = row.question, row.statement
        now, then = set(row.sources), set(row.sources_before)
        changed = now ^ then
        passed = not any(
            _differ(matrix.loc[(*place, name)], its_matrix.loc[(*place, name)])
            if (*place, name) in matrix.index and (*place, name) in its_matrix.index
            else True
            for name in changed
        )
        numbers = row.question + 1, row.statement + 1
        texts = row.text, row.verdict_before, row.verdict
        cases.append(Case(*numbers, *texts, passed, "baseline"))
    return cases, len(statements) - len(both)


def _differ(now: pd.Series, before: pd.Series) -> bool:
    return any(
        abs(now[name] - before[name])
        > NOISE * (now[f"se_{name}"] ** 2 + before[f"se_{name}"] ** 2) ** 0.5
        for name in ("gives", "lost")
    )
