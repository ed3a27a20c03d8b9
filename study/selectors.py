"""Rank distant units by further rules: `--selectors study/selectors.py:NAME`, from a clone.

NAME: drop_one or divergence.
"""

from __future__ import annotations

import numpy as np

from olmo_sparsity.analysis.scoring.rows import Row
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.influence import Choice, Question, best_of
from olmo_sparsity.text.units import NO_INDICES


def drop_one(scorer: Scorer, question: Question) -> Choice:
    """The largest rises in loss when a distant unit is left out of the long window."""
    context, units = question.context, question.units
    distant_F = np.arange(context.block.num_distant)
    (long_W,) = scorer.losses([context.long_row()])

    def without(unit: int) -> np.ndarray:
        kept_F = np.delete(distant_F, units.distant_indices(unit))
        (loss_W,) = scorer.losses([context.set_row(kept_F)])
        return loss_W

    rises_UW = np.stack([without(unit) for unit in range(len(units))]) - long_W[None]
    return best_of(question.total(rises_UW), question.k)


def divergence(scorer: Scorer, question: Question) -> Choice:
    """The largest falls in KL(p_long ‖ ·) when a distant unit is added alone; needs no label.

    p_long is the prediction with the whole distant text that is ranked, also for an unrelated one.
    """
    context, units = question.context, question.units
    (hidden_WD,) = scorer.hidden([context.long_row()])
    aim_WV = scorer.log_probabilities(hidden_WD)

    def kl(row: Row) -> np.ndarray:
        (hidden_WD,) = scorer.hidden([row])
        log_q_WV = scorer.log_probabilities(hidden_WD)
        return (aim_WV.exp() * (aim_WV - log_q_WV)).sum(-1).cpu().numpy()

    alone = [kl(context.set_row(units.distant_indices(unit))) for unit in range(len(units))]
    return best_of(question.total(kl(context.set_row(NO_INDICES)) - np.stack(alone)), question.k)
