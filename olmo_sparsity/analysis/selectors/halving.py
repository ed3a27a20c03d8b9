"""Find influential units by losses alone: evaluate groups of units, and halve the best of them.

With 8 units and groups of 4 the steps may look like this (two best groups are halved, here):

    [0 1 2 3] [4 5 6 7]     both are evaluated
    [0 1] [2 3] [4 5] [6 7]
    [2] [3] [4] [5]         the halves of the best two groups, which are single units now

`halving` is the selector. It needs no states of the model, so it works where unrelated text
replaces distant text. The check of reliability (measurement/agreement.py) uses the same groups.

Dimension key: T targets, U distant units.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.question import Choice, Question, loss_reductions, scored
from olmo_sparsity.text.units import Units

GROUP_TOKENS = 64
"""Tokens of the first groups of `halving`. With more than `MANY_TOKENS` distant tokens, groups are
twice as large."""

MANY_TOKENS = 1024

NUM_HALVED = 4
"""How many of the best groups `halving` halves in a step."""


class UnitGroup(NamedTuple):
    """Neighbouring units, which are evaluated as one."""

    first: int
    """The number of its first unit."""

    end: int
    """One past the number of its last unit."""

    @property
    def num_units(self) -> int:
        """Return how many units the group has."""
        return self.end - self.first


def first_groups(units: Units, num_distant: int) -> list[UnitGroup]:
    """Cut the units into groups of about as many tokens as `GROUP_TOKENS` says. `num_distant`:
    tokens of all units together."""
    num_tokens = GROUP_TOKENS if num_distant <= MANY_TOKENS else 2 * GROUP_TOKENS
    # As many units as hold so many tokens on average.
    size = max(1, num_tokens * len(units) // num_distant)
    firsts = range(0, len(units), size)
    return [UnitGroup(first, min(first + size, len(units))) for first in firsts]


def halves_of(groups: list[UnitGroup]) -> list[UnitGroup]:
    """Return both halves of each group, in order. A group of one unit has none."""
    halves = []
    for group in sorted(groups):
        if group.num_units > 1:
            middle = (group.first + group.end) // 2
            halves += [UnitGroup(group.first, middle), UnitGroup(middle, group.end)]
    return halves


def halving(scorer: Scorer, question: Question) -> Choice:
    """Run add_one from coarse to fine by losses alone: on groups of 64 or 128 tokens, then on both
    halves of the best 4 groups, and so on to single units.

    A unit that was not evaluated alone ranks behind those that were. Its score is its share of the
    loss reduction by the smallest group around it.
    """
    units = question.units
    num_targets = len(question.spans)
    first = first_groups(units, question.context.block.num_distant)
    # For each target: the groups to evaluate in this step.
    groups = [first for _ in range(num_targets)]
    score_TU = np.zeros((num_targets, len(units)))
    is_single_TU = np.zeros(score_TU.shape, dtype=bool)
    # Targets that have no group left have an empty list, and cost one row a step.
    while any(groups):
        sets = [[units.run(*group) for group in target_groups] for target_groups in groups]
        reductions = loss_reductions(scorer, question, sets)
        next_groups = []
        for target, (target_groups, reduction) in enumerate(zip(groups, reductions, strict=True)):
            # The scores of a group overwrite those of the larger group that it is in.
            for group, nats in zip(target_groups, reduction.tolist(), strict=True):
                members = slice(group.first, group.end)
                score_TU[target, members] = nats / group.num_units
                is_single_TU[target, members] = group.num_units == 1
            best = np.argsort(-reduction, kind="stable")[:NUM_HALVED]
            next_groups.append(halves_of([target_groups[index] for index in best]))
        groups = next_groups

    # Units that were evaluated alone come first, then by score. `lexsort` sorts by its last key.
    unit_TU = np.lexsort((-score_TU, ~is_single_TU), axis=1)
    return scored(unit_TU[:, : question.k], score_TU)
