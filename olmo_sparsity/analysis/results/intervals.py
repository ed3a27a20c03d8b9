"""Compute intervals over documents: by a bootstrap, and by Student's t.

A bootstrap draws as many documents as there are, with replacement, `NUM_RESAMPLES` times. A number
is computed from all documents and again from each resample; `Bootstrapped` holds both, so that a
computation is written once:

    gain, num_tokens = resample(sums_DV)     # a `Bootstrapped` for each column
    (gain / num_tokens).interval()           # the mean gain of a token, and its 95% interval

SciPy has all this, and is too large for it (docs/development.md). Never imports torch.

Three documents with sums of gain and of tokens, and one of the resamples, which drew the second
document twice and the third never:

    sums_DV                 gain  tokens     weights_RD   1 2 0
                  first      2.0      10
                  second     9.0      20     sums of all documents        16.0  60 → mean 0.27
                  third      5.0      30     sums of this resample        20.0  50 → mean 0.40

Dimension key: D documents, V values, R bootstrap resamples; N pairs of rows of A values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from math import pi, sqrt
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

NUM_RESAMPLES = 2000
"""Resamples of a bootstrap."""

FEW_FOR_BOOTSTRAP = 25
"""With fewer documents percentile intervals cover 80 to 92%, not 95% (docs/results.md)."""

BOOTSTRAP = "95%, by a bootstrap over documents"
"""How outputs describe an interval of `percentile_interval`."""

NORMAL = 1.959964
"""The quantile below which 97.5% of a standard normal distribution lie."""


@lru_cache(maxsize=4)
def resample_weights(num_documents: int, seed: int = 0) -> np.ndarray:
    """Return weights_RD: how often each document is drawn in each resample."""
    generator = np.random.default_rng(seed)
    chance = np.full(num_documents, 1 / num_documents)
    return generator.multinomial(num_documents, chance, size=NUM_RESAMPLES).astype(float)


class Interval(NamedTuple):
    """A value and the ends of its 95% interval; NaN where there is none."""

    value: float
    low: float
    high: float


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

    Sums, differences and ratios are those of the estimates and, resample by resample, those of the
    replicates. Numbers of the same resample belong together, so intervals of differences are
    paired over documents."""

    estimate: Any
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
        """Return the estimate and the ends of its 95% percentile interval."""
        return percentile_interval(self.replicates_R, self.estimate)


def elementwise(
    function: Callable[..., np.ndarray], *arguments: Bootstrapped | float
) -> Bootstrapped:
    """Apply a function of arrays to the estimates, and to the replicates of each resample."""
    estimates: list[Any] = []
    replicates: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Bootstrapped):
            estimates.append(argument.estimate)
            replicates.append(argument.replicates_R)
        else:  # a constant
            estimates.append(argument)
            replicates.append(argument)
    return Bootstrapped(function(*estimates), function(*replicates))


def resample(counts: pd.DataFrame | np.ndarray) -> list[Bootstrapped]:
    """Return the sum of each column over documents. `counts`: a row for each document."""
    # The memory layout decides in which order BLAS adds, and so the last digits of a sum.
    counts_DV = np.ascontiguousarray(counts, float)
    sum_V = counts_DV.sum(0)
    sums_RV = resample_weights(len(counts_DV)) @ counts_DV
    return [Bootstrapped(total, sums_R) for total, sums_R in zip(sum_V, sums_RV.T, strict=True)]


def t_interval(values_D: np.ndarray) -> Interval:
    """Return the mean of one value for each document, and the ends of its 95% interval by
    Student's t. The ends are NaN for fewer than two documents."""
    num_documents = len(values_D)
    mean = float(values_D.mean())
    if num_documents < 2:
        return Interval(mean, float("nan"), float("nan"))
    standard_error = float(values_D.std(ddof=1)) / sqrt(num_documents)
    reach = quantile(0.025, num_documents - 1) * standard_error
    return Interval(mean, mean - reach, mean + reach)


def width_ratio(num_documents: float) -> float:
    """Return the factor by which a bootstrap interval over so few documents is too narrow: its
    quantile should be Student's, and a resample divides the variance by n instead of n − 1. Return
    1 for enough documents, and NaN for fewer than three."""
    if num_documents >= FEW_FOR_BOOTSTRAP:
        return 1.0
    # This comparison is false for NaN, too.
    has_three = num_documents > 2
    if not has_three:
        return float("nan")
    freedom = int(num_documents) - 1
    return quantile(0.025, freedom) / NORMAL * sqrt(num_documents / freedom)


def tail(t: np.ndarray, freedom: int) -> np.ndarray:
    """Return P(T > t) of Student's t with `freedom` degrees of freedom, by its finite sums
    (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = np.arctan(t / sqrt(freedom))
    cosine = np.cos(angle)
    # Sum of the series in cos², whose first term depends on the parity of the degrees of freedom.
    is_odd = freedom % 2
    term = cosine if is_odd else np.ones_like(cosine)
    total = term if freedom > 1 else 0 * term
    for k in range(2 + is_odd, freedom, 2):
        term = term * cosine**2 * (k - 1) / k
        total = total + term
    inside = np.sin(angle) * total
    return 0.5 - ((angle + inside) / pi if is_odd else inside / 2)


@cache
def quantile(p: float, freedom: int) -> float:
    """Return t with P(T > t) = p, for p < 0.5."""
    # The tail falls from 0.5 at t = 0, so the quantile lies above `low` and, after some doublings,
    # not above `high`.
    low = 0.0
    high = 1.0
    while tail(np.array(high), freedom) > p:
        high *= 2
    # 50 halvings of this range reach the last digit.
    for _ in range(50):
        middle = (low + high) / 2
        if tail(np.array(middle), freedom) > p:
            low = middle
        else:
            high = middle
    return high


def rank_correlations(
    x_NA: np.ndarray, y_NA: np.ndarray, of_equal_values: float = np.nan
) -> np.ndarray:
    """Return Spearman's correlation of each row of x with the same row of y. `of_equal_values`: the
    correlation of rows in which all values are equal."""

    def centred_ranks(rows_NA: np.ndarray) -> np.ndarray:
        ranks_NA = pd.DataFrame(rows_NA).rank(axis=1).to_numpy()
        return ranks_NA - ranks_NA.mean(1, keepdims=True)

    x_NA = centred_ranks(x_NA)
    y_NA = centred_ranks(y_NA)
    scale_N = np.sqrt((x_NA**2).sum(1) * (y_NA**2).sum(1))
    products_N = (x_NA * y_NA).sum(1)
    with np.errstate(invalid="ignore"):
        return np.where(scale_N == 0, of_equal_values, products_N / scale_N)
