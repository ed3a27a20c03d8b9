"""Find influential units by losses alone: evaluate groups of units, and halve the best of them.

With 8 units and groups of 4 the steps may look like this, if two groups were halved in a step:

    [0 1 2 3] [4 5 6 7]     both are evaluated
    [0 1] [2 3] [4 5] [6 7]
    [2] [3] [4] [5]         the halves of the best two groups, which are single units now

`halving` is the selector. It needs no states of the model, so it works where unrelated text
replaces distant text. The check of reliability (measurement/agreement.py) uses the same groups.

Dimension key: T targets, U distant units, G groups of units.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.question import (
    Choice,
    Question,
    choice_of,
    loss_reductions,
)
from olmo_sparsity.text.units import Units

GROUP_TOKENS = 64
"""The number of tokens of the groups with which `halving` begins. With more than `MANY_TOKENS`
distant tokens, groups are twice as large."""

MANY_TOKENS = 1024

NUM_HALVED = 4
"""How many of the best groups `halving` halves in a step."""


class UnitGroup(NamedTuple):
    """Neighbouring units, which are evaluated as one."""

    first_unit: int
    """The index of its first unit."""

    end_unit: int
    """One past the index of its last unit."""

    @property
    def num_units(self) -> int:
        """Return how many units the group has."""
        return self.end_unit - self.first_unit


def first_groups(units: Units, num_distant: int) -> list[UnitGroup]:
    """Cut the units into groups of about as many tokens as `GROUP_TOKENS` says.

    num_distant: The number of tokens of all units together.
    """
    num_tokens = GROUP_TOKENS if num_distant <= MANY_TOKENS else 2 * GROUP_TOKENS
    # The number of units that hold `num_tokens` tokens on average.
    group_size = max(1, num_tokens * len(units) // num_distant)
    return [
        UnitGroup(first_unit, min(first_unit + group_size, len(units)))
        for first_unit in range(0, len(units), group_size)
    ]


def halves_of(groups: list[UnitGroup]) -> list[UnitGroup]:
    """Return both halves of each group, in the order of the text. A group of one unit has none."""
    halves = []
    for group in sorted(groups):
        if group.num_units > 1:
            middle = (group.first_unit + group.end_unit) // 2
            halves.append(UnitGroup(group.first_unit, middle))
            halves.append(UnitGroup(middle, group.end_unit))
    return halves


def halving(scorer: Scorer, question: Question) -> Choice:
    """Run add_one from coarse to fine by losses alone: on groups of 64 or 128 tokens, then on both
    halves of the best 4 groups, and so on to single units.

    A unit that was not evaluated alone ranks after those that were. Its score is its share of the
    loss reduction by the smallest group around it.
    """
    units = question.units
    num_targets = len(question.spans)
    starting_groups = first_groups(units, question.context.block.num_distant)
    # The groups to evaluate in this step, a list for each target.
    groups_of_targets = [starting_groups for _ in range(num_targets)]
    score_TU = np.zeros((num_targets, len(units)))
    is_single_TU = np.zeros(score_TU.shape, dtype=bool)

    # A target that has no group left has an empty list, and costs one row a step.
    while any(groups_of_targets):
        sets = [[units.run(*group) for group in groups] for groups in groups_of_targets]
        reductions = loss_reductions(scorer, question, sets)

        next_groups_of_targets = []
        for target, groups in enumerate(groups_of_targets):
            reduction_G = reductions[target]
            # The score of a group overwrites that of the larger group that it is in.
            for group, nats in zip(groups, reduction_G.tolist(), strict=True):
                units_of_group = slice(group.first_unit, group.end_unit)
                score_TU[target, units_of_group] = nats / group.num_units
                is_single_TU[target, units_of_group] = group.num_units == 1
            best_indices = np.argsort(-reduction_G, kind="stable")[:NUM_HALVED]
            best_groups = [groups[index] for index in best_indices]
            next_groups_of_targets.append(halves_of(best_groups))
        groups_of_targets = next_groups_of_targets

    # Units that were evaluated alone come first, then by score. `lexsort` sorts by its last key.
    unit_TU = np.lexsort((-score_TU, ~is_single_TU), axis=1)
    return choice_of(unit_TU[:, : question.k], score_TU)
