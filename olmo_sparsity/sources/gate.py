"""Compare verdicts with what a questions file expects, and with an earlier run: stored answers →
**checks that pass or fail** → JUnit XML and JSON."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from math import hypot
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar
from xml.etree import ElementTree

from olmo_sparsity.base.errors import ConfigError, DataError, printable
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.folders import differences, leaves
from olmo_sparsity.sources.answers import (
    IDENTITY,
    StoredAnswer,
    StoredCell,
    StoredStatement,
    identity_in,
    read_answers,
)
from olmo_sparsity.sources.questions_file import read_objects
from olmo_sparsity.sources.server import OTHER_NATS, distance, read_probe
from olmo_sparsity.sources.verdicts import SEVERAL_NATS

NOISE = 3.0
"""Standard errors of a difference of means over decoys that a changed verdict must exceed."""

MOST_MARGIN = SEVERAL_NATS
"""Nats. A larger margin would let a statement pass as resting on no source that loses several."""

SIMILAR = 0.6
"""Share of letters in common (difflib) from which a statement counts as another one reworded."""

FORMS = '{"both": [name, …]}, {"either": [name, …]}, each with "nats": least number if wanted'

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
    is_either: bool = False  # one of the sources is enough

    def __str__(self) -> str:
        least = f", {self.nats:g} nats or more" if self.nats else ""
        joint = " or " if self.is_either else " and "
        return joint.join(self.sources) + least if self.sources else "no source"


@dataclass(frozen=True)
class Check:
    question: int | None  # from 1, as all numbers here; None: of the whole baseline
    statement: int | None  # None: all of them
    text: str
    expected: str
    found: str
    passed: bool
    kind: str = "expect"  # or "baseline", or "new": a statement that the baseline does not have
    by_margin: bool = False  # it fails without the margin
    id: str = ""  # of the question
    asked: str = ""
    seconds: float = 0.0  # that the question took

    @property
    def place(self) -> str:
        question = "all questions" if self.question is None else f"question {self.question}"
        if self.id:
            question += f" ({self.id})"
        return question if self.statement is None else f"{question}, statement {self.statement}"


@dataclass(frozen=True)
class GateReport:
    """The checks of a file of questions. It is true if enough of them pass, and shows what failed,
    so a test may say `assert check(…)`."""

    checks: Sequence[Check]
    notes: Sequence[str] = ()
    """What passes only by the margin, and what differs from the baseline without failing."""

    must_pass: float = 1.0
    """The share of checks that must pass."""

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        # A baseline without a question in common is no share of failures: nothing was compared.
        if any(check.question is None for check in self.failures):
            return False
        # In whole checks: 0.9 of 10 is 9, also where a product of floats is not.
        least = math.ceil(self.must_pass * len(self.checks) - 1e-9)
        return len(self.checks) - len(self.failures) >= least

    @property
    def passes_by_question(self) -> dict[int, bool]:
        """By question, from 0, whether all its checks passed."""
        found = dict[int, bool]()
        for check in self.checks:
            if check.question is not None:
                number = check.question - 1
                found[number] = found.get(number, True) and check.passed
        return found

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Return failures and notes as text for a terminal."""
        first = f"{len(self.failures)} of {len(self.checks)} checks failed"
        if self.must_pass < 1:
            verdict = "passed" if self.passed else "failed"
            first += f"; {self.must_pass:.4g} of them must pass: {verdict}"
        lines = [first, *self.notes]
        for check in self.failures:
            lines += [
                f"{check.place}: {check.text}",
                f"  expected ({check.kind}): {check.expected}",
            ]
            lines.append(f"  found: {check.found}")
        return "\n".join(map(printable, lines))

    def write(self, folder: Path, suite: str) -> None:
        """Write gate.xml (JUnit) and gate.json."""
        seconds = {check.question: check.seconds for check in self.checks}
        counts = {"tests": str(len(self.checks)), "failures": str(len(self.failures))}
        counts |= {"time": f"{sum(seconds.values()):.3f}"}
        root = ElementTree.Element("testsuites", counts)
        inner = ElementTree.SubElement(root, "testsuite", {"name": printable(suite)} | counts)
        num_checks = Counter(check.question for check in self.checks)
        for check in self.checks:
            asked = f": {shorten(check.asked, 80)}" if check.asked else ""
            named = {
                "classname": printable(suite),
                "name": printable(f"{check.place} ({check.kind}){asked}"),
                # Checks of one question share its time, so that the sum is that of the suite.
                "time": f"{check.seconds / num_checks[check.question]:.3f}",
            }
            element = ElementTree.SubElement(inner, "testcase", named)
            if not check.passed:
                message = printable(f"expected {check.expected}; found: {check.found}")
                failed = ElementTree.SubElement(element, "failure", {"message": message})
                failed.text = printable(f"{check.text}\n{message}")
        ElementTree.SubElement(inner, "system-out").text = "\n".join(map(printable, self.notes))
        xml = ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
        write_atomically(folder / "gate.xml", xml)
        about = {"schema": "olmo-sparsity/gate", "version": 3, "passed": self.passed}
        about |= {"must_pass": self.must_pass}
        about |= {"notes": [*self.notes], "checks": [asdict(check) for check in self.checks]}
        write_atomically(folder / "gate.json", json.dumps(about, indent=1))


