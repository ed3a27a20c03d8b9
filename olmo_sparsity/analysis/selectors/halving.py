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


def first_groups(units: Units) -> list[UnitGroup]:
    """Cut the units into groups of `GROUP_TOKENS` tokens, or of twice as many if they have more
    than `MANY_TOKENS` tokens. 20 units of 400 tokens become groups of 3, 3, 3, 3, 3, 3 and 2 units,
    as 3 units hold about 64 tokens."""
    num_tokens = units.num_tokens
    tokens_per_group = GROUP_TOKENS if num_tokens <= MANY_TOKENS else 2 * GROUP_TOKENS
    # Units differ in length, so a group has the number of units that hold so many on average.
    units_per_group = max(1, tokens_per_group * len(units) // num_tokens)
    return [
        UnitGroup(first_unit, min(first_unit + units_per_group, len(units)))
        for first_unit in range(0, len(units), units_per_group)
    ]


def halves_of(groups: list[UnitGroup]) -> list[UnitGroup]:
    """Return both halves of each group, in the order of the text. A group of one unit has no
    halves, so it is left out: the group of units 0 to 2 becomes unit 0, and units 1 and 2."""
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
    starting_groups = first_groups(units)
    # For each target, the groups that the next step evaluates. All targets begin with the same.
    groups_of_targets = [starting_groups for _ in range(num_targets)]
    score_TU = np.zeros((num_targets, len(units)))
    # Whether a unit was evaluated alone.
    is_single_TU = np.zeros(score_TU.shape, dtype=bool)

    # The best groups of a target may be single units before those of others are. It then has no
    # group left, and costs one row a step: that without units, to which losses are compared.
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
            # A stable sort: of equal groups, the first in the text is halved.
            best_indices = np.argsort(-reduction_G, kind="stable")[:NUM_HALVED]
            best_groups = [groups[index] for index in best_indices]
            next_groups_of_targets.append(halves_of(best_groups))
        groups_of_targets = next_groups_of_targets

    # Units that were evaluated alone come first; among these, and among the others, the order is by
    # score. The last key of `lexsort` is the one that it sorts by first.
    unit_TU = np.lexsort((-score_TU, ~is_single_TU), axis=1)
    return choice_of(unit_TU[:, : question.k], score_TU)
