"""Decide which sources affect a statement beyond chance.

Place in the flow: losses.py (filled by trials.py) → effect_tests.py → **`collect_evidence`** →
verdicts/verdict.py. The module needs NumPy only, not PyTorch.

A *p-value* is the probability that chance alone would show as large an effect. effect_tests.py
computes one for each effect of a source: for what it *gives*, and for what is *lost* without it.
More and more decoys are evaluated. A *round* tests all effects with the same number of decoys.

**An example.** One statement, sources A and B, `rate` 0.05. With two decoys of each there is one
round. The docstring of effect_tests.py derives the p-values.

                            A          B
    p-value of lost       0.0006     0.26
    doubled               0.0012     0.52      Bonferroni: the smaller p-value of two effects
    must be at most       0.025      0.05      Benjamini–Hochberg: the smaller of two, the larger
    decision              named      neither   B loses 0.3 nats, and an open source at least 1.5

**Several rounds.** To test again and again until something is named would name too much by chance.
So each round may spend a fraction of the rate, and its p-values are divided by this fraction. With
eight decoys there are three rounds:

    decoys                     2         4         8
    fraction of the rate      0.1       0.1       0.8
    p-value of one effect     0.04      0.002     0.001
    divided                   0.4       0.02      0.00125      the smallest counts: 0.00125

**The decision.** Each source is, for each statement,

    named        the effect is beyond chance; of the named sources, `rate` are expected to be wrong
    open         not named, but the effect is too large to say that there is none
    neither      the source may be taken for one that does not matter to this statement

**Where the constants come from.** Like the constants of effect_tests.py, they were fixed before the
error rates of docs/sources.md were measured.

Dimension key: T statements, S sources, D decoys of a source, R rounds, E the two effects in the
order of `EFFECTS`. A suffix 1 is a dimension of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.sources.verdicts.effect_tests import (
    EFFECTS,
    MAX_DEGREES,
    MAX_DEGREES_WITH_TWO_DECOYS,
    EffectTests,
    run_tests,
)
from olmo_sparsity.sources.verdicts.losses import StatementLosses, mean_over_decoys

EARLY_ROUND_FRACTION = 0.1
"""Fraction of the error rate that each round but the last may spend; the last has what remains. All
fractions add up to 1, so testing again does not raise the error rate. Most are spent last, as most
decoys show most."""

# --- what a source must do, as a fraction of the nats that all sources give -----------------------

SUFFICIENT_FRACTION = 0.5
"""A source suffices if it alone gives this fraction. Part of the definition of a verdict, as the
next one; both are as old as verdicts."""

NEEDED_FRACTION = 0.2
"""A source is needed only if this fraction is lost without it."""

# --- which sources are neither named nor excluded -------------------------------------------------

OPEN_SPREADS = 2.0
"""A source that is not named is open only if its effect is at least this many spreads: chance alone
rarely reaches it, so "no source" would claim too much. The nats that this requires are bounded by
the next two constants."""

OPEN_NATS = 1.5
"""At least this many nats are required, so that small effects do not make answers undecided."""

SEVERAL_NATS = 3.0
"""At most this many nats are required. They are a factor of 20 in probability, so a statement that
loses them does rely on something. For the same reason verdict.py calls a statement to which all
sources together give this much undecided, in place of "no source"."""


@dataclass(frozen=True)
class Evidence:
    """What the tests say of each statement and source."""

    p_ETS: np.ndarray
    """Probability that one more decoy in place of the source would have as large an effect, over
    all rounds."""

    is_named_TS: np.ndarray
    """Whether the effect of the source is beyond chance, at the error rate."""

    spread_TS: np.ndarray
    """Standard deviation of the statement's loss when one text of the prompt is exchanged, in
    nats."""

    nats_above_TS: np.ndarray
    """By how many nats the larger effect exceeds the smallest one that would be named, if no other
    source were; minus infinity if neither effect was tested."""

    is_open_TS: np.ndarray
    """Whether the source is not named, but has too large an effect to be excluded."""


def collect_evidence(losses: StatementLosses, rate: float) -> Evidence:
    """Decide for each statement and source whether the source is named, is open, or neither.

    Args:
        losses: Losses of each statement. An effect that was not evaluated has p = 1, as if it were
            chance. So the losses themselves may decide which sources get more decoys, without
            raising the error rate.
        rate: The fraction of the named sources that is expected to be named by chance.
    """
    rounds = _run_rounds(losses)
    # Dividing p by the fraction is comparing p with that fraction of the error rate.
    p_by_round = [(tests.p_ETS / fraction).clip(max=1.0) for tests, fraction in rounds]
    p_ETS = np.min(p_by_round, axis=0)

    # Statements without a gap have nothing to attribute, and count as p = 1. If one of them were
    # selected, Benjamini–Hochberg would raise the threshold for all other statements.
    has_gap_T1 = losses.gap_T[:, None] >= MIN_GAP
    is_named_TS = _is_beyond_chance(np.where(has_gap_T1, p_ETS, 1.0), rate)

    spread_TS = _best_spread(rounds)
    return Evidence(
        p_ETS=p_ETS,
        is_named_TS=is_named_TS,
        spread_TS=spread_TS,
        nats_above_TS=_nats_above_threshold(rounds, rate),
        is_open_TS=~is_named_TS & _has_large_effect(losses, spread_TS),
    )


# --- one test a round -----------------------------------------------------------------------------


class _Round(NamedTuple):
    """The tests after some number of decoys."""

    tests: EffectTests
    rate_fraction: float
    """Fraction of the error rate that this round may spend."""


def _run_rounds(losses: StatementLosses) -> list[_Round]:
    """Test all effects with the first 2, 4, 8, … decoys. Early rounds are computed again each time
    that `collect_evidence` is called: a source may have had fewer decoys than others then."""
    nums_decoys = decoy_rounds(losses.decoys_TD.shape[-1])
    num_early_rounds = len(nums_decoys) - 1
    last_fraction = 1 - EARLY_ROUND_FRACTION * num_early_rounds
    rate_fractions = [EARLY_ROUND_FRACTION] * num_early_rounds + [last_fraction]

    max_degrees = MAX_DEGREES if num_early_rounds > 0 else MAX_DEGREES_WITH_TWO_DECOYS
    return [
        _Round(run_tests(losses.of_first_decoys(num_decoys), max_degrees), fraction)
        for num_decoys, fraction in zip(nums_decoys, rate_fractions, strict=True)
    ]


def decoy_rounds(max_decoys: int) -> list[int]:
    """Return after how many decoys sources are tested: 2, 4, 8, … and at last `max_decoys`. Most
    sources are clear after two."""
    nums_decoys = [2]
    while nums_decoys[-1] < max_decoys:
        nums_decoys.append(min(2 * nums_decoys[-1], max_decoys))
    return nums_decoys


# --- which sources are named ----------------------------------------------------------------------


def _is_beyond_chance(p_ETS: np.ndarray, rate: float) -> np.ndarray:
    """Return is_named_TS: whether a source has an effect beyond chance at this error rate."""
    # Bonferroni over the two effects of a source, Benjamini–Hochberg over sources.
    p_TS = (len(EFFECTS) * p_ETS.min(0)).clip(max=1.0)
    return benjamini_hochberg(p_TS, rate)


def benjamini_hochberg(p: np.ndarray, rate: float) -> np.ndarray:
    """Return which of these p-values are selected, so that at most a fraction `rate` of the
    selected ones is expected to be chance (Benjamini and Hochberg, 1995). With rate 0.05:

        p-values, in order    0.010    0.030    0.036    0.200
        rate × i / n          0.0125   0.025    0.0375   0.050
        passes                yes      no       yes      no
        selected              yes      yes      yes      no
    """
    ordered = np.sort(p.ravel())
    # The i-th smallest of n p-values passes if it is at most rate × i / n. All that are no larger
    # than the last one that passes are selected, even if they do not pass by themselves.
    passing = ordered[ordered <= rate * np.arange(1, p.size + 1) / p.size]
    if len(passing) == 0:
        return np.zeros(p.shape, dtype=bool)
    return p <= passing[-1]


# --- spread, distance from the threshold, and what is open ----------------------------------------


def _best_spread(rounds: Sequence[_Round]) -> np.ndarray:
    """Return the spread of the last round in which an effect was tested: most decoys show the
    spread best, but in the last rounds often no source had all its decoys."""
    with_means = [tests for tests, _ in rounds if tests.has_means]
    return with_means[-1].spread_TS if with_means else rounds[0].tests.spread_TS


def _nats_above_threshold(rounds: Sequence[_Round], rate: float) -> np.ndarray:
    """Return nats_above_TS (`Evidence`), of the round in which it is largest."""
    # The p-value that Benjamini–Hochberg requires if it selects one source alone: i is 1, and n is
    # the number of statements times sources. Bonferroni halves it.
    num_tested = rounds[0].tests.spread_TS.size
    p_of_only_name = rate / (len(EFFECTS) * num_tested)
    nats_above_by_round = [
        tests.nats_above(p_of_only_name * fraction) for tests, fraction in rounds
    ]
    nats_above_RETS = np.nan_to_num(np.array(nats_above_by_round), nan=-np.inf)
    return nats_above_RETS.max((0, 1))


def _has_large_effect(losses: StatementLosses, spread_TS: np.ndarray) -> np.ndarray:
    """Return whether a source has an effect that is too large to be excluded, and that would decide
    the verdict if it were not chance: the source would suffice, or would be needed.

        would suffice     what it gives >= max(min_nats, 0.5 × gap)
        would be needed   what is lost >= max(min_nats, 0.2 × gap)
        min_nats          2 spreads, but at least 1.5 and at most 3 nats
    """
    gap_T1 = losses.gap_T[:, None]
    # What a source gives may not have been evaluated. Then it is not large.
    gives_TS = np.nan_to_num(mean_over_decoys(losses.gives_TSD), nan=-np.inf)
    lost_TS = mean_over_decoys(losses.lost_TSD)

    min_nats_TS = np.clip(OPEN_SPREADS * spread_TS, OPEN_NATS, SEVERAL_NATS)
    may_suffice_TS = gives_TS >= np.maximum(min_nats_TS, SUFFICIENT_FRACTION * gap_T1)
    may_be_needed_TS = lost_TS >= np.maximum(min_nats_TS, NEEDED_FRACTION * gap_T1)
    return may_suffice_TS | may_be_needed_TS
