"""Say which corpus of a mixture gives the n-th training sequence, and which of its own that is.

A function of the shares alone, so that the step number stays the data cursor. The sequences of each
corpus are spread evenly: any stretch of training has each share to within a sequence or two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PERIOD = 10**5
"""Sequences after which the pattern repeats. Shares are rounded to 1 in so many."""


class Interleaving:
    def __init__(self, shares: Sequence[float], period: int = PERIOD) -> None:
        """`shares` add up to 1."""
        exact = np.array(shares) * period
        quotas = np.floor(exact).astype(np.int64)
        largest = np.argsort(quotas - exact, kind="stable")  # the largest remainders first
        quotas[largest[: period - quotas.sum()]] += 1
        # The j-th sequence of a corpus has its place in the middle of the j-th of equal stretches.
        places = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
        order = np.argsort(places, kind="stable")
        self.corpora = np.repeat(np.arange(len(quotas)), quotas)[order]
        self.numbers = np.concatenate([np.arange(quota) for quota in quotas])[order]
        self.quotas, self.period = quotas, period

    def of(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Of `count` sequences from `first` on: the corpus of each, and its number in that."""
        periods, places = np.divmod(np.arange(first, first + count), self.period)
        corpora = self.corpora[places]
        return corpora, self.numbers[places] + periods * self.quotas[corpora]