def read_expectations(path: str | Path) -> list[list[Expectation]]:
    """Return the field `expect` of each question of a .jsonl file: `none`, the name of a source,
    or {"both": …} or {"either": …} with several, for all statements together; or a list of these,
    one for each statement, in which null accepts any verdict."""
    found = list[list[Expectation]]()
    for where, record, _ in read_objects(path):
        given = record.get("expect")
        if isinstance(given, list):
            _refuse_other_length(given, record.get("answer"), where)
        several = enumerate(given) if isinstance(given, list) else [(None, given)]
        found.append([_expectation(one, i, where) for i, one in several if one is not None])
    return found


def _refuse_other_length(expect: list[Any], answer: Any, where: str) -> None:
    """Raise unless each statement has an entry. A text is split later, and checked then."""
    if not expect:
        raise DataError(f"{where}: expect=[] checks nothing; omit it, or write one for each")
    if isinstance(answer, Mapping):
        answer = answer.get("spans")
    if isinstance(answer, list) and len(answer) != len(expect):
        numbers = f"{len(expect)} entries, and the answer {len(answer)} statements"
        raise DataError(f"{where}: expect has {numbers}; null accepts any verdict of a statement")


def _expectation(given: Any, statement: int | None, where: str) -> Expectation:
    nats = 0.0
    names = given
    is_either = False
    if isinstance(given, Mapping):
        ways = [way for way in ("sources", "both", "either") if way in given]
        if len(ways) == 1 and set(given) <= {ways[0], "nats"}:
            names = given[ways[0]]
            nats = given.get("nats", 0.0)
            is_either = ways[0] == "either"
            if ways[0] == "sources" and isinstance(names, list) and len(names) > 1:
                said = json.dumps(names, ensure_ascii=False)
                forms = f'{{"both": {said}}} or {{"either": {said}}}'
                raise DataError(f"{where}: expect names several sources; write {forms}")
    names = [names] if isinstance(names, str) else names
    is_number = isinstance(nats, int | float) and not isinstance(nats, bool) and nats >= 0
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not are_names or not names or not is_number:
        raise DataError(f"{where}: expect={given!r:.60} must be none, a source, {FORMS}, or a list")
    if len(names) > 1 and "none" in names:
        raise DataError(f"{where}: expect={given!r:.60} mixes none with sources; write one of them")
    return Expectation(
        sources=() if names == ["none"] else tuple(names),
        nats=float(nats),
        statement=statement,
        is_either=is_either,
    )


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
        for where, record, _ in read_objects(questions):
            if "expect" not in record:
                raise DataError(
                    f"{where} has no `expect`, so nothing is checked; add it (null accepts any "
                    "verdict), or pass --baseline"
                )
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
    must_pass: float = 1.0,
    new_need_source: bool = False,
) -> GateReport:
    """Check the results in `out` against `expect` of the questions, and against an earlier run.

    margin: Nats by which an effect may miss, or exceed, what a verdict requires.
    must_pass: The share of checks that must pass.
    new_need_source: Fail statements that the baseline does not have and that rest on no source.
    """
    refuse_margin(margin)
    answers = read_answers(out)
    expected = read_expectations(questions)
    if len(expected) != len(answers):
        raise DataError(f"{out} has {len(answers)} questions, and {questions} {len(expected)}")
    checks = [
        _against_expectation(expectation, answer, margin)
        for answer, several in zip(answers, expected, strict=True)
        for expectation in several
    ]
    # A text is split into statements only when it is answered.
    for answer, (_, record, _) in zip(answers, read_objects(questions), strict=True):
        expect = record.get("expect")
        if isinstance(expect, list) and len(expect) < len(answer.statements):
            checks.append(_too_short(answer, len(expect)))
    notes = [
        f"{check.place} passes by the margin: expected {check.expected}; found: {check.found}"
        for check in checks
        if check.by_margin
    ]
    if baseline is None:
        return GateReport(checks, notes, must_pass)
    notes += _compare_identities(identity_in(out), baseline, allow_other_model)
    notes += _compare_servers(Path(out), Path(baseline), allow_other_model)
    # What a statement is expected to rely on is more than what it relied on before.
    as_expected = {
        (check.question, check.statement)
        for check in checks
        if check.passed and not check.by_margin and check.statement is not None
    }
    more_checks, more_notes = _against_baseline(
        answers, read_answers(baseline), baseline, as_expected, new_need_source
    )
    return GateReport([*checks, *more_checks], [*notes, *more_notes], must_pass)


