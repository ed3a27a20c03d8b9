"""Compare verdicts with what a questions file expects, and with an earlier run: stored answers →
**checks that pass or fail** → JUnit XML and JSON."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import hypot
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar
from xml.etree import ElementTree

from olmo_sparsity.base.errors import ConfigError, DataError, printable
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.folders import differences, leaves
from olmo_sparsity.sources.questions import (
    IDENTITY,
    StoredAnswer,
    StoredCell,
    StoredStatement,
    identity_in,
    read_answers,
    read_objects,
)
from olmo_sparsity.sources.server import OTHER_NATS, distance, read_probe

NOISE = 3.0
"""Standard errors of a difference of means over decoys that a changed verdict must exceed."""

FORM = '{"sources": [name, …], "nats": least number}'

MAY_DIFFER = re.compile(
    r"questions|num_questions|decoys|random_streams|settings\.(draws|seed)|versions(\..*)?"
)
"""Keys of the identity of results that may differ from a baseline's."""

T = TypeVar("T")


@dataclass(frozen=True)
class Expectation:
    sources: tuple[str, ...]  # that the verdict must name; empty: it must name none
    nats: float = 0.0  # that each of them must give, or that must be lost without it
    statement: int | None = None  # None: one must rely on the sources, or none of them on any

    def __str__(self) -> str:
        least = f", {self.nats:g} nats or more" if self.nats else ""
        return " and ".join(self.sources) + least if self.sources else "no source"


@dataclass(frozen=True)
class Check:
    question: int | None  # from 1, as all numbers here; None: of the whole baseline
    statement: int | None  # None: all of them
    text: str
    expected: str
    found: str
    passed: bool
    kind: str = "expect"  # or "baseline"
    by_margin: bool = False  # it fails without the margin

    @property
    def place(self) -> str:
        question = "all questions" if self.question is None else f"question {self.question}"
        return question if self.statement is None else f"{question}, statement {self.statement}"


@dataclass(frozen=True)
class GateReport:
    checks: Sequence[Check]
    notes: Sequence[str] = ()
    """What passes only by the margin, and what differs from the baseline without failing."""

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def describe(self) -> str:
        """Return failures and notes as text for a terminal."""
        lines = [f"{len(self.failures)} of {len(self.checks)} checks failed", *self.notes]
        for check in self.failures:
            lines += [
                f"{check.place}: {check.text}",
                f"  expected ({check.kind}): {check.expected}",
            ]
            lines.append(f"  found: {check.found}")
        return "\n".join(map(printable, lines))

    def write(self, folder: Path, suite: str) -> None:
        """Write gate.xml (JUnit) and gate.json."""
        counts = {"tests": str(len(self.checks)), "failures": str(len(self.failures))}
        root = ElementTree.Element("testsuites", counts)
        inner = ElementTree.SubElement(root, "testsuite", {"name": printable(suite)} | counts)
        for check in self.checks:
            named = {"classname": printable(suite), "name": f"{check.place} ({check.kind})"}
            element = ElementTree.SubElement(inner, "testcase", named)
            if not check.passed:
                message = printable(f"expected {check.expected}; found: {check.found}")
                failed = ElementTree.SubElement(element, "failure", {"message": message})
                failed.text = printable(check.text)
        ElementTree.SubElement(inner, "system-out").text = "\n".join(map(printable, self.notes))
        xml = ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
        write_atomically(folder / "gate.xml", xml)
        about = {"schema": "olmo-sparsity/gate", "version": 2, "passed": not self.failures}
        about |= {"notes": [*self.notes], "checks": [asdict(check) for check in self.checks]}
        write_atomically(folder / "gate.json", json.dumps(about, indent=1))


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
    nats, names = 0.0, given
    if isinstance(given, Mapping) and set(given) <= {"sources", "nats"} and "sources" in given:
        names, nats = given["sources"], given.get("nats", 0.0)
    names = [names] if isinstance(names, str) else names
    is_number = isinstance(nats, int | float) and not isinstance(nats, bool) and nats >= 0
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or not is_number:
        raise DataError(f"{where}: expect={given!r:.60} must be none, a source, {FORM} or a list")
    return Expectation(tuple([] if names == ["none"] else names), float(nats), statement)


