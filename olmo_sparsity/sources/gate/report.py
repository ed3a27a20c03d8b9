"""Report the checks of a file of questions as text and JSON, and as JUnit XML by junit.py.

Place in the flow: gate.py and baseline.py make each `Check` → **`GateReport`**, which says whether
enough of them pass. Its text begins with the counts, and shows each failure:

    1 of 5 checks of `expect` failed (80% must pass), 0 of 3 of the baseline: passed
    question 2 (opening), statement 1: It opened in 1921.
      expected (expect): report.pdf
      found: rests on no source (all together: 0.9 nats)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from olmo_sparsity.base.errors import printable
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.sources.gate.answers import StoredAnswer
from olmo_sparsity.sources.gate.junit import TestCase, TestSuite, write_junit

VERSION = 3
"""Version of gate.json, whose checks have the fields of `Check` as keys."""

WORDS_OF_KINDS = {
    "expect": "of `expect`",
    "baseline": "of the baseline",
    "new": "of new statements",
}
"""How the line of counts names the checks of each kind (`Check.kind`)."""


@dataclass(frozen=True)
class Check:
    """A verdict next to what was expected of it. Its fields are keys of gate.json."""

    question: int | None
    """The number of the question, from 1. None means that the check is of the whole baseline."""

    statement: int | None
    """The number of the statement, from 1. None means that the check is of all of them."""

    text: str
    """The text of the statement, or of several, or of the question."""

    expected: str
    """What passes, in words: `report.pdf`, `faq.md or report.pdf`, or an earlier verdict."""

    found: str
    """The verdict, in words: `rests on no source (all together: 0.9 nats)`."""

    passed: bool
    kind: Literal["expect", "baseline", "new"] = "expect"
    """What expects it: "expect", the field of the file; "baseline", the verdict of an earlier run;
    "new", that a statement which the baseline does not have rests on a source."""

    by_margin: bool = False
    """Whether it passes only because `--margin` tolerates a source that misses its threshold by so
    many nats."""

    id: str = ""
    """The question's id in the file; empty if it has none."""

    asked: str = ""
    """The text of the question."""

    seconds: float = 0.0
    """How long the question took."""

    @property
    def where(self) -> str:
        """The question and the statement, in words."""
        question = "all questions" if self.question is None else f"question {self.question}"
        if self.id:
            question += f" ({self.id})"
        return question if self.statement is None else f"{question}, statement {self.statement}"


def check_of(answer: StoredAnswer, **fields: Any) -> Check:
    """Return a check of an answer, with these other fields of `Check`."""
    return Check(
        question=answer.question + 1,
        id=answer.id,
        asked=answer.asked,
        seconds=answer.seconds,
        **fields,
    )


@dataclass(frozen=True)
class GateReport:
    """The checks of a file of questions. It is true if enough of them pass, and shows what failed,
    so a test may say `assert check(…)`."""

    checks: Sequence[Check]
    notes: Sequence[str] = ()
    """What passes only by the margin, and what differs from the baseline without failing."""

    must_pass: float = 1.0
    """The fraction of the checks of `expect` that must pass. Those of a baseline all must: a
    tolerance for known failures would hide a new one."""

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """Whether enough checks pass."""
        # `must_pass` tolerates failures of `expect` only.
        if any(check.kind != "expect" for check in self.failures):
            return False
        expected = [check for check in self.checks if check.kind == "expect"]
        num_passed = sum(check.passed for check in expected)
        # In whole checks: 0.9 of 10 is 9, also where a product of floats is not.
        num_must_pass = math.ceil(self.must_pass * len(expected) - 1e-9)
        return num_passed >= num_must_pass

    @property
    def passes_by_index(self) -> dict[int, bool]:
        """Return whether all checks of a question passed, by its index: 0 is question 1."""
        passes: dict[int, bool] = {}
        for check in self.checks:
            if check.question is not None:
                index = check.question - 1
                passes[index] = passes.get(index, True) and check.passed
        return passes

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """Return failures and notes as text for a terminal."""
        lines = [self._counts(), *self.notes]
        for check in self.failures:
            lines.append(f"{check.where}: {check.text}")
            lines.append(f"  expected ({check.kind}): {check.expected}")
            lines.append(f"  found: {check.found}")
        return "\n".join(printable(line) for line in lines)

    def _counts(self) -> str:
        """Return how many checks of each kind failed, and whether the gate passes."""
        counts: list[str] = []
        for kind, words in WORDS_OF_KINDS.items():
            checks = [check for check in self.checks if check.kind == kind]
            num_failed = sum(not check.passed for check in checks)
            if not checks:
                continue
            count = f"{num_failed} of {len(checks)}"
            # The first count has the noun and the verb, the others follow from it.
            count += f" {words}" if counts else f" checks {words} failed"
            if kind == "expect" and self.must_pass < 1:
                count += f" ({100 * self.must_pass:.4g}% must pass)"
            counts.append(count)
        verdict = "passed" if self.passed else "failed"
        return f"{', '.join(counts) or 'no checks'}: {verdict}"

    def write(self, folder: Path, suite: str) -> None:
        """Write gate.xml (JUnit) and gate.json. `suite`: the name of the questions file."""
        write_junit(folder / "gate.xml", self._as_suite(suite))
        report = {
            "schema": "olmo-sparsity/gate",
            "version": VERSION,
            "passed": self.passed,
            "must_pass": self.must_pass,
            "notes": [*self.notes],
            "checks": [asdict(check) for check in self.checks],
        }
        write_atomically(folder / "gate.json", json.dumps(report, indent=1))

    def _as_suite(self, name: str) -> TestSuite:
        """Return the checks as test cases. If the gate passes, readers of JUnit must not show it as
        failed, so failures that it tolerates are skipped."""
        cases = [
            TestCase(
                name=f"{check.where} ({check.kind})",
                question=check.asked,
                # Checks of one question have its time in common (`TestSuite`).
                group=check.question,
                seconds=check.seconds,
                text=check.text,
                problem=(
                    "" if check.passed else f"expected {check.expected}; found: {check.found}"
                ),
            )
            for check in self.checks
        ]
        return TestSuite(name, cases, self.notes, is_passed=self.passed)
