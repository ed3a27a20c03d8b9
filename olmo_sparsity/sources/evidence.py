"""Test whether a source does more for a statement than a decoy in its place.

Place in the flow: losses.py (filled by trials.py) → **`collect_evidence`** → verdicts.py. The
module needs NumPy only, not PyTorch.

**Which evidence.** Each source has two effects on the loss of a statement, both in nats
(losses.py): what it *gives* when decoys replace all other sources, and what is *lost* when a decoy
replaces it. Each effect is measured with several decoys, and its mean over decoys is tested.

**Which test.** If the source does not matter, its text is one more draw from the texts of which its
decoys are drawn. Then the mean over D decoys differs from 0 by chance alone, and

    t = mean over D decoys / (spread × √(1 + 1/D))

has roughly Student's t distribution. The *spread* is the standard deviation of the statement's loss
when the text in one place changes. The 1 below the root is the source's own draw, and 1/D are its
decoys. Two to eight decoys show little of a variance, so the spread is pooled from three parts:

    spread² = (3 · prior² + (D − 1) · variance over decoys + 4 · variance seen at other sources)
              / (3 + (D − 1) + 4)

The third part, and its 4 in the denominator, exist with more than four sources only. With fewer,
a second test has the variance over decoys in place of spread², and a source must pass both.

**Which sources are named.** The smaller of a source's two p-values is doubled (Bonferroni). Then
Benjamini–Hochberg selects sources over all statements, so that of the named sources a share `rate`
is expected to be named by chance.

**How often it is tested.** After 2, 4, 8, … decoys, since most sources are clear after two. Each
of these rounds has a part of the error rate for itself, and divides its p-values by that part.

**An example.** One statement, sources A and B, two decoys of each (a and b). Losses in nats:

    prompt          decoy 1   decoy 2
    A B               2.0                  gap: mean(10.0, 10.2) − 2.0 = 8.1
    a b              10.0      10.4        cap: median = 10.2
    a B               9.8      10.3        lost without A: 7.8, 8.2, mean 8.0
    A b               2.1       2.5        lost without B: 0.1, 0.5, mean 0.3

    prior²      = 0.3² + (0.02 × 10.2)²    = 0.132
    variance    = mean over A and B, gives and lost, of 0.02, 0.02, 0.08, 0.08 = 0.05
    spread      = √((3 × 0.132 + 1 × 0.05) / (3 + 1)) = 0.333
    t of A lost = 8.0 / (0.333 × √1.5) = 19.6;  p = 0.00015  (3 degrees of freedom)
    t of B lost = 0.3 / (0.333 × √1.5) =  0.73; p = 0.26

In the second test, by the variance over decoys without a cap, A has t = 28.5 and p = 0.0006 (2
degrees of freedom). The larger p counts, so A is named (2 × 0.0006 is below 0.05 / 2), B is not.

**Where the constants come from.** Those that decide which sources are named were fixed before the
error rates of docs/sources.md were measured, of two to eight decoys (study/records/thresholds.md,
entries of 2026-11-28 and 2026-11-30). What was tried is in study/records/log.md, "A rule for
sources with few decoys". Where no run is named below, a constant is our choice.

Dimension key: T statements, S sources, D decoys of a source, E the two effects in the order of
`EFFECTS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.analysis.results.intervals import quantile, tail
from olmo_sparsity.sources.losses import StatementLosses, mean_over_decoys

EFFECTS = ("gives", "lost")
"""The two effects of a source, in the order of dimension E."""

# --- shares of the nats that all sources give -----------------------------------------------------

SUFFICIENT_SHARE = 0.5
"""A source suffices if it alone gives this share. Part of the definition of a verdict, as the next
one; both are as old as verdicts."""

NEEDED_SHARE = 0.2
"""A source is needed only if this share is lost without it."""

# --- the spread -----------------------------------------------------------------------------------

PRIOR_NATS = 0.3
PRIOR_SHARE = 0.02
"""The spread that is assumed before any decoy is evaluated: √(PRIOR_NATS² + (PRIOR_SHARE × loss
with decoys)²). On 15 questions of SQuAD with SmolLM2 maximum likelihood gave 0.3 nats and 0.01 of
the loss, on 19 questions 0.1 and 0.02. These are the larger ones of both."""

PRIOR_WEIGHT = 3
"""Degrees of freedom that the prior's variance counts for. D decoys count for D − 1."""

