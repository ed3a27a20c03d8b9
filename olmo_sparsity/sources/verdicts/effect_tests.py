"""Test whether the effects of a source are larger than what chance explains.

Place in the flow: losses.py → **`run_tests`**, once for each number of decoys → evidence.py,
which joins the tests and names sources. The module needs NumPy only, not PyTorch.

    in     losses of statements, with D decoys of each source       [T, S, D], in nats
    out    a p-value of each effect of each source                  [E, T, S]

Each source has two effects on the loss of a statement (losses.py): what it *gives* when decoys
replace all other sources, and what is *lost* when a decoy replaces it. Each is measured with D
decoys, and its mean over them is tested against 0 (a t-test).

**An example.** One statement, sources A and B, two decoys of each (a and b). Losses in nats:

    texts of the prompt    decoy 1   decoy 2
    A B                      2.0                  gap: mean(10.0, 10.2) − 2.0 = 8.1
    a b                     10.0      10.4        cap: median = 10.2, also in place of 10.3 and 10.4
    a B                      9.8      10.3        lost without A: 7.8, 8.2, mean 8.0
    A b                      2.1       2.5        lost without B: 0.1, 0.5, mean 0.3

The cap counts a larger loss as the usual one with decoys (`StatementLosses.cap_T`). Is 0.3 more
than what any exchange of a text would change? Two tests say:

    first test     standard error 0.408 nats   A lost  t = 19.6, p = 0.00015   B lost  p = 0.26
    second test    standard error 0.281 nats   A lost  t = 28.5, p = 0.0006    B lost  p = 0.20

Both must be passed, so the larger p-value counts: 0.0006 for A and 0.26 for B. So A matters, and
what is lost without B may be chance.

**Where the standard error is from.** A source that does not matter is like one more decoy: its text
might have been drawn as a decoy, too. Then

    t = mean over D decoys / (spread × √(1 + 1/D))

has roughly Student's t distribution. The *spread* is the standard deviation of the statement's loss
when one text of the prompt is exchanged. The 1 below the root is the source's own draw, and 1/D are
its decoys.

**Why there are two tests.** Two to eight decoys show little of a variance. So the first test takes
the *pooled* spread, a weighted mean of three variances: what is assumed before any decoy (the
prior), the variance over decoys, and what the losses without the other sources show:

    pooled spread² = (3 · prior² + (D − 1) · variance over decoys + 4 · variance at other sources)
                     / (3 + (D − 1) + 4)

The last term, and its 4 in the denominator, exist with more than four sources only. In their place,
fewer sources have the second test, which takes the variance over decoys alone. In the example

    prior²           = 0.3² + (0.02 × 10.2)²                = 0.132
    variance         = mean of those of what A and B give (0.02, 0.02) and of what is
                       lost without them (0.08, 0.08)   = 0.05
    pooled spread    = √((3 × 0.132 + 1 × 0.05) / (3 + 1))  = 0.333
    standard error   = 0.333 × √1.5                         = 0.408, with 3 degrees of freedom

The variance of the second test is computed without the cap, as the cap would hide how much decoys
vary: 0.0525, and √0.0525 × √1.5 = 0.281 with 2 degrees of freedom.

**Where the constants come from.** They were fixed before the error rates of docs/sources.md were
measured, for two to eight decoys (study/records/thresholds.md, entries of 2026-11-28 and
2026-11-30). What was tried is in study/records/log.md, "A rule for sources with few decoys". Where
no run is named below, a constant is our choice.

Dimension key: T statements, S sources, D decoys of a source, E the two effects in the order of
`EFFECTS`. A suffix 1 is a dimension of size 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from olmo_sparsity.analysis.results.student_t import quantile, tail
from olmo_sparsity.sources.verdicts.losses import StatementLosses

EFFECTS = ("gives", "lost")
"""The two effects of a source, in the order of dimension E."""

# --- constants of the pooled spread ---------------------------------------------------------------

PRIOR_NATS = 0.3
PRIOR_FRACTION = 0.02
"""The spread that is assumed before any decoy is evaluated: √(PRIOR_NATS² + (PRIOR_FRACTION × loss
with decoys)²). On 15 questions of SQuAD with SmolLM2 maximum likelihood gave 0.3 nats and 0.01 of
the loss, on 19 questions 0.1 and 0.02. These are the larger ones of both."""

PRIOR_WEIGHT = 3
"""Degrees of freedom that the prior's variance counts for. D decoys count for D − 1."""

OTHERS_WEIGHT = 4
"""Degrees of freedom that the losses without the other sources count for. With the prior alone up
to 0.33 of simulated answers got a name by chance, where effects are ten times as large as the prior
says. With the other sources it is 0.20, and 0.06 with this weight and `MAX_DEGREES`, too."""

FEW_SOURCES = 4
"""With this many sources or fewer, the other sources are too few to show a variance: one of them
may matter, and a median of three or fewer does not exclude it. A second test takes their place."""

