"""Write a report of checks as JUnit XML, which continuous integration shows as tests.

Place in the flow: gate/report.py → a `TestSuite` → **`write_junit`** → gate.xml:

    <testsuites tests="2" failures="1" …>
      <testsuite name="questions.jsonl" …>
        <testcase name="question 1, statement 1 (expect): When did it open?" …/>
        <testcase …><failure message="expected faq.md; found: rests on no source (…)">…</failure>
        <system-out>notes</system-out>
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from xml.etree import ElementTree

from olmo_sparsity.base.errors import printable
from olmo_sparsity.base.files import write_atomically


@dataclass(frozen=True)
class TestCase:
    """A check, as a test case."""

    __test__ = False  # pytest would collect the class by its name

    name: str
    question: str
    """The question, which follows the name; empty if there is none."""

    group: int | None
    """Cases of one group have their seconds in common."""

    seconds: float
    """How long all cases of the group took together."""

    text: str
    """What was checked: the text of a statement."""

    problem: str
    """What is wrong; empty if the case has passed."""


@dataclass(frozen=True)
class TestSuite:
    """All cases of a file of questions."""

    __test__ = False

    name: str
    cases: Sequence[TestCase]
    notes: Sequence[str]
    is_passed: bool
    """Whether the suite passes as a whole: cases with a problem are then skipped, not failed."""


def write_junit(path: Path, suite: TestSuite) -> None:
    """Write a suite as JUnit XML."""
    num_problems = sum(case.problem != "" for case in suite.cases)
    num_failed = 0 if suite.is_passed else num_problems
    seconds_of_groups = {case.group: case.seconds for case in suite.cases}
    totals = {
        "tests": str(len(suite.cases)),
        "failures": str(num_failed),
        "skipped": str(num_problems - num_failed),
        "time": f"{sum(seconds_of_groups.values()):.3f}",
    }
    root = ElementTree.Element("testsuites", totals)
    element = ElementTree.SubElement(root, "testsuite", {"name": printable(suite.name)} | totals)

    group_sizes = Counter(case.group for case in suite.cases)
    for case in suite.cases:
        # Cases of one group share its seconds, so that the sum is that of the suite.
        _add_case(element, suite, case, case.seconds / group_sizes[case.group])
    notes = "\n".join(printable(note) for note in suite.notes)
    ElementTree.SubElement(element, "system-out").text = notes
    write_atomically(path, ElementTree.tostring(root, encoding="unicode", xml_declaration=True))


def _add_case(
    parent: ElementTree.Element, suite: TestSuite, case: TestCase, seconds: float
) -> None:
    """Append a test case, with its problem if it has one."""
    question = f": {shorten(case.question, 80)}" if case.question else ""
    attributes = {
        "classname": printable(suite.name),
        "name": printable(f"{case.name}{question}"),
        "time": f"{seconds:.3f}",
    }
    element = ElementTree.SubElement(parent, "testcase", attributes)
    if case.problem:
        message = printable(case.problem)
        kind = "skipped" if suite.is_passed else "failure"
        problem = ElementTree.SubElement(element, kind, {"message": message})
        problem.text = f"{printable(case.text)}\n{message}"