OTHERS_WEIGHT = 4
"""Degrees of freedom that the losses without the other sources count for. With the prior alone up
to 0.33 of simulated answers got a name by chance, where effects are ten times as large as the prior
says. With the other sources it is 0.20, and 0.06 with this weight and `MAX_DEGREES`, too."""

FEW_SOURCES = 4
"""With so many sources or fewer, the other sources are too few to show a variance: one of them may
matter, and a median of three or fewer does not exclude it. A second test takes their place."""

MEDIAN_OF_CHI2 = 0.455
"""Median of χ² with one degree of freedom. The median of squares of a normal variable, divided by
this, estimates its variance."""

TINY_VARIANCE = 1e-12
"""In nats². Added to the variance over decoys, so that decoys with equal losses cause no division
by zero."""

# --- degrees of freedom ---------------------------------------------------------------------------

MAX_DEGREES = 4
"""Largest number of degrees of freedom of the test by the spread, however well its variance is
known. What one decoy changes has heavy tails: on 19 questions of SQuAD those of Student's t with 3
degrees of freedom."""

MAX_DEGREES_WITH_TWO_DECOYS = 3
"""The same if each source has only two decoys in all. The only round then has the whole error rate,
and two decoys show least of the tails."""

MAX_DEGREES_BY_DECOYS = 6
"""Largest number of degrees of freedom of the second test, by the variance over decoys. Chosen
among four numbers, and confirmed on fresh draws: six name a source of 4 nats in 0.55 of answers
with two sources and eight decoys, four in 0.37, and at most 5% are named by chance."""

DEGREES_BY_DECOYS_PER_DECOY = 0.75
"""Degrees of freedom of the second test for each decoy, if that is more than
`MAX_DEGREES_BY_DECOYS`: more than eight decoys show more of the tails. Without it no number of
decoys could decide what eight leave undecided."""

EARLY_ROUND_RATE = 0.1
"""Part of the error rate that each round but the last may spend; the last has what remains. All
parts add up to 1, so testing again does not raise the error rate."""

# --- which sources are neither named nor excluded -------------------------------------------------

OPEN_SPREADS = 2.0
"""A source that is not named is open if its effect is at least so many spreads: chance alone rarely
reaches it, so "no source" would claim too much."""

OPEN_NATS = 1.5
"""An effect of fewer nats is never open, so that small effects do not make answers undecided."""

SEVERAL_NATS = 3.0
"""An effect of so many nats is always open, also that of all sources together: a statement that
loses a factor of 20 in probability does rely on something."""


# --- the result -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """Results of the tests of each statement and source."""

    p_ETS: np.ndarray
    """Probability that one more decoy in place of the source would have as large an effect."""

    named_TS: np.ndarray
    """Whether the source is selected at the error rate."""

    spread_TS: np.ndarray
    """Standard deviation of the statement's loss when the text in one place changes, in nats."""

    nats_above_TS: np.ndarray
    """By how many nats the effect exceeds the threshold of a source that is the only one named. The
    larger of both effects; minus infinity if none was tested."""

    open_TS: np.ndarray
    """Whether the source is not named, but has too large an effect to be excluded."""


def decoy_rounds(max_decoys: int) -> list[int]:
    """Return after how many decoys sources are tested: 2, 4, 8, … and at last `max_decoys`."""
    nums_decoys = [2]
    while nums_decoys[-1] < max_decoys:
        nums_decoys.append(min(2 * nums_decoys[-1], max_decoys))
    return nums_decoys


