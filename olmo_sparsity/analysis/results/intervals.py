"""Compute intervals by a bootstrap over documents.

A bootstrap draws as many documents as there are, with replacement, `NUM_RESAMPLES` times. A number
is computed from all documents and again from each resample; `Bootstrapped` holds both, so that a
computation is written once:

    gain, num_tokens = resample(sums_MQ)     # a `Bootstrapped` for each column
    (gain / num_tokens).interval()           # the mean gain of a token, and its 95% interval

Intervals over few documents are in student_t.py. Never imports torch.

Three documents with sums of gain and of tokens, and one of the resamples, which drew the second
document twice and the third never:

    sums_MQ                 gain  tokens     weights_RM   1 2 0
                  first      2.0      10
                  second     9.0      20     sums of all documents        16.0  60 → mean 0.27
                  third      5.0      30     sums of this resample        20.0  50 → mean 0.40

Dimension key: M documents, Q values of an item (columns to sum), R resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

NUM_RESAMPLES = 2000
"""Resamples of a bootstrap."""

BOOTSTRAP = "95%, by a bootstrap over documents"
"""How outputs describe an interval of `percentile_interval`."""


@lru_cache(maxsize=4)
def resample_weights(num_documents: int, seed: int = 0) -> np.ndarray:
    """Return weights_RM: how often each document is drawn in each resample."""
    generator = np.random.default_rng(seed)
    chance = np.full(num_documents, 1 / num_documents)
    return generator.multinomial(num_documents, chance, size=NUM_RESAMPLES).astype(float)


class Interval(NamedTuple):
    """A value and the ends of its 95% interval; NaN where there is none."""

    value: float
    low: float
    high: float

    def stretched(self, factor: float) -> Interval:
        """Return an interval whose ends are `factor` times as far from the value."""
        return Interval(
            self.value,
            self.value + factor * (self.low - self.value),
            self.value + factor * (self.high - self.value),
        )

    def without_ends(self) -> Interval:
        """Return the value without an interval."""
        return self._replace(low=float("nan"), high=float("nan"))


NO_INTERVAL = Interval(float("nan"), float("nan"), float("nan"))


def percentile_interval(resampled_R: np.ndarray, value: float) -> Interval:
    """Return the value and the ends of its 95% percentile interval over resamples. Return NaN for
    all three if there is no value, or if more than 2% of the resamples have none."""
    # A resample may draw only documents without a gap. If many do, the others are a biased sample.
    if not np.isfinite(value) or np.isfinite(resampled_R).mean() < 0.98:
        return NO_INTERVAL
    low, high = np.nanpercentile(resampled_R, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


@dataclass(frozen=True)
class Bootstrapped:
    """A number that was computed from all documents, and again from each bootstrap resample.

    The sum of two of them is computed from both values, and again in each resample, and so are
    differences and ratios. So both numbers come from the same documents each time, and the interval
    of a difference is paired over documents."""

    value: Any
    """The number computed from all documents."""

    replicates_R: np.ndarray
    """The number computed from each resample."""

    def __add__(self, other: Bootstrapped | float) -> Bootstrapped:
        return elementwise(np.add, self, other)

    def __sub__(self, other: Bootstrapped | float) -> Bootstrapped:
        return elementwise(np.subtract, self, other)

    def __truediv__(self, other: Bootstrapped | float) -> Bootstrapped:
        # A resample may have no gap, or no target: its ratio is then NaN, or infinite.
        with np.errstate(divide="ignore", invalid="ignore"):
            return elementwise(np.divide, self, other)

    def interval(self) -> Interval:
        """Return the value and the ends of its 95% percentile interval."""
        return percentile_interval(self.replicates_R, self.value)


def elementwise(
    function: Callable[..., np.ndarray], *arguments: Bootstrapped | float
) -> Bootstrapped:
    """Apply a function of arrays to the values, and again to the numbers of the resamples. A
    constant is the same in all resamples."""
    values: list[Any] = []
    replicates: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Bootstrapped):
            values.append(argument.value)
            replicates.append(argument.replicates_R)
        else:
            values.append(argument)
            replicates.append(argument)
    return Bootstrapped(function(*values), function(*replicates))


def resample(counts: pd.DataFrame | np.ndarray) -> list[Bootstrapped]:
    """Return the sum of each column over documents. `counts` has a row for each document."""
    # The memory layout decides in which order BLAS adds, and so the last digits of a sum.
    counts_MQ = np.ascontiguousarray(counts, float)
    sum_Q = counts_MQ.sum(0)
    sums_RQ = resample_weights(len(counts_MQ)) @ counts_MQ
    return [Bootstrapped(total, sums_R) for total, sums_R in zip(sum_Q, sums_RQ.T, strict=True)]
