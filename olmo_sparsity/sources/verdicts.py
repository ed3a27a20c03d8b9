"""Turn losses with sources and decoys into verdicts, and hold their error rate. Without torch.

Place in the flow: losses (trials.py) → **evidence → verdicts** → statements.py.

A source counts where it does more than a decoy in its place: by t-tests of what is lost without it,
and of what it gives. What was not evaluated is NaN, a test with p = 1: which sources are looked at
more closely may depend on anything without raising the error rate.

The constants were fixed before the error rates of docs/sources.md were measured
(study/records/thresholds.md).

Dimension key: T statements, S sources, D decoys of a source, 2 tests (gives, lost).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import sqrt

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.analysis.results.statistics import quantile, tail

# --- which of the named sources the verdict has ---------------------------------------------------

SUFFICES = 0.5
"""A source suffices if it alone gives this share of the nats that all sources give."""

NEEDED = 0.2
"""A source is needed if this share of these nats is lost without it, …"""

REPLACED = 0.5
"""… and if the other sources replace no more than this share of what it gives."""

PART_NATS = 1.0
"""A token may rely on a source if all sources give it so many nats, and REPLACED of them are lost
without the source."""

PART_OF_STATEMENT_NATS = 2.0
"""A statement has a part that needs a source if such tokens lose so many nats together."""

# --- which sources are evaluated with more decoys -------------------------------------------------

SCREENED = 0.1
"""A source may matter if it gives, or costs, this share of the nats after one decoy."""

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

LEAST_OTHERS = 4
"""With so many sources or fewer, the others show too little. A source must then also pass a test
whose variance is that of the decoys alone, without a cap, as the prior may be far too small."""

MEDIAN_OF_CHI2 = 0.455
"""Median of the square of a normal number with variance 1."""

TINY = 1e-12
"""Variance of decoys that are all alike, in nats²."""

FREEDOM = 4
"""Degrees of freedom of a test at most, as nats have heavy tails, however well their variance is
known."""

FREEDOM_OF_TWO = 3
"""The same with two decoys in all."""

FREEDOM_OF_DECOYS = 6
"""Degrees of freedom at most of the test by the variance of decoys alone."""

FREEDOM_OF_MANY = 0.75
"""For each decoy: more than eight decoys show more of the tails. Otherwise no number of decoys
would decide what eight leave open."""

EARLY = 0.1
"""Share of the error rate that each look before the last one may spend."""

# --- which sources are neither named nor excluded -------------------------------------------------

OPEN_SPREADS = 2.0
"""A source that is not named is open if its effect is at least so many spreads of the statement's
loss."""

OPEN_NATS = 1.5
"""A smaller effect is never open."""

SEVERAL_NATS = 3.0
"""A larger effect is always open, also that of all sources together."""

DECIDED_SPREADS = 4.0
"""More decoys decide about an open source if its effect is so many spreads."""

Verdict = tuple[str, list[int]]
"""Kind (one, either, both, none, undecided) and the sources that it names."""


def looks(draws: int) -> list[int]:
    """Return after how many decoys `weigh` looks whether more are needed: 2, 4, 8, …, all."""
    numbers = [2]
    while numbers[-1] < draws:
        numbers.append(min(2 * numbers[-1], draws))
    return numbers


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
        names = [field.name for field in fields(self) if field.name.endswith("D")]
        return replace(self, **{name: getattr(self, name)[..., :num] for name in names})


def mean_of_tried(nats_TSD: np.ndarray) -> np.ndarray:
    """Return means over the decoys that were evaluated; NaN where none was."""
    num_TS = np.isfinite(nats_TSD).sum(-1)
    return np.nansum(nats_TSD, -1) / np.where(num_TS > 0, num_TS, np.nan)


@dataclass(frozen=True)
class Evidence:
    """Results of the tests of each statement and source."""

    p_2TS: np.ndarray
    """Probability that one more decoy does as well: as what the source gives, and what is lost."""

    named_TS: np.ndarray
    """Discoveries at the error rate."""

    spread_TS: np.ndarray
    """How the loss of the statement varies with the text in one place, in nats."""

    above_TS: np.ndarray
    """Nats above the least with which the source is named if no other is."""

    open_TS: np.ndarray
    """Not named, with an effect too large to be excluded."""


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
        by_scale = [tail(self.nats_2TS / scale.nats, scale.freedom) for scale in self.scales]
        return np.where(np.isnan(self.nats_2TS), 1.0, np.max(by_scale, axis=0))

    def above(self, p: float) -> np.ndarray:
        """Return by how many nats the means exceed those with this p-value."""
        least = [scale.nats * quantile(p, scale.freedom) for scale in self.scales]
        return self.nats_2TS - np.max(least, axis=0)


def look_at(losses: Losses, freedom: int = FREEDOM) -> Look:
    """Test all sources by all decoys.

    The variance is the mean of three, by their weights: the prior's; that of the decoys of each
    source, on average over sources; and half the median of the squares of what is lost without each
    other source with its first decoy, as if most of these did not matter."""
    nats_2TSD = np.stack([losses.gives_TSD, losses.lost_TSD])
    num_sources, num_decoys = nats_2TSD.shape[2:]
    has_all_2TS = np.isfinite(nats_2TSD).all(-1)
    has_variance = num_decoys > 1 and bool(has_all_2TS.any())

    prior_T1 = PRIOR_NATS**2 + (PRIOR_SHARE * losses.most_T[:, None]) ** 2
    total_TS = np.repeat(PRIOR_WEIGHT * prior_T1, num_sources, 1)
    weight = PRIOR_WEIGHT
    if has_variance:
        total_TS = total_TS + (num_decoys - 1) * _variance_of_decoys(nats_2TSD, has_all_2TS)
        weight += num_decoys - 1
    if num_sources > LEAST_OTHERS:
        squares_TS = losses.lost_TSD[..., 0] ** 2
        medians = [np.median(np.delete(squares_TS, s, 1), axis=1) for s in range(num_sources)]
        # Half of it: what is lost varies with the source's text and with its decoy's.
        total_TS = total_TS + OTHERS_WEIGHT * np.stack(medians, 1) / (2 * MEDIAN_OF_CHI2)
        weight += OTHERS_WEIGHT
    spread_TS = np.sqrt(total_TS / weight)

    noise = sqrt(1 + 1 / num_decoys)
    scales = [Scale(spread_TS * noise, freedom)]
    if has_variance and num_sources <= LEAST_OTHERS:
        uncapped_2TSD = np.stack([losses.decoys_TD[:, None] - losses.among_TSD, losses.without_TSD])
        variance_TS = _variance_of_decoys(uncapped_2TSD, has_all_2TS)
        num_tried = int(has_all_2TS.any((0, 1)).sum())
        most_freedom = max(FREEDOM_OF_DECOYS, int(FREEDOM_OF_MANY * num_decoys))
        freedom_of_decoys = min(most_freedom, num_tried * (num_decoys - 1))
        scales.append(Scale(np.sqrt(variance_TS + TINY) * noise, freedom_of_decoys))
    means_2TS = np.where(has_all_2TS, nats_2TSD.mean(-1), np.nan)
    return Look(means_2TS, spread_TS, scales)


def _variance_of_decoys(values_2TSD: np.ndarray, has_all_2TS: np.ndarray) -> np.ndarray:
    """Return variance_TS: of each statement, the variance over decoys, on average over sources with
    all decoys."""
    variance_2TS = np.where(has_all_2TS, values_2TSD.var(-1, ddof=1), np.nan)
    mean_T1 = np.nanmean(variance_2TS, (0, 2))[:, None]
    return np.zeros(values_2TSD.shape[1:3]) + mean_T1


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
    last_share = 1 - EARLY * (len(stages) - 1)
    shares = [EARLY] * (len(stages) - 1) + [last_share]
    freedom = FREEDOM if len(stages) > 1 else FREEDOM_OF_TWO
    all_looks = [look_at(losses.first(num), freedom) for num in stages]
    p_of_looks = [
        (look.p_2TS / share).clip(max=1.0) for look, share in zip(all_looks, shares, strict=True)
    ]
    p_2TS = np.min(p_of_looks, axis=0)

    # The limit of a single discovery among the tests of all statements and sources.
    limit = rate / (2 * p_2TS[0].size)
    above = [look.above(limit * share) for look, share in zip(all_looks, shares, strict=True)]
    above_TS = np.nan_to_num(np.array(above), nan=-np.inf).max((0, 1))

    # Other statements count as no discovery: they would raise the share allowed to these.
    has_gap_T1 = losses.gap_T[:, None] >= MIN_GAP
    named_TS = are_named(np.where(has_gap_T1, p_2TS, 1.0), rate)

    # The last look at which any source had all its decoys.
    evaluated = [look for look in all_looks if np.isfinite(look.nats_2TS).any()] or all_looks[:1]
    spread_TS = evaluated[-1].spread_TS
    return Evidence(
        p_2TS=p_2TS,
        named_TS=named_TS,
        spread_TS=spread_TS,
        above_TS=above_TS,
        open_TS=~named_TS & _are_open(losses, spread_TS),
    )


def _are_open(losses: Losses, spread_TS: np.ndarray) -> np.ndarray:
    """Return which sources have an effect that is too large to be excluded, and that would be part
    of the verdict if it were not chance."""
    gap_T1 = losses.gap_T[:, None]
    gives_TS = np.nan_to_num(mean_of_tried(losses.gives_TSD), nan=-np.inf)
    lost_TS = mean_of_tried(losses.lost_TSD)
    least_TS = np.clip(OPEN_SPREADS * spread_TS, OPEN_NATS, SEVERAL_NATS)
    may_suffice_TS = gives_TS >= np.maximum(least_TS, SUFFICES * gap_T1)
    may_be_needed_TS = lost_TS >= np.maximum(least_TS, NEEDED * gap_T1)
    return may_suffice_TS | may_be_needed_TS


def sources_to_look_at(losses: Losses, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the sources for which more decoys may change a verdict: in all other places (gives),
    and in theirs (lost). What a source gives matters only if what is lost without one does not
    decide: where no source, or more than one, costs a good part of the nats."""
    evidence = weigh(losses, rate)
    gap_T1 = losses.gap_T[:, None]
    gives_TS = mean_of_tried(losses.gives_TSD)
    lost_TS = mean_of_tried(losses.lost_TSD)
    is_undecided_TS = (gap_T1 >= MIN_GAP) & ~evidence.named_TS
    may_be_needed_TS = lost_TS >= SCREENED * gap_T1

    # Removing one source costs most of the nats, and no other costs a good part: this decides.
    has_one_T = may_be_needed_TS.sum(1) == 1
    is_decided_T = has_one_T & (lost_TS >= REPLACED * gap_T1).any(1)

    least_TS = np.maximum(SCREENED * gap_T1, evidence.spread_TS)
    may_give_TS = np.isnan(gives_TS) | (gives_TS >= least_TS)
    look_at_gives_TS = is_undecided_TS & ~is_decided_T[:, None] & may_give_TS
    look_at_lost_TS = is_undecided_TS & may_be_needed_TS & (lost_TS >= evidence.spread_TS)
    return look_at_gives_TS.any(0), look_at_lost_TS.any(0)


