"""Turn losses with sources and decoys into verdicts, and hold their error rate. Without torch.

A source counts where it does more than a decoy in its place: by t-tests of what is lost without it,
and of what it gives. What was not evaluated is NaN, a test with p = 1: which sources are looked at
more closely may depend on anything without raising the error rate.

Dimension key: T statements, S sources, D decoys of a source.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import sqrt

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.analysis.results.statistics import quantile, tail

# A source suffices if it alone gives the first share of the nats that all sources give, and is
# needed if the second is lost without it, and the others replace no more than the third of it.
SUFFICES, NEEDED, REPLACED = 0.5, 0.2, 0.5

# Sources are looked at more closely if they give, or cost, this share of the nats after one decoy.
SCREENED = 0.1

# How the loss of a statement varies with the text in one place, known beforehand: the root of the
# sum of squares of the first, and of the second times the loss with decoys.
PRIOR_NATS, PRIOR_SHARE = 0.3, 0.02

# How many decoys the prior is worth, and the other sources' losses. Of these the median is taken,
# as one of them may matter. With fewer than LEAST_OTHERS, a source must also pass a test whose
# variance is that of the decoys alone, without a cap, as the prior may be far too small.
PRIOR_WEIGHT, OTHERS_WEIGHT, LEAST_OTHERS = 3, 4, 4
MEDIAN_OF_CHI2 = 0.455  # of the square of a normal number with variance 1
TINY = 1e-12  # variance of decoys that are all alike, in nats²

# Degrees of freedom of a test at most, as nats have heavy tails; with two decoys in all; and of the
# test by the variance of decoys alone.
FREEDOM, FREEDOM_OF_TWO, FREEDOM_OF_DECOYS = 4, 3, 6

# Share of the error rate that each look before the last one may spend.
EARLY = 0.1

Verdict = tuple[str, list[int]]
"""Kind (one, either, both, none) and sources."""


def looks(draws: int) -> list[int]:
    """Return after how many decoys `weigh` looks whether more are needed: 2, 4, 8, …, all."""
    found = [2]
    while found[-1] < draws:
        found.append(min(2 * found[-1], draws))
    return found


@dataclass(frozen=True)
class Losses:
    """Losses of each statement with these texts in view, in nats."""

    all_T: np.ndarray  # all sources
    decoys_TD: np.ndarray  # decoys in place of all; NaN at the end of D where they were not needed
    among_TSD: np.ndarray  # in place of all others
    without_TSD: np.ndarray  # in place of the source alone

    @cached_property
    def most_T(self) -> np.ndarray:
        """The usual loss with decoys. Losses are capped here: what raises a loss above it misleads,
        and does not show what sources give."""
        return np.nanmedian(self.decoys_TD, -1)

    @property
    def gap_T(self) -> np.ndarray:
        """Nats that all sources give, against decoys in place of all."""
        return np.nanmean(np.minimum(self.decoys_TD, self.most_T[:, None]), -1) - self.all_T

    @property
    def gives_TSD(self) -> np.ndarray:
        """Nats that a source gives among these decoys."""
        most_T11 = self.most_T[:, None, None]
        return np.minimum(self.decoys_TD[:, None], most_T11) - np.minimum(self.among_TSD, most_T11)

    @property
    def lost_TSD(self) -> np.ndarray:
        """Nats that are lost when its decoy takes its place among the other sources."""
        return np.minimum(self.without_TSD, self.most_T[:, None, None]) - self.all_T[:, None, None]

    def first(self, num: int) -> Losses:
        """Return the losses with the first decoys only."""
        of_decoys = [field.name for field in fields(self) if field.name.endswith("D")]
        return replace(self, **{name: getattr(self, name)[..., :num] for name in of_decoys})


def mean_of_tried(nats_TSD: np.ndarray) -> np.ndarray:
    """NaN where no decoy was tried."""
    num_TS = np.isfinite(nats_TSD).sum(-1)
    return np.nansum(nats_TSD, -1) / np.where(num_TS > 0, num_TS, np.nan)


@dataclass(frozen=True)
class Evidence:
    """Results of the tests of each statement and source."""

    p_2TS: np.ndarray  # that one more decoy does as well: as what is given, and what is lost
    found_TS: np.ndarray  # discoveries at the error rate
    spread_TS: np.ndarray  # how the loss of the statement varies with the text in one place, nats
    above_TS: np.ndarray  # nats above the least with which the source is found if no other is


@dataclass(frozen=True)
class Look:
    """Tests of all sources after the same number of decoys."""

    nats_2TS: np.ndarray  # means over decoys; NaN for sources with fewer of them
    spread_TS: np.ndarray
    scales: list[tuple[np.ndarray, int]]
    """Standard errors of a mean less one more decoy, and degrees of freedom: a test by each."""

    @property
    def p_2TS(self) -> np.ndarray:
        """1 for sources with fewer decoys."""
        by_scale = [tail(self.nats_2TS / scale, freedom) for scale, freedom in self.scales]
        return np.where(np.isnan(self.nats_2TS), 1.0, np.max(by_scale, axis=0))

    def above(self, p: float) -> np.ndarray:
        """Nats above those with this p-value."""
        least = [scale * quantile(p, freedom) for scale, freedom in self.scales]
        return self.nats_2TS - np.max(least, axis=0)


def look_at(losses: Losses, freedom: int = FREEDOM) -> Look:
    """Tests by all decoys.

    The variance is the mean of three, by their weights: the prior's; that of the decoys of each
    source, on average over sources; and half the median of the squares of what is lost without each
    other source with its first decoy, as if most of these did not matter."""
    nats_2TSD = np.stack([losses.gives_TSD, losses.lost_TSD])
    (num_sources, num), has_all_2TS = nats_2TSD.shape[2:], np.isfinite(nats_2TSD).all(-1)
    prior_T1 = PRIOR_NATS**2 + (PRIOR_SHARE * losses.most_T[:, None]) ** 2
    total_TS, weight = np.repeat(PRIOR_WEIGHT * prior_T1, num_sources, 1), PRIOR_WEIGHT
    scales, noise = [], sqrt(1 + 1 / num)
    if num > 1 and has_all_2TS.any():
        of_decoys_2TS = np.where(has_all_2TS, nats_2TSD.var(-1, ddof=1), np.nan)
        variance_TS = np.zeros_like(total_TS) + np.nanmean(of_decoys_2TS, (0, 2))[:, None]
        total_TS = total_TS + (num - 1) * variance_TS
        weight += num - 1
        if num_sources <= LEAST_OTHERS:
            raw_2TSD = np.stack([losses.decoys_TD[:, None] - losses.among_TSD, losses.without_TSD])
            raw_2TS = np.where(has_all_2TS, raw_2TSD.var(-1, ddof=1), np.nan)
            variance_TS = np.zeros_like(total_TS) + np.nanmean(raw_2TS, (0, 2))[:, None]
            num_tried = int(has_all_2TS.any((0, 1)).sum())
            few_freedom = min(FREEDOM_OF_DECOYS, num_tried * (num - 1))
            scales.append((np.sqrt(variance_TS + TINY) * noise, few_freedom))
    if num_sources > LEAST_OTHERS:
        squares_TS = losses.lost_TSD[..., 0] ** 2
        others = [np.median(np.delete(squares_TS, s, 1), axis=1) for s in range(num_sources)]
        total_TS = total_TS + OTHERS_WEIGHT * np.stack(others, 1) / (2 * MEDIAN_OF_CHI2)
        weight += OTHERS_WEIGHT
    spread_TS = np.sqrt(total_TS / weight)
    means_2TS = np.where(has_all_2TS, nats_2TSD.mean(-1), np.nan)
    return Look(means_2TS, spread_TS, [(spread_TS * noise, freedom), *scales])


def are_discoveries(p: np.ndarray, rate: float) -> np.ndarray:
    """Select by Benjamini–Hochberg: at most this share of the selected is expected to be chance."""
    ordered = np.sort(p.ravel())
    kept = ordered[ordered <= rate * np.arange(1, p.size + 1) / p.size]
    return p <= (kept[-1] if len(kept) else -1.0)


def are_named(p_2TS: np.ndarray, rate: float) -> np.ndarray:
    """Return the sources that pass one of two tests, by what they give and what is lost without
    them, at this error rate."""
    return are_discoveries((2 * p_2TS.min(0)).clip(max=1.0), rate)


def weigh(losses: Losses, rate: float) -> Evidence:
    """Test each source after 2, 4, 8, … decoys, as far as they were evaluated. Each look but the
    last spends a small part of the error rate: its p-values count so many times more."""
    stages = looks(losses.decoys_TD.shape[-1])
    spends = [EARLY] * (len(stages) - 1) + [1 - EARLY * (len(stages) - 1)]
    freedom = FREEDOM if len(stages) > 1 else FREEDOM_OF_TWO
    made = [look_at(losses.first(num), freedom) for num in stages]
    p_2TS = np.min(
        [(look.p_2TS / spend).clip(max=1.0) for look, spend in zip(made, spends, strict=True)], 0
    )
    evaluated = [look for look in made if np.isfinite(look.nats_2TS).any()] or made[:1]
    limit = rate / (2 * p_2TS[0].size)
    above = [look.above(limit * spend) for look, spend in zip(made, spends, strict=True)]
    above_TS = np.nan_to_num(np.array(above), nan=-np.inf).max((0, 1))
    # Other statements count as no discovery: they would raise the share allowed to these.
    has_gap_T1 = losses.gap_T[:, None] >= MIN_GAP
    found_TS = are_named(np.where(has_gap_T1, p_2TS, 1.0), rate)
    return Evidence(p_2TS, found_TS, evaluated[-1].spread_TS, above_TS)


def sources_to_look_at(losses: Losses, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the sources for which more decoys may change a verdict: in all other places (gives),
    and in theirs (lost). What a source gives matters only if what is lost without one does not
    decide: where no source, or more than one, costs a good part of the nats."""
    evidence, gap_T1 = weigh(losses, rate), losses.gap_T[:, None]
    gives_TS, lost_TS = mean_of_tried(losses.gives_TSD), mean_of_tried(losses.lost_TSD)
    may_need_TS = lost_TS >= SCREENED * gap_T1
    is_decided_T = (may_need_TS.sum(1) == 1) & (lost_TS >= REPLACED * gap_T1).any(1)
    is_open_TS = (gap_T1 >= MIN_GAP) & ~evidence.found_TS
    beyond_TS = is_open_TS & may_need_TS & (lost_TS >= evidence.spread_TS)
    least_TS = np.maximum(SCREENED * gap_T1, evidence.spread_TS)
    is_unknown_TS = np.isnan(gives_TS) | (gives_TS >= least_TS)
    return (is_open_TS & ~is_decided_T[:, None] & is_unknown_TS).any(0), beyond_TS.any(0)