MEDIAN_OF_CHI2 = 0.455
"""Median of χ² with one degree of freedom. The median of squares of a normal variable, divided by
this, estimates its variance."""

TINY_VARIANCE = 1e-12
"""In nats². Added to the variance over decoys, so that decoys with equal losses cause no division
by zero."""

# --- constants: degrees of freedom ----------------------------------------------------------------

MAX_DEGREES = 4
"""Largest number of degrees of freedom of the test by the pooled spread, however well its variance
is known. What one decoy changes has heavy tails: on 19 questions of SQuAD they are like those of
Student's t with 3 degrees of freedom."""

MAX_DEGREES_WITH_TWO_DECOYS = 3
"""The same if each source has only two decoys in all. The only round of tests then has the whole
error rate, and two decoys show least of the tails."""

MAX_DEGREES_BY_DECOYS = 6
"""Largest number of degrees of freedom of the second test, by the variance over decoys. Chosen
among four numbers, and confirmed on fresh draws: six name a source of 4 nats in 0.55 of answers
with two sources and eight decoys, four in 0.37, and at most 5% are named by chance."""

DEGREES_BY_DECOYS_PER_DECOY = 0.75
"""Degrees of freedom of the second test for each decoy, if that is more than
`MAX_DEGREES_BY_DECOYS`: more than eight decoys show more of the tails. Without it no number of
decoys could decide what eight leave undecided."""


@dataclass(frozen=True)
class StandardError:
    """The denominator of a t-test, and how well it is known."""

    nats_TS: np.ndarray
    """Standard error of a mean over decoys that is compared with one more draw, in nats."""

    degrees_of_freedom: int


@dataclass(frozen=True)
class EffectTests:
    """Tests of both effects of all sources, after the same number of decoys of each source."""

    mean_ETS: np.ndarray
    """Means over decoys, in nats; NaN for effects that were evaluated with fewer decoys."""

    spread_TS: np.ndarray
    """Pooled spread: the standard deviation of the statement's loss when one text of the prompt is
    exchanged, in nats."""

    standard_errors: list[StandardError]
    """One for each test. A source must pass all of them."""

    @property
    def has_means(self) -> bool:
        """Return whether any effect was evaluated with this number of decoys."""
        return bool(np.isfinite(self.mean_ETS).any())

    @property
    def p_ETS(self) -> np.ndarray:
        """Return the largest p-value of these tests, as a source must pass all; 1 for effects that
        were evaluated with fewer decoys."""
        p_ETS_by_test = [
            tail(self.mean_ETS / error.nats_TS, error.degrees_of_freedom)
            for error in self.standard_errors
        ]
        return np.where(np.isnan(self.mean_ETS), 1.0, np.max(p_ETS_by_test, axis=0))

    def nats_above(self, p: float) -> np.ndarray:
        """Return by how many nats each mean exceeds the mean that has this p-value; NaN for effects
        with fewer decoys."""
        thresholds = [
            error.nats_TS * quantile(p, error.degrees_of_freedom) for error in self.standard_errors
        ]
        # A source must pass all tests, so the largest threshold counts.
        return self.mean_ETS - np.max(thresholds, axis=0)


def run_tests(losses: StatementLosses, max_degrees: int = MAX_DEGREES) -> EffectTests:
    """Test the effects of each source that was evaluated with all decoys of these losses.

    Args:
        losses: Losses with the decoys of one round (`StatementLosses.of_first_decoys`).
        max_degrees: Largest number of degrees of freedom of the first test.
    """
    effects = _Effects.of(losses)
    spread_TS = _pooled_spread(losses, effects)

    # The variance of a mean over decoys is 1/D; the source's own text, one more draw, adds 1.
    noise_factor = sqrt(1 + 1 / effects.num_decoys)
    standard_errors = [StandardError(spread_TS * noise_factor, max_degrees)]
    # With one decoy, there is no variance over decoys, and the first test stands alone.
    if effects.num_sources <= FEW_SOURCES and effects.have_variance:
        standard_errors.append(_error_by_decoys(losses, effects, noise_factor))

    mean_ETS = np.where(effects.is_complete_ETS, effects.nats_ETSD.mean(-1), np.nan)
    return EffectTests(mean_ETS, spread_TS, standard_errors)


# --- the effects and their variance over decoys ---------------------------------------------------


