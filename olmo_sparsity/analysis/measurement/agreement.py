"""Score whether rankings, and the unrelated texts that they rely on, can be trusted.

Two scores are stored in the table `lds`, both as rank correlations (Spearman):

    linear datamodeling score   a selector's scores against losses: does the sum of the scores of
                                some units predict the loss reduction by all of them together?
    reliability                 one half of the unrelated texts against the other half: do both
                                find the same groups of units important?

ranking.py calls `linear_datamodeling_scores`, and text_evaluation.py `reliability_of_texts`. With
two random halves A and B of four units, the first score is computed from:

    scores of the units             0.1  0.0  2.3  0.2
    half A has units 0 and 2        predicted 0.1 + 2.3 = 2.4     measured reduction 2.1
    half B has units 1 and 3        predicted 0.0 + 0.2 = 0.2     measured reduction 0.4
    both rank A before B, so their rank correlation is 1

All losses are in nats, summed over the tokens of a target.

Dimension key: T targets, U distant units, W targets of a row or block, G groups of units, A sets of
units (random halves, or the empty set and the groups), X unrelated texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.analysis.results.rank_correlation import rank_correlations
from olmo_sparsity.analysis.scoring.replaced import ReplacingScorer
from olmo_sparsity.analysis.scoring.rows import Context
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.halving import (
    NUM_HALVED,
    UnitGroup,
    first_groups,
    halves_of,
)
from olmo_sparsity.analysis.selectors.question import (
    Choice,
    Question,
    reductions_of_unit_sets,
)
from olmo_sparsity.text.units import NO_INDICES, Spans, Units

MIN_CORRELATION = -1 / 3
"""The smallest correlation for which the formula of Spearman and Brown returns a correlation: −1.
For smaller ones it returns less than −1."""


@dataclass(frozen=True)
class RandomHalves:
    """Random halves of the units, and how far each half lowers the loss of each target."""

    has_unit_AU: np.ndarray
    """Whether a half holds a unit."""

    reduction_TA: np.ndarray
    """Loss reduction of a target when the units of a half are added to the local window."""


def evaluate_halves(scorer: Scorer, question: Question, num_halves: int) -> RandomHalves:
    """Draw random halves of the units of a question, and evaluate them at its targets."""
    has_unit_AU = question.units.halves(num_halves, question.generator)
    return RandomHalves(has_unit_AU, reductions_of_unit_sets(scorer, question, has_unit_AU))


def linear_datamodeling_scores(choice: Choice, halves: RandomHalves) -> np.ndarray:
    """Return lds_T, the linear datamodeling score of each target: the rank correlation, over random
    halves of the units, of the summed scores of a half with the loss reduction by it."""
    predicted_TA = choice.score_TU @ halves.has_unit_AU.T
    return rank_correlations(predicted_TA, halves.reduction_TA, of_equal_values=0.0)


def reliability_of_texts(
    scorer: ReplacingScorer, context: Context, units: Units, spans: Spans
) -> np.ndarray | None:
    """Return reliability_T, how well the unrelated texts agree on what matters to each target, or
    None if there are too few texts or groups of units to tell.

    The effects of groups of units are measured twice, by either half of the texts, and compared by
    rank. The correlation r of two halves is turned into that of all texts by the formula of
    Spearman and Brown:

        reliability = 2 r / (1 + r)
    """
    groups = _compared_groups(units)
    # One text has no halves, and the order of a few groups says little.
    if scorer.num_texts < 2 or len(groups) <= NUM_HALVED:
        return None

    # The first set is empty: its loss is that with the local window alone.
    sets = [NO_INDICES, *(units.run(first, end) for first, end in groups)]
    rows = []
    for span in spans:
        rows += [context.set_row(indices, span) for indices in sets]
    # `losses_by_text` returns the losses of a target's tokens; a target's loss is their sum.
    losses_of_rows = [nll_XW.sum(1) for nll_XW in scorer.losses_by_text(rows)]
    loss_TAX = np.array(losses_of_rows).reshape(len(spans), len(sets), scorer.num_texts)

    # Every other text belongs to one half, so that the halves differ by at most one text.
    even_reduction_TG = _reductions(loss_TAX[..., 0::2].mean(-1))
    odd_reduction_TG = _reductions(loss_TAX[..., 1::2].mean(-1))
    r_T = rank_correlations(even_reduction_TG, odd_reduction_TG, of_equal_values=0.0)
    r_T = np.maximum(MIN_CORRELATION, r_T)
    return 2 * r_T / (1 + r_T)


def _reductions(loss_TA: np.ndarray) -> np.ndarray:
    """Return reduction_TG, how far each group of units lowers the loss, in nats. `loss_TA` has the
    loss with the local window alone, and then the losses with each group."""
    loss_short_T1 = loss_TA[:, :1]
    loss_with_group_TG = loss_TA[:, 1:]
    return loss_short_T1 - loss_with_group_TG


def _compared_groups(units: Units) -> list[UnitGroup]:
    """Return the groups of units on whose effects two halves of the texts should agree.

    These are the groups that the selector `halving` begins with. They are halved until there are
    more of them than it keeps in a step, or only single units."""
    groups = first_groups(units)
    while len(groups) <= NUM_HALVED:
        halves = halves_of(groups)
        if not halves:
            break
        groups = halves
    return groups
