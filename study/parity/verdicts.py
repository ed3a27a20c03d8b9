"""Apply rules over seeds, and join cases to a verdict, as the registrations of sparse parity say.

values of a case, one a model ─ `decide` by a `Rule` ─→ `Outcome` of the case
outcomes of all cases ─ `verdict_over` ─→ verdict of the claim, in its `Finding`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from study.tables_of_rows import markdown
from study.theory.results import half_width

CONFIRMED = "confirmed"
REFUTED = "refuted"
UNDECIDED = "undecided"
VOID = "void"
UNFINISHED = "unfinished"

FEWEST_FOR_INTERVAL = 3
"""Number of models from which an interval is computed; one of two values would be too wide."""


@dataclass(frozen=True)
class Outcome:
    """The result of one case: one K_train, one depth, or all models of a claim."""

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


class Interval(NamedTuple):
    """A mean over models, and both ends of Student's 95% interval."""

    mean: float
    low: float
    high: float


def interval_of(values: Sequence[float]) -> Interval:
    """Return the mean of these values and its interval."""
    array = np.array(values)
    mean = float(array.mean())
    half = half_width(array)
    return Interval(mean, mean - half, mean + half)


# --- rules on a mean and its interval -------------------------------------------------------------


class Rule(Protocol):
    """Decides by a mean and its interval. What is neither confirmed nor refuted is undecided."""

    def confirms(self, interval: Interval) -> bool: ...
    def refutes(self, interval: Interval) -> bool: ...


@dataclass(frozen=True)
class AtLeast:
    """The mean is at least `bound`, and the interval lies above `floor`."""

    bound: float
    floor: float = 0.0

    def confirms(self, interval: Interval) -> bool:
        return interval.mean >= self.bound and interval.low > self.floor

    def refutes(self, interval: Interval) -> bool:
        return interval.high < self.bound


@dataclass(frozen=True)
class Below:
    """The interval lies below `bound`."""

    bound: float

    def confirms(self, interval: Interval) -> bool:
        return interval.high < self.bound

    def refutes(self, interval: Interval) -> bool:
        return interval.low > self.bound


@dataclass(frozen=True)
class Falls:
    """The mean is at most −`smallest_fall`, and the interval lies below 0. Refuted if the interval
    lies between −`smallest_fall` and `smallest_fall`: there is no change of that size."""

    smallest_fall: float

    def confirms(self, interval: Interval) -> bool:
        return interval.mean <= -self.smallest_fall and interval.high < 0

    def refutes(self, interval: Interval) -> bool:
        return -self.smallest_fall <= interval.low and interval.high <= self.smallest_fall


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
    elif rule.confirms(interval_of(values)):
        verdict = CONFIRMED
    elif rule.refutes(interval_of(values)):
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
    """Write a table with a line for each case that has a model, and one line for a claim that has
    none."""
    lines = [["claim", "verdict", "case", "outcome", "models", "mean"]]
    for claim, finding in findings.items():
        begun = {case: outcome for case, outcome in finding.outcomes.items() if outcome.values}
        if not begun:
            lines.append([claim, finding.verdict, "–", "no model yet", "0", "–"])
        for case, outcome in begun.items():
            num_models = str(len(outcome.values))
            mean = format_interval(outcome.values)
            lines.append([claim, finding.verdict, case, outcome.verdict, num_models, mean])
    return markdown(lines)