def refuse_margin(margin: float) -> None:
    if not 0 <= margin <= MOST_MARGIN:
        raise ConfigError(f"margin={margin} must be a number of nats from 0 to {MOST_MARGIN:g}")


def _check_of(answer: StoredAnswer, **given: Any) -> Check:
    about: dict[str, Any] = {"id": answer.id, "asked": answer.asked, "seconds": answer.seconds}
    return Check(question=answer.question + 1, **about, **given)


def _too_short(answer: StoredAnswer, num_entries: int) -> Check:
    """Return the failed check of an answer with more statements than `expect` has entries."""
    return _check_of(
        answer,
        statement=None,
        text=answer.asked,
        expected=f"{num_entries} statements, as `expect` has entries",
        found=f"{len(answer.statements)} statements",
        passed=False,
    )


def _against_expectation(expected: Expectation, answer: StoredAnswer, margin: float) -> Check:
    number = None if expected.statement is None else expected.statement + 1
    missing = sorted(set(expected.sources) - answer.source_texts.keys())
    if missing and not (expected.is_either and len(missing) < len(expected.sources)):
        found = f"the prompt has no source {', '.join(missing)}"
        return _check_of(
            answer, statement=number, text="", expected=str(expected), found=found, passed=False
        )
    rows = answer.statements if number is None else answer.statements[number - 1 : number]
    if not rows:
        return _check_of(
            answer,
            statement=number,
            text="",
            expected=f"{expected} in statement {number}",
            found="no such statement",
            passed=False,
        )
    # Of all statements together one must rely on the sources, but none of them on any.
    enough = all if number is None and not expected.sources else any
    passes_strictly = enough(_fits(expected, row, 0.0) for row in rows)
    passes = enough(_fits(expected, row, margin) for row in rows)
    return _check_of(
        answer,
        statement=number,
        text=" ".join(row.text for row in rows),
        expected=str(expected),
        found="; ".join(row.verdict for row in rows),
        passed=passes,
        by_margin=passes and not passes_strictly,
    )