def judge(losses: Losses, rate: float) -> tuple[Evidence, list[Verdict]]:
    """Kind and sources of each statement's verdict, and the evidence that it goes by."""
    evidence, gap_T1 = weigh(losses, rate), losses.gap_T[:, None]
    gives_TS = np.nan_to_num(mean_of_tried(losses.gives_TSD), nan=-np.inf)
    lost_TS = mean_of_tried(losses.lost_TSD)
    enough_TS = evidence.found_TS & (gives_TS >= SUFFICES * gap_T1)
    needed_TS = evidence.found_TS & (lost_TS >= NEEDED * gap_T1)
    needed_TS &= lost_TS >= (1 - REPLACED) * gives_TS
    verdicts: list[Verdict] = []
    for enough_S, needed_S in zip(enough_TS, needed_TS, strict=True):
        are_needed = not (enough_S & ~needed_S).any()
        chosen = np.flatnonzero(needed_S if are_needed else enough_S).tolist()
        several = "both" if are_needed else "either"
        verdicts.append((several if len(chosen) > 1 else ("none", "one")[len(chosen)], chosen))
    return evidence, verdicts


def in_words(kind: str, cells: pd.DataFrame, nats: float) -> str:
    """Return the verdict in words. `cells`: the matrix at the statement and the named sources."""
    names = list(cells.index)
    if kind == "one":
        (cell,) = cells.itertuples()
        what = f"the loss rises by {cell.lost:.1f} nats without it"
        beyond, tried = cell.beyond_lost, cell.tried_lost
        if cell.gives > cell.lost:  # not so where it was not evaluated
            what, beyond, tried = (
                f"gives {cell.gives:.1f} nats",
                cell.beyond_gives,
                cell.tried_gives,
            )
        return f"rests on {names[0]} ({what}; beats {beyond} of {tried} decoys)"
    if kind == "either":
        nats_of = " and ".join(f"{own:.1f}" for own in cells.gives)
        return f"rests on either of {', '.join(names)} ({nats_of} nats)"
    if kind == "both":
        return f"rests on {' and '.join(names)} together ({nats:.1f} nats)"
    by_all = round(nats, 1) + 0.0  # no -0.0
    return f"rests on no source (all together: {by_all:.1f} nats)"
