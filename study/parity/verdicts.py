"""Rules over seeds, and verdicts over several cases, as the registrations of sparse parity have
them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from study.tables_of_rows import markdown
from study.theory.results import half_width

CONFIRMED = "confirmed"
REFUTED = "refuted"
UNDECIDED = "undecided"
VOID = "void"
UNFINISHED = "unfinished"

FEWEST_FOR_INTERVAL = 3


@dataclass(frozen=True)
class Outcome:
    """What is found in one case: one K_train, one depth, or all models of a claim."""

    verdict: str
    """CONFIRMED, REFUTED, UNDECIDED, VOID or UNFINISHED; of a kind of reach, its name."""

    values: tuple[float, ...] = ()
    """One for each model that counts."""


@dataclass(frozen=True)
class Finding:
    """A claim's verdict, and what it follows from."""

    verdict: str
    """yes, no, open or unfinished."""

    outcomes: dict[str, Outcome]
    """By the name of the case."""


def interval_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and both ends of Student's 95% interval."""
    array = np.array(values)
    mean = float(array.mean())
    half = half_width(array)
    return mean, mean - half, mean + half


# --- rules on a mean and its interval -------------------------------------------------------------


class Rule(Protocol):
    """Decides by a mean and both ends of its interval."""

    def confirms(self, mean: float, low: float, high: float) -> bool: ...
    def refutes(self, mean: float, low: float, high: float) -> bool: ...


@dataclass(frozen=True)
class AtLeast:
    """The mean is at least `bound`, and the interval lies above `floor`."""

    bound: float
    floor: float = 0.0

    def confirms(self, mean: float, low: float, high: float) -> bool:
        return mean >= self.bound and low > self.floor

    def refutes(self, mean: float, low: float, high: float) -> bool:
        return high < self.bound


@dataclass(frozen=True)
class Below:
    """The interval lies below `bound`."""

    bound: float

    def confirms(self, mean: float, low: float, high: float) -> bool:
        return high < self.bound

    def refutes(self, mean: float, low: float, high: float) -> bool:
        return low > self.bound


@dataclass(frozen=True)
class Falls:
    """The mean is at most −`least`, and the interval lies below 0."""

    least: float

    def confirms(self, mean: float, low: float, high: float) -> bool:
        return mean <= -self.least and high < 0

    def refutes(self, mean: float, low: float, high: float) -> bool:
        return -self.least <= low and high <= self.least


def decide(
    rule: Rule, values: Sequence[float], *, finished: bool, fewest: int = FEWEST_FOR_INTERVAL
) -> Outcome:
    """Apply a rule to the values of the models that count. `fewest`: with fewer, the case is
    void."""
    verdict = UNDECIDED
    if not finished:
        verdict = UNFINISHED
    elif len(values) < fewest:
        verdict = VOID
    elif rule.confirms(*interval_of(values)):
        verdict = CONFIRMED
    elif rule.refutes(*interval_of(values)):
        verdict = REFUTED
    return Outcome(verdict, tuple(values))


def decide_by_each_seed(
    bound: float, values: Sequence[float], *, finished: bool, num_seeds: int
) -> Outcome:
    """Confirm if every seed has at least `bound`, refute if none has. With a seed that does not
    count, the case is void."""
    num_passed = sum(value >= bound for value in values)
    verdict = UNDECIDED
    if not finished:
        verdict = UNFINISHED
    elif len(values) < num_seeds:
        verdict = VOID
    elif num_passed == num_seeds:
        verdict = CONFIRMED
    elif num_passed == 0:
        verdict = REFUTED
    return Outcome(verdict, tuple(values))


def verdict_over(outcomes: Iterable[Outcome], needed: int) -> str:
    """Return "yes" if at least `needed` cases are confirmed, "no" if as many are refuted."""
    verdicts = [outcome.verdict for outcome in outcomes]
    if UNFINISHED in verdicts:
        return UNFINISHED
    if verdicts.count(CONFIRMED) >= needed:
        return "yes"
    if verdicts.count(REFUTED) >= needed:
        return "no"
    return "open"


# --- tables ---------------------------------------------------------------------------------------


def format_interval(values: Sequence[float]) -> str:
    """Format a mean and its interval; with fewer than three values no interval."""
    if not values:
        return "–"
    if len(values) < FEWEST_FOR_INTERVAL:
        text = f"{np.mean(values):.3f}"
    else:
        text = "{:.3f} [{:.2f}, {:.2f}]".format(*interval_of(values))
    return text.replace("-", "−")


def format_share(values: Sequence[float]) -> str:
    """Format a mean of shares and its interval, which is cut at 0 and 1."""
    if len(values) < FEWEST_FOR_INTERVAL:
        return f"{np.mean(values):.2f}"
    mean, low, high = interval_of(values)
    return f"{mean:.2f} [{max(low, 0):.2f}, {min(high, 1):.2f}]"


def format_findings(findings: dict[str, Finding]) -> str:
    """Write a line for each case that has a model; one line for a claim that has none."""
    lines = [["claim", "verdict", "case", "outcome", "models", "mean"]]
    for claim, finding in findings.items():
        begun = {case: outcome for case, outcome in finding.outcomes.items() if outcome.values}
        if not begun:
            lines.append([claim, finding.verdict, "–", "no model yet", "0", "–"])
        for case, outcome in begun.items():
            counted = str(len(outcome.values))
            mean = format_interval(outcome.values)
            lines.append([claim, finding.verdict, case, outcome.verdict, counted, mean])
    return markdown(lines)