def _fits(expected: Expectation, row: StoredStatement, margin: float) -> bool:
    """Return whether a verdict is as expected, up to `margin` nats of an effect. An undecided
    statement rests on no source only if what it may lose is within the margin."""
    if not expected.sources:
        return row.rests_on_none or (margin > 0 and row.most <= margin)
    if expected.is_either:
        return any(_names(row, name, expected.nats, margin) for name in expected.sources)
    if len(expected.sources) > 1 and row.kind == "either":
        return False
    return all(_names(row, name, expected.nats, margin) for name in expected.sources)


def _names(row: StoredStatement, name: str, nats: float, margin: float) -> bool:
    """Return whether a verdict names a source, or would with `margin` nats more. A source whose
    effect is small, or a small share of the nats, is not open, and no margin names it. Through
    reasoning a source has no nats of its own."""
    cell = row.cells.get(name)
    if cell is None or not (name in row.sources or name in row.open):
        return name in row.origins and not nats
    is_near = margin > 0 and cell.above is not None and cell.above >= -margin
    return (name in row.sources or is_near) and cell.most >= nats - margin


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
    answers: Sequence[StoredAnswer],
    earlier: Sequence[StoredAnswer],
    baseline: str | Path,
    as_expected: Set[tuple[int | None, int | None]],
    new_need_source: bool,
) -> tuple[list[Check], list[str]]:
    """Compare statements of equal text, or reworded ones, in questions of equal text. A verdict
    fails that no longer names a source, if that has changed by more than noise."""
    pairs, extra, missing = _paired(
        answers,
        earlier,
        lambda answer: (answer.asked, answer.texts, tuple(sorted(answer.source_texts.items()))),
        lambda answer: (answer.asked, answer.texts),
        lambda answer: (answer.asked, answer.id),
        lambda answer: answer.asked,
        # A reworded question keeps its id. Questions without an id are equal to no other.
        lambda answer: answer.id or object(),
    )
    checks = list[Check]()
    notes = [
        f"{where} the baseline: question {answer.question + 1}, '{shorten(answer.asked, 60)}'"
        for where, several in (("not in", extra), ("only in", missing))
        for answer in several
    ]
    new_rows = [(answer, row) for answer in extra for row in answer.statements]
    for now, before in sorted(pairs, key=lambda pair: pair[0].question):
        compared = _compare_answers(now, before, as_expected)
        checks += compared.checks
        notes += compared.notes
        new_rows += [(now, row) for row in compared.new_rows]
    if not checks:
        found = f"nothing was compared: no question is also in {baseline}"
        checks.append(Check(None, None, "", "questions in common", found, False, "baseline"))
    if new_need_source:
        checks += [
            _check_of(
                answer,
                statement=row.number + 1,
                text=row.text,
                expected="a source, as the statement is new",
                found=row.verdict,
                passed=bool(row.origins),
                kind="new",
            )
            for answer, row in new_rows
            if (answer.question + 1, row.number + 1) not in as_expected
        ]
    return checks, notes


@dataclass(frozen=True)
class _Compared:
    """What comparing an answer with that of an earlier run finds."""

    checks: list[Check]
    notes: list[str]
    new_rows: list[StoredStatement]
    """Statements that the earlier answer does not have."""


def _compare_answers(
    now: StoredAnswer, before: StoredAnswer, as_expected: Set[tuple[int | None, int | None]]
) -> _Compared:
    number = now.question + 1
    notes = list[str]()
    if now.asked != before.asked:
        notes.append(f"{_place(now)} is reworded, before '{shorten(before.asked, 60)}'")
    before, renamed = _with_new_names(now, before)
    notes += [f"question {number}: source {old} is now {new}" for old, new in renamed.items()]
    notes += _changed_sources(now, before)
    same, others, gone = _paired(now.statements, before.statements, lambda row: row.text)
    reworded, others, gone = _reworded(others, gone)
    checks = list[Check]()
    for row, earlier_row in [*same, *reworded]:
        is_as_expected = (number, row.number + 1) in as_expected
        is_worse = _is_worse(row, earlier_row)
        place = f"question {number}, statement {row.number + 1}"
        notes += _notes_of_statement(place, row, earlier_row, is_worse, is_as_expected)
        checks.append(
            _check_of(
                now,
                statement=row.number + 1,
                text=row.text,
                expected=earlier_row.verdict,
                found=row.verdict,
                passed=is_as_expected or not is_worse,
                kind="baseline",
            )
        )
    if not checks:
        checks.append(
            _check_of(
                now,
                statement=None,
                text=now.asked,
                expected=" ".join(before.texts),
                found=" ".join(now.texts),
                passed=False,
                kind="baseline",
            )
        )
    elif others or gone:
        notes.append(f"question {number}: {len(others)} statements are new, {len(gone)} gone")
    return _Compared(checks, notes, others)