def needed_for_parts(tokens: Losses, statements: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return, by statement and source, whether the statement has tokens that rely on this source
    and that the other sources do not replace. `tokens`: losses of each token of the answer;
    `statements`: first and end token of each statement."""
    gap_W1 = tokens.gap_T[:, None]
    lost_WS = mean_of_tried(tokens.lost_TSD)
    gives_WS = np.nan_to_num(mean_of_tried(tokens.gives_TSD), nan=-np.inf)
    relies_WS = (gap_W1 >= PART_NATS) & (lost_WS >= REPLACED * gap_W1)
    # Two sources that say the same may cost half of a token's nats each, yet each gives most.
    gives_enough_WS = gives_WS >= REPLACED * gap_W1
    others_give_enough_WS = gives_enough_WS.sum(1, keepdims=True) > gives_enough_WS
    relies_WS &= ~others_give_enough_WS
    nats_WS = np.where(relies_WS, lost_WS, 0.0)
    nats_TS = np.stack([nats_WS[first:end].sum(0) for first, end in statements])
    return nats_TS >= PART_OF_STATEMENT_NATS


def judge(
    losses: Losses, rate: float, parts_TS: np.ndarray | None = None
) -> tuple[Evidence, list[Verdict]]:
    """Return the evidence, and kind and sources of each statement's verdict. `parts_TS`: what
    `needed_for_parts` returns; None: statements are judged as wholes."""
    evidence = weigh(losses, rate)
    gap_T1 = losses.gap_T[:, None]
    gives_TS = np.nan_to_num(mean_of_tried(losses.gives_TSD), nan=-np.inf)
    lost_TS = mean_of_tried(losses.lost_TSD)
    enough_TS = evidence.named_TS & (gives_TS >= SUFFICES * gap_T1)
    needed_TS = evidence.named_TS & (lost_TS >= NEEDED * gap_T1)
    needed_TS &= lost_TS >= (1 - REPLACED) * gives_TS
    if parts_TS is not None:
        # Half of the nats do not suffice where another source is needed for a part: a name that two
        # sources share may give as much.
        carries_TS = evidence.named_TS & parts_TS
        others_carry_TS = carries_TS.sum(1, keepdims=True) > carries_TS
        needed_TS |= carries_TS
        enough_TS &= ~others_carry_TS
    is_open_T = evidence.open_TS.any(1) | (losses.gap_T >= SEVERAL_NATS)
    verdicts: list[Verdict] = []
    for enough_S, needed_S, is_open in zip(enough_TS, needed_TS, is_open_T, strict=True):
        are_needed = not (enough_S & ~needed_S).any()
        chosen = np.flatnonzero(needed_S if are_needed else enough_S).tolist()
        if len(chosen) > 1:
            kind = "both" if are_needed else "either"
        elif chosen:
            kind = "one"
        else:
            kind = "undecided" if is_open else "none"
        verdicts.append((kind, chosen))
    return evidence, verdicts


def in_words(kind: str, cells: pd.DataFrame, nats: float, spread: float, draws: int) -> str:
    """Return the verdict in words. `cells`: the matrix at the statement and the named sources, or
    if it is undecided those that are open. `nats` of all sources, and the `spread` of the
    statement. `draws`: the most decoys of a source."""
    names = list(cells.index)
    if kind == "undecided":
        return _undecided_in_words(cells, nats, spread, draws)
    if kind == "one":
        (cell,) = cells.itertuples()
        # What a source gives is NaN where it was not evaluated. Of one decoy it is weaker evidence
        # than what is lost with many.
        if cell.gives > cell.lost and cell.tried_gives >= cell.tried_lost:
            effect = f"gives {cell.gives:.1f} nats"
            beaten = f"{cell.beyond_gives} of {cell.tried_gives}"
        else:
            effect = f"the loss rises by {cell.lost:.1f} nats without it"
            beaten = f"{cell.beyond_lost} of {cell.tried_lost}"
        return f"rests on {names[0]} ({effect}; beats {beaten} decoys)"
    if kind == "either":
        each = " and ".join(f"{gives:.1f}" for gives in cells.gives)
        return f"rests on either of {', '.join(names)} ({each} nats)"
    if kind == "both":
        return f"rests on {' and '.join(names)} together ({nats:.1f} nats)"
    by_all = round(nats, 1) + 0.0  # no -0.0
    return f"rests on no source (all together: {by_all:.1f} nats)"


def _undecided_in_words(cells: pd.DataFrame, nats: float, spread: float, draws: int) -> str:
    most_nats = np.fmax(cells.lost, cells.gives) if len(cells) else pd.Series(dtype=float)
    largest = most_nats.max() if len(cells) else nats
    # Without this ratio no number of decoys decides, and the advice would never end.
    if largest >= DECIDED_SPREADS * spread:
        remedy = f"take more decoys (draws={2 * draws}), of the sources' own kind"
    else:
        remedy = (
            f"its loss varies by {spread:.1f} nats with the text in one place; take decoys that "
            "are more like the sources"
        )
    if cells.empty:
        return f"undecided: no source alone stands out of {nats:.1f} nats of all; {remedy}"
    each = [f"{name} may matter ({most:.1f} nats)" for name, most in most_nats.items()]
    return f"undecided: {', '.join(each)}; {remedy}"