def refuse_without_checks(
    questions: str | Path,
    out: str | Path,
    identity: Mapping[str, Any],
    baseline: str | Path | None,
    allow_other_model: bool = False,
) -> None:
    """Raise where `check` would have nothing to check against, before anything is computed."""
    if baseline is None:
        if not any(read_expectations(questions)):
            raise ConfigError(f"{questions}: no question has `expect`; add it, or pass --baseline")
        return
    if Path(baseline).resolve() == Path(out).resolve():
        raise ConfigError(f"baseline={baseline} is also --out; pass the folder of an earlier run")
    if not Path(baseline, IDENTITY).exists():
        raise ConfigError(f"--baseline {baseline} does not exist; make it by --out, without --gate")
    _compare_identities(identity, baseline, allow_other_model)
    read_answers(baseline)


def check(
    questions: str | Path,
    out: str | Path,
    baseline: str | Path | None = None,
    allow_other_model: bool = False,
    *,
    margin: float = 0.0,
) -> GateReport:
    """Check the results in `out` against `expect` of the questions, and against an earlier run.
    `margin`: nats by which a source may miss, or exceed, what it must give to be named."""
    answers = read_answers(out)
    expected = read_expectations(questions)
    if len(expected) != len(answers):
        raise DataError(f"{out} has {len(answers)} questions, and {questions} {len(expected)}")
    checks = [
        _against_expectation(one, answer, margin)
        for answer, several in zip(answers, expected, strict=True)
        for one in several
    ]
    notes = [
        f"{one.place} passes by the margin: expected {one.expected}; found: {one.found}"
        for one in checks
        if one.by_margin
    ]
    if baseline is None:
        return GateReport(checks, notes)
    notes += _compare_identities(identity_in(out), baseline, allow_other_model)
    notes += _compare_servers(Path(out), Path(baseline), allow_other_model)
    more_checks, more_notes = _against_baseline(answers, read_answers(baseline), baseline)
    return GateReport([*checks, *more_checks], [*notes, *more_notes])


def _against_expectation(one: Expectation, answer: StoredAnswer, margin: float) -> Check:
    number, statement = answer.question + 1, None if one.statement is None else one.statement + 1
    if missing := sorted(set(one.sources) - answer.source_texts.keys()):
        found = f"the prompt has no source {', '.join(missing)}"
        return Check(number, statement, "", str(one), found, False)
    rows = answer.statements if statement is None else answer.statements[statement - 1 : statement]
    if not rows:
        expected = f"{one} in statement {statement}"
        return Check(number, statement, "", expected, "no such statement", False)
    some = any if one.statement is not None or one.sources else all
    strictly, passed = (some(_fits(one, row, nats) for row in rows) for nats in (0.0, margin))
    text, verdicts = " ".join(row.text for row in rows), "; ".join(row.verdict for row in rows)
    by_margin = passed and not strictly
    return Check(number, statement, text, str(one), verdicts, passed, by_margin=by_margin)


def _fits(one: Expectation, row: StoredStatement, margin: float) -> bool:
    """Through reasoning a source has no nats of its own."""

    def is_near(name: str) -> bool:
        above = row.cells[name].above if name in row.cells else None
        return margin > 0 and above is not None and abs(above) <= margin

    if not one.sources:
        return all(map(is_near, row.origins))
    return all(
        name in row.cells and row.cells[name].most >= one.nats - margin
        if name in row.sources or is_near(name)
        else name in row.origins and not one.nats
        for name in one.sources
    )


def _compare_identities(now: Mapping[str, Any], baseline: str | Path, allowed: bool) -> list[str]:
    """Return how model, tokenizer, template or settings differ; raise unless that is allowed."""
    before, after = (
        {key: value for key, value in leaves(one) if not MAY_DIFFER.fullmatch(key)}
        for one in (identity_in(baseline), now)
    )
    return _allow(differences(before, after), baseline, allowed)


