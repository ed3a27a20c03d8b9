"""The claims of study/claims.yaml: recompute their verdicts, write study/claims.md.

`python -m study.claims` writes the page. A verdict is "yes" exactly if all conditions of its rows
hold: `ROW: column >= number, …` (study/rows.py names rows and columns), or the difference of two,
`ROW: column minus ROW: column >= number`. A condition on several numbers holds for each of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from operator import ge, gt, le, lt
from statistics import NormalDist

import yaml

from olmo_sparsity.base.files import write_atomically
from study.pages.stored import ROOT
from study.rows import stored_numbers

CLAIMS = ROOT / "study/claims.yaml"
RECORDS = ROOT / "study/records"
PAGE = ROOT / "study/claims.md"
OPERATORS = {">=": ge, ">": gt, "<=": le, "<": lt}
VERDICTS = ("yes", "no", "partly", "open", "void")
COMPARISON = re.compile(r"([^<>=]+|[^<>]+?) (>=|<=|>|<) (-?[\d.]+)(?:, |$)")


@dataclass(frozen=True)
class Claim:
    name: str
    group: str
    claim: str
    threshold: str
    date: str
    commit: str
    verdict: str
    note: str = ""
    rows: list[str] = field(default_factory=list)
    """Without any, the verdict is stated, not recomputed."""


@dataclass(frozen=True)
class Registered:
    claim: str
    threshold: str
    date: str
    entry: str
    """The heading above it."""


@dataclass(frozen=True)
class Condition:
    column: str
    value: float
    operator: str
    bound: float

    @property
    def holds(self) -> bool:
        return bool(OPERATORS[self.operator](self.value, self.bound))


def read_claims() -> dict[str, Claim]:
    stored = yaml.load(CLAIMS.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return {name: Claim(name=name, **fields) for name, fields in stored["claims"].items()}


@cache
def registered() -> dict[str, Registered]:
    """Return each claim as the records have it."""
    found, date, entry = {}, "", ""
    for record in ("first_claims", "thresholds"):
        for line in (RECORDS / f"{record}.md").read_text(encoding="utf-8").splitlines():
            if heading := re.fullmatch(r"## (\S+) · (.*)", line):
                date, entry = heading.groups()
            elif row := re.fullmatch(
                r"\| ([A-Z]\d+[a-z]?) \| (.*?) \| (.*?) \|(?: (\S+) \| \w+ \|)?", line
            ):
                name, claim, threshold, first = row.groups()
                found[name] = Registered(claim, threshold, first or date, entry or "First claims")
    return found


def conditions(claim: Claim, widened: float = 1.0) -> Iterator[Condition]:
    """Yield each comparison of each number that the rows of a claim name. `widened`: so many times
    as wide are the intervals of stored summaries."""
    for row in claim.rows:
        *before, last = row.split(" minus ")
        name, _, comparisons = last.rpartition(": ")
        for column, operator, bound in COMPARISON.findall(comparisons):
            values = list(stored_numbers(f"{name}: {column}"))
            if widened != 1 and re.fullmatch(r"\w+_(low|high)", column) and not before:
                centers = stored_numbers(f"{name}: {column.rpartition('_')[0]}")
                values = [c + widened * (v - c) for v, c in zip(values, centers, strict=True)]
            for first in before:
                others = list(stored_numbers(first))
                values = values * len(others) if len(values) == 1 else values
                values = [a - b for a, b in zip(others, values, strict=True)]
            column = f"difference in {column}" if before else column
            yield from (Condition(column, value, operator, float(bound)) for value in values)


def holds(claim: Claim, widened: float = 1.0) -> bool:
    """Return whether all conditions of a claim hold."""
    return all(condition.holds for condition in conditions(claim, widened))


# --- the page -------------------------------------------------------------------------------------


def decided_by(claim: Claim) -> str:
    """Return the first condition, or the first that fails, with the numbers that decide it; with a
    net excess, that at equal gaps."""
    found = list(conditions(claim))
    first = next((condition for condition in found if not condition.holds), found[0])
    same = [c for c in found if (c.column, c.operator) == (first.column, first.operator)]
    column = re.sub(r"(max|min)\((.*)\)", r"\2", first.column)
    column = re.sub(r"_low|\[2\]", " low", re.sub(r"_high|\[3\]", " high", column))
    sign = first.operator.replace(">=", "≥").replace("<=", "≤")
    shown = f"{column.replace('_', ' ')} {lowest_to_highest(same)}, {sign} {first.bound:g}"
    net = [row for row in claim.rows if ": net " in row and not re.search(r" minus |\.md#", row)]
    equal = [replace(claim, rows=[re.sub(": .*", ": net_equal > 0", row)]) for row in net]
    if first.column == "net" and (nets := [c for one in equal for c in conditions(one)]):
        shown += f"; equal {lowest_to_highest(nets)}"
    return shown


def lowest_to_highest(found: list[Condition]) -> str:
    values = [condition.value for condition in found]
    ends = [f"{value:.2f}".replace("-", "−") for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def listed(claims: list[Claim], named: set[str]) -> str:
    """List the claims of one question, below the headings of the records that registered them.
    `named`: headings that stand above already, of which the beginning is enough."""
    entries = list(dict.fromkeys(registered()[claim.name].entry for claim in claims))
    lines, entry = [], ""
    for claim in sorted(claims, key=lambda claim: entries.index(registered()[claim.name].entry)):
        if (found := registered()[claim.name].entry) != entry:
            entry = found
            words = entry.split()
            shown = " ".join(words[:5]) + " …" if entry in named and len(words) > 6 else entry
            lines.append(f"\n{shown}:\n")
            named.add(entry)
        verdict = f"{claim.verdict}, {claim.note}" if claim.note else claim.verdict
        numbers = f"; {decided_by(claim)}" if claim.rows else ""
        lines.append(f"- {claim.name}: {claim.claim} **({verdict}{numbers})**")
    return "\n".join(lines).strip()


def family(claims: dict[str, Claim]) -> dict[str, object]:
    """Count the verdicts, and those that hold with intervals for all at once."""
    num = len(claims)
    counts = Counter(claim.verdict for claim in claims.values())
    passed = [c for c in claims.values() if c.verdict == "yes" and any("_low" in r for r in c.rows)]
    normal = NormalDist()
    widened = normal.inv_cdf(1 - 0.025 / num) / normal.inv_cdf(0.975)
    return {
        "num": num,
        "verdicts": ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS),
        "recomputed": sum(bool(claim.rows) for claim in claims.values()),
        "expected": f"{0.025 * num:.0f}",
        "widened": f"{widened:.2f}",
        "passed": len(passed),
        "remain": sum(holds(claim, widened) for claim in passed),
    }


def write() -> str:
    stored = yaml.load(CLAIMS.read_text(encoding="utf-8"), yaml.CSafeLoader)
    claims = read_claims()
    parts = [stored["about"].strip().format(**family(claims))]
    named: set[str] = set()
    for group, question in stored["groups"].items():
        chosen = [claim for claim in claims.values() if claim.group == group]
        parts += [f"## {question}", listed(chosen, named)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    write_atomically(PAGE, write())
