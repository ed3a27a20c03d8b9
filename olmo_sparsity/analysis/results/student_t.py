"""Compute intervals by Student's t, for numbers from few documents.

    t_interval(values_M)      the mean of one value for each document, and its 95% interval
    width_ratio(7)            1.35: the factor by which a bootstrap interval of 7 is stretched
    quantile(0.025, 6)        2.447: how many standard errors an interval of 7 documents reaches

SciPy has all this, and is too large for it (docs/development.md). Never imports torch.

Dimension key: M documents.
"""

from __future__ import annotations

from functools import cache
from math import pi, sqrt

import numpy as np

from olmo_sparsity.analysis.results.intervals import Interval

FEW_FOR_BOOTSTRAP = 25
"""With fewer documents percentile intervals cover 80 to 92%, not 95% (docs/results.md)."""

NORMAL = 1.959964
"""The quantile below which 97.5% of a standard normal distribution lie."""


def t_interval(values_M: np.ndarray) -> Interval:
    """Return the mean of one value for each document, and the ends of its 95% interval by
    Student's t. The ends are NaN for fewer than two documents."""
    num_documents = len(values_M)
    mean = float(values_M.mean())
    if num_documents < 2:
        return Interval(mean, float("nan"), float("nan"))
    standard_error = float(values_M.std(ddof=1)) / sqrt(num_documents)
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