def collect_evidence(losses: StatementLosses, rate: float) -> Evidence:
    """Test both effects of each source on each statement.

    losses: Losses of each statement. An effect that was not evaluated has p = 1. So which sources
        get more decoys may depend on any loss, without raising the error rate.
    rate: Share of the named sources that is expected to be named by chance.
    """
    rounds = decoy_rounds(losses.decoys_TD.shape[-1])
    num_early = len(rounds) - 1
    rate_parts = [EARLY_ROUND_RATE] * num_early + [1 - EARLY_ROUND_RATE * num_early]
    max_degrees = MAX_DEGREES if num_early > 0 else MAX_DEGREES_WITH_TWO_DECOYS
    tests_by_round = [
        run_tests(losses.of_first_decoys(num_decoys), max_degrees) for num_decoys in rounds
    ]

    p_by_round = [
        (tests.p_ETS / part).clip(max=1.0)
        for tests, part in zip(tests_by_round, rate_parts, strict=True)
    ]
    p_ETS = np.min(p_by_round, axis=0)

    # Statements without a gap have nothing to attribute, and count as p = 1. Were they selected,
    # Benjamini–Hochberg would raise the threshold for all other statements.
    has_gap_T1 = losses.gap_T[:, None] >= MIN_GAP
    named_TS = named_sources(np.where(has_gap_T1, p_ETS, 1.0), rate)

    # The p-value from which Benjamini–Hochberg selects a source if it selects no other.
    p_of_only_name = rate / (2 * p_ETS[0].size)
    nats_above_by_round = [
        tests.nats_above(p_of_only_name * part)
        for tests, part in zip(tests_by_round, rate_parts, strict=True)
    ]
    nats_above_TS = np.nan_to_num(np.array(nats_above_by_round), nan=-np.inf).max((0, 1))

    # Most decoys show the spread best, but in the last rounds often no source had all its decoys.
    evaluated = [tests for tests in tests_by_round if np.isfinite(tests.mean_ETS).any()]
    spread_TS = evaluated[-1].spread_TS if evaluated else tests_by_round[0].spread_TS

    return Evidence(
        p_ETS=p_ETS,
        named_TS=named_TS,
        spread_TS=spread_TS,
        nats_above_TS=nats_above_TS,
        open_TS=~named_TS & _has_large_effect(losses, spread_TS),
    )


def named_sources(p_ETS: np.ndarray, rate: float) -> np.ndarray:
    """Return named_TS: which sources have at least one effect beyond chance at this error rate."""
    # Bonferroni over the two effects of a source, Benjamini–Hochberg over sources.
    p_TS = (len(EFFECTS) * p_ETS.min(0)).clip(max=1.0)
    return benjamini_hochberg(p_TS, rate)


def benjamini_hochberg(p: np.ndarray, rate: float) -> np.ndarray:
    """Return which of these p-values are selected: of the selected ones, at most a share `rate` is
    expected to be chance (Benjamini and Hochberg, 1995)."""
    ordered = np.sort(p.ravel())
    passing = ordered[ordered <= rate * np.arange(1, p.size + 1) / p.size]
    largest_passing = passing[-1] if len(passing) else -1.0
    return p <= largest_passing


def _has_large_effect(losses: StatementLosses, spread_TS: np.ndarray) -> np.ndarray:
    """Return which sources have an effect that is too large to be excluded, and that would decide
    the verdict if it were not chance: the source would suffice, or would be needed."""
    gap_T1 = losses.gap_T[:, None]
    gives_TS = np.nan_to_num(mean_over_decoys(losses.gives_TSD), nan=-np.inf)
    lost_TS = mean_over_decoys(losses.lost_TSD)
    min_nats_TS = np.clip(OPEN_SPREADS * spread_TS, OPEN_NATS, SEVERAL_NATS)
    may_suffice_TS = gives_TS >= np.maximum(min_nats_TS, SUFFICIENT_SHARE * gap_T1)
    may_be_needed_TS = lost_TS >= np.maximum(min_nats_TS, NEEDED_SHARE * gap_T1)
    return may_suffice_TS | may_be_needed_TS


# --- one round of tests ---------------------------------------------------------------------------


@dataclass(frozen=True)
class StandardError:
    """The denominator of a t-test, and how well it is known."""

    nats_TS: np.ndarray
    """Standard error of a mean over decoys that is compared with one more draw, in nats."""

    degrees_of_freedom: int


@dataclass(frozen=True)
class RoundOfTests:
    """Tests of both effects of all sources after the same number of decoys."""

    mean_ETS: np.ndarray
    """Means over decoys, in nats; NaN for effects that were evaluated with fewer decoys."""

    spread_TS: np.ndarray
    """Standard deviation of the statement's loss when the text in one place changes, in nats."""

    standard_errors: list[StandardError]
    """One for each test. A source must pass all of them."""

    @property
    def p_ETS(self) -> np.ndarray:
        """The largest p-value of these tests; 1 for effects with fewer decoys."""
        p_by_test = [
            tail(self.mean_ETS / error.nats_TS, error.degrees_of_freedom)
            for error in self.standard_errors
        ]
        return np.where(np.isnan(self.mean_ETS), 1.0, np.max(p_by_test, axis=0))

    def nats_above(self, p: float) -> np.ndarray:
        """Return by how many nats each mean exceeds the one that has this p-value."""
        thresholds = [
            error.nats_TS * quantile(p, error.degrees_of_freedom) for error in self.standard_errors
        ]
        return self.mean_ETS - np.max(thresholds, axis=0)


