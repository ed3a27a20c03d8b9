"""Find units that help only together: choose pairs of distant units.

A target may need two distant tokens that say nothing apart, such as "Anna" and "opened":

    add_one("Anna")             loss falls by 0.1 nats
    add_one("opened")           loss falls by 0.0 nats
    both                        loss falls by 2.4 nats: `pairs` finds them, add_one does not

With U units there are U² / 2 pairs, too many to evaluate. Gradients of gates (gates.py) propose
some: a unit is *opened*, so that the model attends to it, and the gradient then says which other
units would help next to it. `pairs` is the selector, and describes the steps.

Dimension key: T targets, U distant units, F distant tokens, K ranks or numbers of units, N items of
a list (opened units of all targets).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.add_one import add_one
from olmo_sparsity.analysis.selectors.gates import GATE, gate_gradients
from olmo_sparsity.analysis.selectors.question import (
    Choice,
    Question,
    best_of,
    choice_of,
    loss_reductions,
)

NUM_OPENED_FIRST = 9
"""How many units `pairs` opens at first, one by one, at least."""

NUM_OPENED_LATER = 2
"""How many units `pairs` opens afterwards, among those of the best pairs."""

NUM_PARTNERS = 4
"""How many partners `pairs` tries for each opened unit."""

WEIGHT_OF_CLOSED = 16
"""All nearly masked distant tokens together weigh at most as much as this many open ones."""

ReductionOfPair = dict[tuple[int, int], float]
"""Pair of units, the smaller number first → loss reduction when both are added, in nats."""


class _OpenedUnit(NamedTuple):
    """A unit whose gate is opened while those of all others are nearly closed."""

    target: int
    """The index of the target that this is tried for."""

    unit: int


def pairs(scorer: Scorer, question: Question) -> Choice:
    """Choose the pair of units that reduces the loss most when both are added to the local window,
    then the units of the next best pairs.

    This finds tokens that help only together, and tokens that each help no more alone than the best
    of thousands does by chance.

    1. Gates as in add_one_screened rank all units. They are closed further the more distant tokens
       there are, so that all of them together weigh little. The first max(9, k) units are opened.
    2. With one unit opened, the gates of all others are evaluated again. The 4 of largest gradient
       are its partners, and these pairs are evaluated.
    3. The first 2 units of the best pairs that were not opened yet are opened, too: one of two
       units that help together may have come in as a partner of a third.

    A unit's score is half of the loss reduction by the best pair that it is in.
    """
    if len(question.units) == 1:
        return add_one(scorer, question)
    # Nearly closed gates of thousands of tokens would together outweigh one that is open.
    gate = min(GATE, WEIGHT_OF_CLOSED / question.context.block.num_distant)
    reductions = _evaluate_pairs(scorer, question, gate)

    chosen_units = []
    score_TU = np.zeros((len(question.spans), len(question.units)))
    for span, score_U, reduction_of_pair in zip(question.spans, score_TU, reductions, strict=True):
        # From the worst pair to the best, so that a unit keeps the score of its best pair.
        for pair, nats in sorted(reduction_of_pair.items(), key=lambda item: item[1]):
            score_U[list(pair)] = nats / 2
        # The last of k units may be either unit of a pair, so one more is compared.
        candidates = _units_by_best_pair(reduction_of_pair)[: question.k + 1]
        ranked = _rank_by_score(scorer, replace(question, spans=[span]), candidates, score_U)
        chosen_units.append(ranked[: question.k])
    return choice_of(np.array(chosen_units), score_TU)


def _evaluate_pairs(scorer: Scorer, question: Question, gate: float) -> list[ReductionOfPair]:
    """Return the loss reductions by promising pairs, for each target: the three steps that `pairs`
    describes."""
    context = question.context
    reductions: list[ReductionOfPair] = [{} for _ in question.spans]

    # Step 1, and step 2 for the units that are opened first.
    gradient_TU = question.units.sum_by_unit(gate_gradients(scorer, context, question.spans, gate))
    first_TK = best_of(gradient_TU, max(NUM_OPENED_FIRST, question.k)).unit_TK
    opened_first = [
        _OpenedUnit(target, unit)
        for target, first_units in enumerate(first_TK.tolist())
        for unit in first_units
    ]
    _try_partners(scorer, question, opened_first, reductions, gate)

    # Step 3, which repeats step 2 for some units of the best pairs.
    opened_later = []
    for target, reduction_of_pair in enumerate(reductions):
        best_units = [_OpenedUnit(target, unit) for unit in _units_by_best_pair(reduction_of_pair)]
        not_opened = [unit for unit in best_units if unit not in opened_first]
        opened_later += not_opened[:NUM_OPENED_LATER]
    _try_partners(scorer, question, opened_later, reductions, gate)
    return reductions


def _try_partners(
    scorer: Scorer,
    question: Question,
    opened: list[_OpenedUnit],
    reductions: list[ReductionOfPair],
    gate: float,
) -> None:
    """Open units one by one, and evaluate the pair of each with its best partners. Add the new
    pairs of each target to `reductions`."""
    if not opened:
        return
    units = question.units
    spans = [question.spans[target] for target, _ in opened]
    opened_indices = [units.distant_indices(unit) for _, unit in opened]
    gradient_NF = gate_gradients(scorer, question.context, spans, gate, opened_indices)
    gradient_NU = units.sum_by_unit(gradient_NF)
    opened_N = [unit for _, unit in opened]
    gradient_NU[np.arange(len(opened)), opened_N] = -np.inf  # no pair with itself
    num_partners = min(NUM_PARTNERS, len(units) - 1)
    partner_NK = best_of(gradient_NU, num_partners).unit_TK.tolist()

    new_pairs: list[set[tuple[int, int]]] = [set() for _ in question.spans]
    for (target, unit), partners in zip(opened, partner_NK, strict=True):
        # In one order, so that a pair that two of its units propose is evaluated once.
        new_pairs[target].update((min(unit, other), max(unit, other)) for other in partners)
    for span, reduction_of_pair, target_pairs in zip(
        question.spans, reductions, new_pairs, strict=True
    ):
        untried = sorted(target_pairs - reduction_of_pair.keys())
        sets = [units.distant_indices(*pair) for pair in untried]
        # One target, so one array is returned.
        (nats,) = loss_reductions(scorer, replace(question, spans=[span]), [sets])
        reduction_of_pair.update(zip(untried, nats.tolist(), strict=True))


def _units_by_best_pair(reduction_of_pair: ReductionOfPair) -> list[int]:
    """Return the units of all pairs, each once, those of the best pair first."""
    best_first = sorted(reduction_of_pair, key=lambda pair: -reduction_of_pair[pair])
    return list(dict.fromkeys(chain(*best_first)))


def _rank_by_score(
    scorer: Scorer, question: Question, candidates: list[int], score_U: np.ndarray
) -> list[int]:
    """Return units in the order of their scores. Both units of a pair have one score, so the one
    that does more alone ranks first. The question must be about one target."""
    sets = [question.units.distant_indices(unit) for unit in candidates]
    (alone,) = loss_reductions(scorer, question, [sets])
    reduction_alone = dict(zip(candidates, alone.tolist(), strict=True))
    return sorted(candidates, key=lambda unit: (-score_U[unit], -reduction_alone[unit]))
