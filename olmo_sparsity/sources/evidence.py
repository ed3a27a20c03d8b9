"""Test whether a source does more for a statement than a decoy in its place. Without torch.

Place in the flow: losses (trials.py) → **evidence** (`weigh`) → verdicts.py.

Two numbers of each statement and source are tested: what the source *gives* among decoys of all
others, and what is *lost* when a decoy replaces it. Each test is a t-test of a mean over decoys,

    t = mean over D decoys / (spread × √(1 + 1/D)),

where the spread is how the loss of the statement varies with the text in one place, and 1 stands
for the source's own text, which is one more draw. What was not evaluated is NaN, a test with p = 1:
which sources are looked at more closely may depend on anything without raising the error rate.

The constants here and in verdicts.py were fixed before the error rates of docs/sources.md were
measured (study/records/thresholds.md).

Dimension key: T statements, S sources, D decoys of a source, 2 tests (gives, lost).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import sqrt

import numpy as np

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.analysis.results.intervals import quantile, tail

# --- shares of the nats that all sources give -----------------------------------------------------

SUFFICIENT_SHARE = 0.5
"""A source suffices if it alone gives this share."""

NEEDED_SHARE = 0.2
"""A source is needed only if this share is lost without it."""

# --- variance of the tests ------------------------------------------------------------------------

PRIOR_NATS = 0.3
PRIOR_SHARE = 0.02
"""How the loss of a statement varies with the text in one place, known beforehand: the root of the
sum of squares of the first, and of the second times the loss with decoys."""

PRIOR_WEIGHT = 3
"""How many decoys the prior is worth."""

OTHERS_WEIGHT = 4
"""How many decoys the other sources' losses are worth. Their median is taken, as one of them may
matter."""

FEW_SOURCES = 4
"""With so many sources or fewer, the others show too little. A source must then also pass a test
whose variance is that of the decoys alone, without a cap, as the prior may be far too small."""

MEDIAN_OF_CHI2 = 0.455
"""Median of the square of a normal number with variance 1."""

TINY_VARIANCE = 1e-12
"""Variance of decoys that are all alike, in nats²."""

# --- degrees of freedom ---------------------------------------------------------------------------

MOST_FREEDOM = 4
"""Degrees of freedom of a test at most, as nats have heavy tails, however well their variance is
known."""

MOST_FREEDOM_OF_TWO = 3
"""The same with two decoys in all."""

MOST_FREEDOM_OF_DECOYS = 6
"""Degrees of freedom at most of the test by the variance of decoys alone."""

FREEDOM_PER_DECOY = 0.75
"""More than eight decoys show more of the tails, and allow so many degrees of freedom each.
Otherwise no number of decoys would decide what eight leave open."""

EARLY_SHARE = 0.1
"""Share of the error rate that each look before the last one may spend."""

# --- which sources are neither named nor excluded -------------------------------------------------

OPEN_SPREADS = 2.0
"""A source that is not named is open if its effect is at least so many spreads of the statement's
loss."""

OPEN_NATS = 1.5
"""A smaller effect is never open."""

SEVERAL_NATS = 3.0
"""A larger effect is always open, also that of all sources together."""


@dataclass(frozen=True)
class Losses:
    """Losses of each statement with these texts in view, in nats."""

    all_T: np.ndarray
    """All sources."""

    decoys_TD: np.ndarray
    """A decoy in place of each source. This and the following are NaN where they were not needed,
    and not computed: always the last ones of D."""

    among_TSD: np.ndarray
    """A decoy in place of each source but one."""

    without_TSD: np.ndarray
    """A decoy in place of one source."""

    @cached_property
    def cap_T(self) -> np.ndarray:
        """The usual loss with decoys. Losses are capped here: what raises a loss above it misleads,
        and does not show what sources give."""
        return np.nanmedian(self.decoys_TD, -1)

    @property
    def gap_T(self) -> np.ndarray:
        """Nats that all sources give, against decoys in place of all."""
        return np.nanmean(np.minimum(self.decoys_TD, self.cap_T[:, None]), -1) - self.all_T

    @property
    def gives_TSD(self) -> np.ndarray:
        """Nats that a source gives among these decoys."""
        cap_T11 = self.cap_T[:, None, None]
        return np.minimum(self.decoys_TD[:, None], cap_T11) - np.minimum(self.among_TSD, cap_T11)

    @property
    def lost_TSD(self) -> np.ndarray:
        """Nats that are lost when its decoy takes its place among the other sources."""
        return np.minimum(self.without_TSD, self.cap_T[:, None, None]) - self.all_T[:, None, None]

    def first(self, num_decoys: int) -> Losses:
        """Return the losses with the first decoys only."""
        names = [field.name for field in fields(self) if field.name.endswith("D")]
        return replace(self, **{name: getattr(self, name)[..., :num_decoys] for name in names})


def mean_of_tried(nats_TSD: np.ndarray) -> np.ndarray:
    """Return means over the decoys that were evaluated; NaN where none was."""
    num_TS = np.isfinite(nats_TSD).sum(-1)
    return np.nansum(nats_TSD, -1) / np.where(num_TS > 0, num_TS, np.nan)


# --- one look -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """The unit in which a test measures means over decoys."""

    nats: np.ndarray
    """Standard error of a mean over decoys, less one more decoy: TS."""

    freedom: int
    """Degrees of freedom."""


@dataclass(frozen=True)
class Look:
    """Tests of all sources after the same number of decoys."""

    nats_2TS: np.ndarray
    """Means over decoys; NaN for sources with fewer of them."""

    spread_TS: np.ndarray
    scales: list[Scale]
    """A source must pass a test by each."""

    @property
    def p_2TS(self) -> np.ndarray:
        """1 for sources with fewer decoys."""
        p_by_scale = [tail(self.nats_2TS / scale.nats, scale.freedom) for scale in self.scales]
        return np.where(np.isnan(self.nats_2TS), 1.0, np.max(p_by_scale, axis=0))

    def nats_above(self, p: float) -> np.ndarray:
        """Return by how many nats the means exceed those with this p-value."""
        thresholds = [scale.nats * quantile(p, scale.freedom) for scale in self.scales]
        return self.nats_2TS - np.max(thresholds, axis=0)


def look_at(losses: Losses, freedom: int = MOST_FREEDOM) -> Look:
    """Test all sources by all decoys."""
    nats_2TSD = np.stack([losses.gives_TSD, losses.lost_TSD])
    num_sources, num_decoys = nats_2TSD.shape[2:]
    has_all_2TS = np.isfinite(nats_2TSD).all(-1)
    spread_TS = _spread(losses, nats_2TSD, has_all_2TS)

    # A mean over decoys is compared with the source's own text, which is one more draw.
    noise = sqrt(1 + 1 / num_decoys)
    scales = [Scale(spread_TS * noise, freedom)]
    if num_sources <= FEW_SOURCES and _has_variance(has_all_2TS, num_decoys):
        uncapped_2TSD = np.stack([losses.decoys_TD[:, None] - losses.among_TSD, losses.without_TSD])
        variance_TS = _variance_of_decoys(uncapped_2TSD, has_all_2TS)
        num_tried = int(has_all_2TS.any((0, 1)).sum())
        most_freedom = max(MOST_FREEDOM_OF_DECOYS, int(FREEDOM_PER_DECOY * num_decoys))
        freedom_of_decoys = min(most_freedom, num_tried * (num_decoys - 1))
        scales.append(Scale(np.sqrt(variance_TS + TINY_VARIANCE) * noise, freedom_of_decoys))
    means_2TS = np.where(has_all_2TS, nats_2TSD.mean(-1), np.nan)
    return Look(means_2TS, spread_TS, scales)


def _spread(losses: Losses, nats_2TSD: np.ndarray, has_all_2TS: np.ndarray) -> np.ndarray:
    """Return spread_TS: how the loss of a statement varies with the text in one place.

    Its square is the mean of three variances, by their weights: the prior's; that of the decoys of
    each source, on average over sources; and half the median of the squares of what is lost without
    each other source with its first decoy, as if most of these did not matter."""
    num_sources, num_decoys = nats_2TSD.shape[2:]
    prior_T1 = PRIOR_NATS**2 + (PRIOR_SHARE * losses.cap_T[:, None]) ** 2
    total_TS = np.repeat(PRIOR_WEIGHT * prior_T1, num_sources, 1)
    weight = PRIOR_WEIGHT
    if _has_variance(has_all_2TS, num_decoys):
        total_TS = total_TS + (num_decoys - 1) * _variance_of_decoys(nats_2TSD, has_all_2TS)
        weight += num_decoys - 1
    if num_sources > FEW_SOURCES:
        squares_TS = losses.lost_TSD[..., 0] ** 2
        medians = [np.median(np.delete(squares_TS, s, 1), axis=1) for s in range(num_sources)]
        # Half of it: what is lost varies with the source's text and with its decoy's.
        total_TS = total_TS + OTHERS_WEIGHT * np.stack(medians, 1) / (2 * MEDIAN_OF_CHI2)
        weight += OTHERS_WEIGHT
    return np.sqrt(total_TS / weight)


def _has_variance(has_all_2TS: np.ndarray, num_decoys: int) -> bool:
    """Return whether any source has several decoys, all of them evaluated."""
    return num_decoys > 1 and bool(has_all_2TS.any())


def _variance_of_decoys(values_2TSD: np.ndarray, has_all_2TS: np.ndarray) -> np.ndarray:
    """Return variance_TS: of each statement, the variance over decoys, on average over sources with
    all decoys."""
    variance_2TS = np.where(has_all_2TS, values_2TSD.var(-1, ddof=1), np.nan)
    mean_T1 = np.nanmean(variance_2TS, (0, 2))[:, None]
    return np.zeros(values_2TSD.shape[1:3]) + mean_T1


# --- all looks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """Results of the tests of each statement and source."""

    p_2TS: np.ndarray
    """Probability that one more decoy does as well: as what the source gives, and what is lost."""

    named_TS: np.ndarray
    """Discoveries at the error rate."""

    spread_TS: np.ndarray
    """How the loss of the statement varies with the text in one place, in nats."""

    nats_above_TS: np.ndarray
    """Nats above the threshold from which the source is named if no other is."""

    open_TS: np.ndarray
    """Not named, with an effect too large to be excluded."""


def looks(draws: int) -> list[int]:
    """Return after how many decoys `weigh` looks whether more are needed: 2, 4, 8, …, all."""
    numbers = [2]
    while numbers[-1] < draws:
        numbers.append(min(2 * numbers[-1], draws))
    return numbers


def weigh(losses: Losses, rate: float) -> Evidence:
    """Test each source after 2, 4, 8, … decoys, as far as they were evaluated. Each look but the
    last spends a small part of the error rate: its p-values are divided by that part."""
    stages = looks(losses.decoys_TD.shape[-1])
    num_early = len(stages) - 1
    shares = [EARLY_SHARE] * num_early + [1 - EARLY_SHARE * num_early]
    freedom = MOST_FREEDOM if num_early > 0 else MOST_FREEDOM_OF_TWO
    all_looks = [look_at(losses.first(num_decoys), freedom) for num_decoys in stages]
    p_of_looks = [
        (look.p_2TS / share).clip(max=1.0) for look, share in zip(all_looks, shares, strict=True)
    ]
    p_2TS = np.min(p_of_looks, axis=0)

    # The limit of a single discovery among the tests of all statements and sources.
    limit = rate / (2 * p_2TS[0].size)
    nats_above = [
        look.nats_above(limit * share) for look, share in zip(all_looks, shares, strict=True)
    ]
    nats_above_TS = np.nan_to_num(np.array(nats_above), nan=-np.inf).max((0, 1))

    # Statements without a gap get p = 1. As discoveries they would raise the threshold of
    # Benjamini and Hochberg for all others.
    has_gap_T1 = losses.gap_T[:, None] >= MIN_GAP
    named_TS = are_named(np.where(has_gap_T1, p_2TS, 1.0), rate)

    # The last look at which any source had all its decoys.
    evaluated = [look for look in all_looks if np.isfinite(look.nats_2TS).any()] or all_looks[:1]
    spread_TS = evaluated[-1].spread_TS
    return Evidence(
        p_2TS=p_2TS,
        named_TS=named_TS,
        spread_TS=spread_TS,
        nats_above_TS=nats_above_TS,
        open_TS=~named_TS & _are_open(losses, spread_TS),
    )


def are_named(p_2TS: np.ndarray, rate: float) -> np.ndarray:
    """Return the sources that pass one of two tests, by what they give and what is lost without
    them, at this error rate."""
    # Bonferroni over the two tests of a source, Benjamini–Hochberg over sources.
    return are_discoveries((2 * p_2TS.min(0)).clip(max=1.0), rate)


def are_discoveries(p: np.ndarray, rate: float) -> np.ndarray:
    """Select by Benjamini–Hochberg: at most this share of the selected is expected to be chance."""
    ordered = np.sort(p.ravel())
    passing = ordered[ordered <= rate * np.arange(1, p.size + 1) / p.size]
    largest_passing = passing[-1] if len(passing) else -1.0
    return p <= largest_passing


def _are_open(losses: Losses, spread_TS: np.ndarray) -> np.ndarray:
    """Return which sources have an effect that is too large to be excluded, and that would be part
    of the verdict if it were not chance."""
    gap_T1 = losses.gap_T[:, None]
    gives_TS = np.nan_to_num(mean_of_tried(losses.gives_TSD), nan=-np.inf)
    lost_TS = mean_of_tried(losses.lost_TSD)
    least_nats_TS = np.clip(OPEN_SPREADS * spread_TS, OPEN_NATS, SEVERAL_NATS)
    may_suffice_TS = gives_TS >= np.maximum(least_nats_TS, SUFFICIENT_SHARE * gap_T1)
    may_be_needed_TS = lost_TS >= np.maximum(least_nats_TS, NEEDED_SHARE * gap_T1)
    return may_suffice_TS | may_be_needed_TS
