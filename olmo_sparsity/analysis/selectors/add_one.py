"""Rank distant units by adding each alone: Eq. (20), and two faster approximations.

The influence of a distant unit u on a target is the loss reduction when u alone is added to the
local window,

    I(u) = L_short − L({u})

and the k influential units are those of largest I. The three selectors differ in the units for
which they compute I(u), each with one row of a batch:

    add_one            all
    add_one_screened   those that a gradient ranks highest: max(16, 2k)
    add_one_nested     those in the best of coarse groups, and those of add_one_screened

Dimension key: T targets, U distant units, W targets of a row or block, K ranks or numbers of units,
G groups of units.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from olmo_sparsity.analysis.scoring.rows import Context
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.gates import gate_gradients
from olmo_sparsity.analysis.selectors.question import (
    Choice,
    Question,
    best_of,
    choice_of,
    loss_reductions,
)
from olmo_sparsity.models.identity.use import with_model_in_use
from olmo_sparsity.text.units import NO_INDICES, Units

MIN_CANDIDATES = 16
"""The smallest number of units that `add_one_screened` evaluates: the gradient is a rough guide,
and the best unit is often not the first by it."""

GROUP_SIZES = (256, 32, 4)
"""How many neighbouring units `add_one_nested` evaluates as one, from step to step."""

NUM_KEPT_GROUPS = 20
"""How many of the best groups `add_one_nested` keeps in a step, at least. It goes on with their
units."""


@with_model_in_use
def influence_map(scorer: Scorer, context: Context, units: Units) -> np.ndarray:
    """Return I_UW in nats: the influence L_short − L({u}) of every distant unit u on every target
    of the block."""
    # One row of a distant unit, the local window and the block serves all W targets: what follows a
    # target does not affect it.
    rows = [context.set_row(units.distant_indices(unit)) for unit in range(len(units))]
    (short_W,) = scorer.losses([context.set_row(NO_INDICES)])
    return short_W[None] - np.stack(scorer.losses(rows))


def add_one(scorer: Scorer, question: Question) -> Choice:
    """Choose the units that reduce the loss most when each is added alone: Eq. (20)."""
    influence_UW = influence_map(scorer, question.context, question.units)
    return best_of(question.total(influence_UW), question.k)


def add_one_screened(scorer: Scorer, question: Question) -> Choice:
    """Run add_one on the max(16, 2k) candidates that a gradient ranks highest.

    The gradient takes one forward and backward pass of the local window with all distant tokens.
    Each of these is nearly masked: its column of attention scores has a log-gate of ln 0.1. The
    gradient of the loss with respect to the gate predicts the effect of opening it.
    """
    return _add_one_of_candidates(scorer, question, list(_screen_units(scorer, question)))


def _screen_units(scorer: Scorer, question: Question) -> np.ndarray:
    """Return the units that a gradient ranks highest, a row of them for each target."""
    gate_TU = question.units.sum_by_unit(gate_gradients(scorer, question.context, question.spans))
    num_candidates = min(len(question.units), max(MIN_CANDIDATES, 2 * question.k))
    return best_of(gate_TU, num_candidates).unit_TK


def add_one_nested(scorer: Scorer, question: Question) -> Choice:
    """Run add_one from coarse to fine: on all groups of 256 units, then on the groups of 32 inside
    the best of those, then of 4, then on single units; and on those that `add_one_screened`
    evaluates. For a long distant context, these are far fewer rows.

    A unit is missed if it helps less than the rest of its group harms, and its gradient is small.
    """
    units = question.units
    num_kept = max(NUM_KEPT_GROUPS, 2 * question.k)

    # For each target: the units that are left, at first all.
    candidates = [np.arange(len(units))] * len(question.spans)
    for size in GROUP_SIZES:
        no_group_would_be_dropped = size * num_kept >= len(units)
        if no_group_would_be_dropped:
            continue
        candidates = _units_of_best_groups(scorer, question, candidates, size, num_kept)
    if len(candidates[0]) < len(units):
        # A gradient may find a unit whose effect is hidden by the rest of its group.
        screened = _screen_units(scorer, question)
        candidates = [
            np.union1d(nested, gradient_best)
            for nested, gradient_best in zip(candidates, screened, strict=True)
        ]
    return _add_one_of_candidates(scorer, question, candidates)


def _units_of_best_groups(
    scorer: Scorer,
    question: Question,
    candidates: Sequence[np.ndarray],
    size: int,
    num_kept: int,
) -> list[np.ndarray]:
    """Return, for each target, the units of the groups whose addition lowers its loss most.

    Args:
        candidates: Units of each target. A group is evaluated if it holds one of them.
        size: Number of neighbouring units in a group.
        num_kept: Number of groups whose units are returned.
    """
    units = question.units
    # A group is identified by its first unit: with size 4 unit 9 is in group 8.
    groups_of_targets = [np.unique(target_units // size) * size for target_units in candidates]
    sets_of_targets = []
    for first_units in groups_of_targets:
        end_units = np.minimum(first_units + size, len(units))
        bounds = zip(first_units.tolist(), end_units.tolist(), strict=True)
        sets_of_targets.append([units.run(first, end) for first, end in bounds])
    reductions = loss_reductions(scorer, question, sets_of_targets)

    units_of_targets = []
    for first_units, reduction_G in zip(groups_of_targets, reductions, strict=True):
        best_first = np.argsort(-reduction_G, kind="stable")
        best_firsts = np.sort(first_units[best_first[:num_kept]])
        kept_units = (best_firsts[:, None] + np.arange(size)).ravel()
        # The last group of the text may have fewer units than the others.
        units_of_targets.append(kept_units[kept_units < len(units)])
    return units_of_targets


def _add_one_of_candidates(
    scorer: Scorer, question: Question, candidates: Sequence[np.ndarray]
) -> Choice:
    """Evaluate each candidate alone, and choose those that lower the loss most.

    Args:
        candidates: Units of each target, at least k.
    """
    sets_of_targets = [
        [question.units.distant_indices(unit) for unit in target_units.tolist()]
        for target_units in candidates
    ]
    reductions = loss_reductions(scorer, question, sets_of_targets)

    chosen_units = []
    score_TU = np.zeros((len(candidates), len(question.units)))
    for score_U, target_units, reduction in zip(score_TU, candidates, reductions, strict=True):
        # Stable: of equal reductions, the unit that comes first in the text is chosen.
        best_first = np.argsort(-reduction, kind="stable")
        chosen_units.append(target_units[best_first[: question.k]])
        score_U[target_units] = reduction
    return choice_of(np.array(chosen_units), score_TU)