def _compare_servers(out: Path, baseline: Path, allowed: bool) -> list[str]:
    now, before = read_probe(out), read_probe(baseline)
    nats = 0.0 if now is None or before is None else distance(now, before)
    said = f"the server's log-probabilities differ by {nats:.2f} nats a token"
    return _allow([said] if nats > OTHER_NATS else [], baseline, allowed)


def _allow(found: list[str], baseline: str | Path, allowed: bool) -> list[str]:
    said = f"baseline={baseline} is of another model: {', '.join(found)}"
    if found and not allowed:
        raise ConfigError(f"{said}; measure it again, or pass --allow-other-model")
    return [said] if found else []


def _against_baseline(
    answers: Sequence[StoredAnswer], earlier: Sequence[StoredAnswer], baseline: str | Path
) -> tuple[list[Check], list[str]]:
    """Compare statements of equal text in questions of equal text. A verdict fails that is another
    one, if a source by which it differs has changed by more than noise."""
    pairs, extra, missing = _paired(
        answers,
        earlier,
        lambda one: (one.asked, one.texts, tuple(sorted(one.source_texts.items()))),
        lambda one: (one.asked, one.texts),
        lambda one: one.asked,
    )
    checks = list[Check]()
    notes = [
        f"{where} the baseline: question {one.question + 1}, '{shorten(one.asked, 60)}'"
        for where, several in (("not in", extra), ("only in", missing))
        for one in several
    ]
    for now, before in sorted(pairs, key=lambda pair: pair[0].question):
        number = now.question + 1
        notes += _changed_sources(now, before)
        rows, others, lost = _paired(now.statements, before.statements, lambda one: one.text)
        for row, earlier_row in rows:
            texts = row.text, earlier_row.verdict, row.verdict
            passed = not _differ(row, earlier_row)
            checks.append(Check(number, row.number + 1, *texts, passed, "baseline"))
        if not rows:
            expected, found = " ".join(before.texts), " ".join(now.texts)
            checks.append(Check(number, None, now.asked, expected, found, False, "baseline"))
        elif others or lost:
            notes.append(f"question {number}: {len(others)} statements are new, {len(lost)} gone")
    if not checks:
        found = f"nothing was compared: no question is also in {baseline}"
        checks.append(Check(None, None, "", "questions in common", found, False, "baseline"))
    return checks, notes


def _paired(
    now: Sequence[T], before: Sequence[T], *keys: Callable[[T], Any]
) -> tuple[list[tuple[T, T]], list[T], list[T]]:
    """Pair items of equal first key, in order, then the rest by the second, …; and what is left."""
    pairs, left, waiting = list[tuple[T, T]](), [*now], [*before]
    for key in keys:
        by_key, unpaired = defaultdict[Any, list[T]](list), list[T]()
        for one in waiting:
            by_key[key(one)].append(one)
        for one in left:
            if others := by_key[key(one)]:
                pairs.append((one, others.pop(0)))
            else:
                unpaired.append(one)
        left, waiting = unpaired, [one for others in by_key.values() for one in others]
    return pairs, left, waiting


def _changed_sources(now: StoredAnswer, before: StoredAnswer) -> list[str]:
    both = dict(before.source_texts), dict(now.source_texts)
    said = ", ".join(sorted({name for name, _ in both[0].items() ^ both[1].items()}))
    return [f"question {now.question + 1}, sources new, gone or changed: {said}"] if said else []


def _differ(now: StoredStatement, before: StoredStatement) -> bool:
    return any(
        name not in now.cells
        or name not in before.cells
        or _changed(now.cells[name], before.cells[name])
        for name in {*now.sources} ^ {*before.sources}
    )


def _changed(now: StoredCell, before: StoredCell) -> bool:
    """Whether what the source gives, or what is lost without it, has changed by more than noise;
    what only one of the runs evaluated says nothing."""
    pairs = [
        (one, other)
        for one, other in zip(now.means, before.means, strict=True)
        if one is not None and other is not None
    ]
    return not pairs or any(
        abs(nats - earlier) > NOISE * hypot(se, earlier_se)
        for (nats, se), (earlier, earlier_se) in pairs
    )