def _notes_of_statement(
    place: str,
    row: StoredStatement,
    earlier_row: StoredStatement,
    is_worse: bool,
    is_as_expected: bool,
) -> list[str]:
    """Return what differs from the earlier run without failing."""
    notes = list[str]()
    gained = sorted({*row.origins} - {*earlier_row.origins})
    lost = sorted({*earlier_row.origins} - {*row.origins})
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


def _with_new_names(now: StoredAnswer, before: StoredAnswer) -> tuple[StoredAnswer, dict[str, str]]:
    """Return an earlier answer with the names that its sources have now, and those that changed."""
    new_names = _new_names(now.source_texts, before.source_texts)
    rows = [
        replace(
            row,
            sources=[new_names.get(name, name) for name in row.sources],
            open=[new_names.get(name, name) for name in row.open],
            origins=[new_names.get(name, name) for name in row.origins],
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
    found = {name: name for name, text in before.items() if now.get(name) == text}
    names_of_text = defaultdict[str, list[str]](list)
    for name, text in now.items():
        if name not in found:
            names_of_text[text].append(name)
    for name, text in before.items():
        if name not in found and names_of_text[text]:
            found[name] = names_of_text[text].pop(0)
    taken = {*found.values()}
    for name in before:
        if name in found:
            continue
        # Its text is gone. Its name may now be that of a source which had another name.
        new = name
        while new in taken:
            new = f"{new} (earlier)"
        found[name] = new
        taken.add(new)
    return found


def _reworded(
    now: Sequence[StoredStatement], before: Sequence[StoredStatement]
) -> tuple[
    list[tuple[StoredStatement, StoredStatement]], list[StoredStatement], list[StoredStatement]
]:
    """Pair statements of similar text, the most similar first; and what is left."""
    shares = list[tuple[float, int, int]]()
    for i, row in enumerate(now):
        for j, earlier in enumerate(before):
            # With `autojunk`, frequent letters of texts above 200 letters would not count.
            matcher = SequenceMatcher(None, row.text, earlier.text, autojunk=False)
            if matcher.quick_ratio() >= SIMILAR:  # an upper bound that is cheap
                shares.append((matcher.ratio(), i, j))
    pairs = dict[int, int]()
    for share, i, j in sorted(shares, key=lambda item: (-item[0], item[1], item[2])):
        if share >= SIMILAR and i not in pairs and j not in pairs.values():
            pairs[i] = j
    return (
        [(now[i], before[j]) for i, j in sorted(pairs.items())],
        [row for i, row in enumerate(now) if i not in pairs],
        [row for j, row in enumerate(before) if j not in pairs.values()],
    )


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


def _is_worse(now: StoredStatement, before: StoredStatement) -> bool:
    """Return whether a statement no longer relies on a source that it relied on. Nats of the same
    text are compared, and may change by noise; those of another text may not be. What was reached
    through reasoning has no nats of its own, and may not be lost either."""
    is_reworded = now.text != before.text
    for name in {*before.origins} - {*now.origins}:
        is_compared = name in before.sources and name in before.cells and name in now.cells
        if is_reworded or not is_compared or _changed(now.cells[name], before.cells[name]):
            return True
    return False


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