def run_tests(losses: StatementLosses, max_degrees: int = MAX_DEGREES) -> RoundOfTests:
    """Test each source that has all decoys of these losses."""
    nats_ETSD = np.stack([losses.gives_TSD, losses.lost_TSD])
    num_sources, num_decoys = nats_ETSD.shape[2:]
    has_all_ETS = np.isfinite(nats_ETSD).all(-1)
    spread_TS = _pooled_spread(losses, nats_ETSD, has_all_ETS)

    # The variance of a mean over decoys is 1/D; the source's own text, one more draw, adds 1.
    noise_factor = sqrt(1 + 1 / num_decoys)
    standard_errors = [StandardError(spread_TS * noise_factor, max_degrees)]
    if num_sources <= FEW_SOURCES and _has_variance(has_all_ETS, num_decoys):
        # Without a cap, which would hide how much decoys vary. One `all_T` is common to all decoys,
        # so it does not change the variance of what is lost.
        gives_TSD = losses.decoys_TD[:, None] - losses.among_TSD
        uncapped_ETSD = np.stack([gives_TSD, losses.without_TSD])
        variance_TS = _variance_over_decoys(uncapped_ETSD, has_all_ETS)
        # Variances are averaged over sources, and each has D − 1 degrees of freedom.
        num_tested_sources = int(has_all_ETS.any((0, 1)).sum())
        max_degrees_by_decoys = max(
            MAX_DEGREES_BY_DECOYS, int(DEGREES_BY_DECOYS_PER_DECOY * num_decoys)
        )
        degrees_by_decoys = min(max_degrees_by_decoys, num_tested_sources * (num_decoys - 1))
        error_TS = np.sqrt(variance_TS + TINY_VARIANCE) * noise_factor
        standard_errors.append(StandardError(error_TS, degrees_by_decoys))

    mean_ETS = np.where(has_all_ETS, nats_ETSD.mean(-1), np.nan)
    return RoundOfTests(mean_ETS, spread_TS, standard_errors)


def _pooled_spread(
    losses: StatementLosses, nats_ETSD: np.ndarray, has_all_ETS: np.ndarray
) -> np.ndarray:
    """Return spread_TS, the standard deviation of a statement's loss when the text in one place
    changes. Its square is the mean of up to three variances, weighted by degrees of freedom."""
    num_sources, num_decoys = nats_ETSD.shape[2:]

    # The prior.
    prior_T1 = PRIOR_NATS**2 + (PRIOR_SHARE * losses.cap_T[:, None]) ** 2
    sum_TS = np.repeat(PRIOR_WEIGHT * prior_T1, num_sources, 1)
    weight = PRIOR_WEIGHT

    # The variance over the decoys of a source.
    if _has_variance(has_all_ETS, num_decoys):
        sum_TS = sum_TS + (num_decoys - 1) * _variance_over_decoys(nats_ETSD, has_all_ETS)
        weight += num_decoys - 1

    # What is lost without each other source, as if most of them did not matter: then it is the
    # difference of two texts in one place, and its variance is twice the square of the spread. The
    # median is not changed by the one or two that do matter. Only the first decoy is certain to be
    # evaluated at each source.
    if num_sources > FEW_SOURCES:
        squares_TS = losses.lost_TSD[..., 0] ** 2
        medians = [np.median(np.delete(squares_TS, s, 1), axis=1) for s in range(num_sources)]
        sum_TS = sum_TS + OTHERS_WEIGHT * np.stack(medians, 1) / (2 * MEDIAN_OF_CHI2)
        weight += OTHERS_WEIGHT

    return np.sqrt(sum_TS / weight)


def _has_variance(has_all_ETS: np.ndarray, num_decoys: int) -> bool:
    """Return whether any effect was evaluated with several decoys."""
    return num_decoys > 1 and bool(has_all_ETS.any())


def _variance_over_decoys(nats_ETSD: np.ndarray, has_all_ETS: np.ndarray) -> np.ndarray:
    """Return variance_TS: the variance over decoys, on average over effects and sources that were
    evaluated with all decoys. It is the same for all sources of a statement."""
    variance_ETS = np.where(has_all_ETS, nats_ETSD.var(-1, ddof=1), np.nan)
    mean_T1 = np.nanmean(variance_ETS, (0, 2))[:, None]
    return np.zeros(nats_ETSD.shape[1:3]) + mean_T1