@dataclass(frozen=True)
class _Effects:
    """Both effects of all sources on all statements, with each decoy."""

    nats_ETSD: np.ndarray
    """Effects in nats; NaN where a decoy was not evaluated."""

    is_complete_ETS: np.ndarray
    """Whether an effect was evaluated with all decoys. Only such effects are tested."""

    @staticmethod
    def of(losses: StatementLosses) -> _Effects:
        """Return the effects by these losses."""
        nats_ETSD = np.stack([losses.gives_TSD, losses.lost_TSD])
        return _Effects(nats_ETSD, np.isfinite(nats_ETSD).all(-1))

    @property
    def num_sources(self) -> int:
        return self.nats_ETSD.shape[2]

    @property
    def num_decoys(self) -> int:
        return self.nats_ETSD.shape[3]

    @property
    def have_variance(self) -> bool:
        """Return whether any effect was evaluated with several decoys, and so has a variance."""
        return self.num_decoys > 1 and bool(self.is_complete_ETS.any())

    def variance_over_decoys(self) -> np.ndarray:
        """Return variance_TS: the mean of the variances over decoys of all complete effects of a
        statement. It is the same for all its sources, as each has too few decoys for its own."""
        # ddof=1, as the mean is estimated from the same D decoys.
        variance_ETS = np.where(self.is_complete_ETS, self.nats_ETSD.var(-1, ddof=1), np.nan)
        variance_T1 = np.nanmean(variance_ETS, (0, 2))[:, None]
        return np.repeat(variance_T1, self.num_sources, 1)


# --- the pooled spread ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _VarianceEstimate:
    """An estimate of the square of the spread, in nats²."""

    variance_TS: np.ndarray
    weight: int
    """The degrees of freedom that it counts for."""


def _pooled_spread(losses: StatementLosses, effects: _Effects) -> np.ndarray:
    """Return spread_TS, the root of the mean of up to three variances, weighted by their degrees of
    freedom (the equation above)."""
    estimates = [_VarianceEstimate(_prior_variance(losses), PRIOR_WEIGHT)]
    if effects.have_variance:
        variance_TS = effects.variance_over_decoys()
        estimates.append(_VarianceEstimate(variance_TS, effects.num_decoys - 1))
    if effects.num_sources > FEW_SOURCES:
        variance_TS = _variance_at_other_sources(losses)
        estimates.append(_VarianceEstimate(variance_TS, OTHERS_WEIGHT))

    weighted_sum_TS = sum(estimate.weight * estimate.variance_TS for estimate in estimates)
    total_weight = sum(estimate.weight for estimate in estimates)
    return np.sqrt(weighted_sum_TS / total_weight)


def _prior_variance(losses: StatementLosses) -> np.ndarray:
    """Return variance_TS, which is assumed before any decoy is evaluated (`PRIOR_NATS`). It grows
    with the loss of the statement, and is the same for all its sources."""
    num_sources = losses.lost_TSD.shape[1]
    variance_T1 = PRIOR_NATS**2 + (PRIOR_FRACTION * losses.cap_T[:, None]) ** 2
    return np.repeat(variance_T1, num_sources, 1)


def _variance_at_other_sources(losses: StatementLosses) -> np.ndarray:
    """Return variance_TS: for each source, the variance that the losses without the other sources
    show, if most of those sources do not matter. For example, of five other sources:

        lost without each                     0.3  −0.2   7.9   0.4  −0.1
        squares                               0.09  0.04  62.4  0.16  0.01
        median, which 7.9 does not change     0.09
        variance                              0.09 / (2 × 0.455) = 0.099
    """
    num_sources = losses.lost_TSD.shape[1]
    # Only the first decoy is certain to be evaluated at each source.
    squares_TS = losses.lost_TSD[..., 0] ** 2
    median_by_source = []
    for source in range(num_sources):
        squares_of_others = np.delete(squares_TS, source, axis=1)
        median_by_source.append(np.median(squares_of_others, axis=1))

    # What is lost without a source that does not matter is the difference of two draws, the source
    # and its decoy. So its variance is twice the square of the spread.
    return np.stack(median_by_source, 1) / (2 * MEDIAN_OF_CHI2)


# --- the second test ------------------------------------------------------------------------------


def _error_by_decoys(
    losses: StatementLosses, effects: _Effects, noise_factor: float
) -> StandardError:
    """Return the standard error of the second test, by the variance over decoys alone.

    Args:
        losses: The losses that `effects` were computed from.
        effects: Says which effects are complete.
        noise_factor: Standard error divided by the spread.
    """
    # Without the cap of `gives_TSD` and `lost_TSD`. `all_T` is the same for all decoys, so what is
    # lost has the variance of `without_TSD`.
    gives_TSD = losses.decoys_TD[:, None] - losses.among_TSD
    uncapped = _Effects(np.stack([gives_TSD, losses.without_TSD]), effects.is_complete_ETS)
    variance_TS = uncapped.variance_over_decoys()
    error_TS = np.sqrt(variance_TS + TINY_VARIANCE) * noise_factor

    # The variance is a mean over sources, and each source has D − 1 degrees of freedom.
    num_decoys = effects.num_decoys
    num_tested_sources = int(effects.is_complete_ETS.any((0, 1)).sum())
    max_degrees = max(MAX_DEGREES_BY_DECOYS, int(DEGREES_BY_DECOYS_PER_DECOY * num_decoys))
    degrees_of_freedom = min(max_degrees, num_tested_sources * (num_decoys - 1))
    return StandardError(error_TS, degrees_of_freedom)
