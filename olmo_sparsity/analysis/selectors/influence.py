"""Rank distant units by how much they matter to a target: Eq. (20) and alternative selectors.

Every selector has one signature, `(scorer, question) → Choice`, and runs its own forwards, so that
costs can be compared. `SELECTORS` lists them by name. We interpret Eq. (20) as `add_one` over
single tokens: the influence of a distant unit u on a target is the loss reduction when u alone is
added to the local window,

    I(u) = L_short − L({u})

and the k influential units are those of largest I. The others approximate this with fewer forwards
(`add_one_screened`, `add_one_nested`, `halving`), look for units that help only together (`pairs`),
read the inside of the model (`gradient`, `attention`), or are controls (`nearest`, `random`).

Dimension key: T chosen targets, F distant places, U distant units, K ranks, W targets of a block, A
sets of units, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from olmo_sparsity.analysis.interpretation import Interpretation
from olmo_sparsity.analysis.scoring.rows import Context
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.saliency import (
    GATE,
    embedding_saliency,
    gate_gradients,
    head_attention,
    loss,
)
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.extend import find_added
from olmo_sparsity.models.use import with_model_in_use
from olmo_sparsity.text.units import NOTHING, Spans, Units


@dataclass(frozen=True)
class Question:
    """What a selector is asked: to rank the distant units of a context for several targets."""

    context: Context
    units: Units
    """The candidates, as runs of the context's distant tokens."""

    spans: Spans
    """The targets, as indices into the block: from the first token to one past the last."""

    k: int
    """How many units to choose for each target."""

    generator: np.random.Generator
    """The source of random numbers, for random selectors."""

    def total(self, score_UW: np.ndarray) -> np.ndarray:
        """Return score_TU: scores of single tokens, summed over the tokens of each target."""
        return np.stack([score_UW[:, first:end].sum(1) for first, end in self.spans])


@dataclass(frozen=True)
class Choice:
    """The units that a selector chose for each target."""

    unit_TK: np.ndarray
    """The chosen units, the most influential first."""

    influence_TK: np.ndarray
    """The scores of the chosen units by the selector."""

    score_TU: np.ndarray
    """The scores of all units; 0 for units that the selector did not evaluate."""


@dataclass(frozen=True)
class Selector:
    """A rule that ranks units, and what a caller must know about it.

    def longest(scorer: Scorer, question: Question) -> Choice:
        sizes_U = (question.units.end - question.units.first).astype(float)
        return best_of(np.tile(sizes_U, (len(question.spans), 1)), question.k)

    SELECTORS["longest"] = Selector(longest)
    """

    call: Callable[[Scorer, Question], Choice]
    evaluates_every_unit: bool = False
    """Whether it evaluates each unit alone, so that all its scores are differences of losses."""

    draws: int = 1
    """How often a random rule is drawn."""

    reads_states: bool = False
    """Whether it needs more of the model than losses."""

    def __call__(self, scorer: Scorer, question: Question) -> Choice:
        return self.call(scorer, question)


def find_selector(name: str, interpretation: Interpretation | None = None) -> Selector:
    """Return a selector by its name; ConfigError if there is none. `interpretation`: of the distant
    states; a selector that needs states is rejected where distant text is replaced."""
    replaces = interpretation is not None and interpretation.replaces
    if replaces and find_selector(name).reads_states:
        allowed = [other for other, rule in SELECTORS.items() if not rule.reads_states]
        raise ConfigError(
            f"selectors: '{name}' needs states, which distant_states=replaced does not have; pass "
            f"{', '.join(allowed)}"
        )
    if name in SELECTORS:
        return SELECTORS[name]
    added = find_added(name, "olmo_sparsity.selectors", "selectors")
    if added is None:
        raise ConfigError(
            f"selectors: '{name}' is not a selector; pass one of {', '.join(SELECTORS)}, or "
            "your_file.py:your_rule"
        )
    if not callable(added):
        raise ConfigError(
            f"selectors: '{name}' is not a function but {type(added).__name__}; pass one "
            "(scorer, question) → Choice"
        )
    return added if isinstance(added, Selector) else Selector(added)


@with_model_in_use
def influence_map(scorer: Scorer, context: Context, units: Units) -> np.ndarray:
    """Return I_UW in nats: the influence L_short − L({u}) of every distant unit u on every target
    of the block."""
    # One row of a distant unit, the local window and the block serves all W targets.
    rows = [context.set_row(units.places(unit)) for unit in range(len(units))]
    (short_W,) = scorer.losses([context.set_row(NOTHING)])
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
    return _add_one_of_candidates(scorer, question, list(_screened_units(scorer, question)))


def _screened_units(scorer: Scorer, question: Question) -> np.ndarray:
    """Return the units that a gradient ranks highest for each target."""
    gate_TU = question.units.total(gate_gradients(scorer, question.context, question.spans))
    return best_of(gate_TU, min(len(question.units), max(16, 2 * question.k))).unit_TK


GROUP_SIZES = (256, 32, 4)
"""How many neighbouring units `add_one_nested` evaluates as one, from step to step."""

NUM_OPENED = 20
"""How many of the best groups `add_one_nested` opens in a step, at least."""


def add_one_nested(scorer: Scorer, question: Question) -> Choice:
    """Run add_one from coarse to fine: on all groups of 256 units, then on the groups of 32 inside
    the best of those, then of 4, then on single units; and on those that `add_one_screened`
    evaluates. For a long distant context, these are far fewer rows.

    A unit is missed if it helps less than the rest of its group harms, and its gradient is small.
    """
    units = question.units
    num_opened = max(NUM_OPENED, 2 * question.k)
    candidates = [np.arange(len(units))] * len(question.spans)  # of each target
    for size in GROUP_SIZES:
        if size * num_opened >= len(units):
            continue  # no group would be dropped
        candidates = _units_of_best_groups(scorer, question, candidates, size, num_opened)
    if len(candidates[0]) < len(units):
        # A gradient may find a unit whose effect is hidden by the rest of its group.
        screened = _screened_units(scorer, question)
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
    num_opened: int,
) -> list[np.ndarray]:
    """Return the units of each target's best groups. Groups are runs of `size` units that hold a
    candidate; the `num_opened` whose addition lowers the loss most are the best."""
    units = question.units
    # The first units of the groups of each target, and the distant places of each group.
    groups = [np.unique(target_units // size) * size for target_units in candidates]
    sets = []
    for firsts in groups:
        ends = np.minimum(firsts + size, len(units))
        bounds = zip(firsts.tolist(), ends.tolist(), strict=True)
        sets.append([units.run(first, end) for first, end in bounds])
    reductions = loss_reductions(scorer, question, sets)

    units_of_targets = []
    for firsts, reduction in zip(groups, reductions, strict=True):
        best_firsts = np.sort(firsts[np.argsort(-reduction, kind="stable")[:num_opened]])
        opened_units = (best_firsts[:, None] + np.arange(size)).ravel()
        units_of_targets.append(opened_units[opened_units < len(units)])
    return units_of_targets


GROUP_TOKENS = 64
"""Tokens of the first groups of `halving`; twice as many if there are more than `MANY_TOKENS`
distant tokens."""

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
        return self.end - self.first


def first_groups(units: Units, num_distant: int) -> list[UnitGroup]:
    """Cut the units into groups of about `GROUP_TOKENS` tokens."""
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
    all_groups = first_groups(units, question.context.block.num_distant)
    groups = [all_groups for _ in range(num_targets)]  # of each target
    score_TU = np.zeros((num_targets, len(units)))
    is_single_TU = np.zeros(score_TU.shape, dtype=bool)
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
    # Units that were evaluated alone come first, then by score.
    unit_TU = np.lexsort((-score_TU, ~is_single_TU), axis=1)
    return scored(unit_TU[:, : question.k], score_TU)


NUM_FIRST = 9
"""How many units `pairs` opens at first, one by one, at least."""

NUM_AGAIN = 2
"""How many units `pairs` opens afterwards, among those of the best pairs."""

NUM_PARTNERS = 4
"""How many partners `pairs` tries for each opened unit."""

WEIGHT_OF_CLOSED = 16
"""All nearly masked distant tokens together weigh as much as so many open ones, at most."""

ReductionOfPair = dict[tuple[int, int], float]
"""Pair of units, the smaller number first → loss reduction when both are added, in nats."""


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
    units = question.units
    spans = question.spans
    if len(units) == 1:
        return add_one(scorer, question)
    gate = min(GATE, WEIGHT_OF_CLOSED / question.context.block.num_distant)
    gate_TU = units.total(gate_gradients(scorer, question.context, spans, gate))
    reductions: list[ReductionOfPair] = [{} for _ in spans]  # of each target

    opened = best_of(gate_TU, max(NUM_FIRST, question.k)).unit_TK.tolist()
    _try_partners(scorer, question, opened, reductions, gate)
    opened_again = []
    for reduction_of_pair, opened_units in zip(reductions, opened, strict=True):
        best_units = _units_by_best_pair(reduction_of_pair)
        not_opened = [unit for unit in best_units if unit not in opened_units]
        opened_again.append(not_opened[:NUM_AGAIN])
    _try_partners(scorer, question, opened_again, reductions, gate)

    chosen = []
    score_TU = np.zeros((len(spans), len(units)))
    for span, score_U, reduction_of_pair in zip(spans, score_TU, reductions, strict=True):
        # The best pair is written last, so that a unit keeps the score of its best pair.
        for pair, nats in sorted(reduction_of_pair.items(), key=lambda item: item[1]):
            score_U[list(pair)] = nats / 2
        candidates = _units_by_best_pair(reduction_of_pair)[: question.k + 1]
        ranked = _rank_by_score(scorer, replace(question, spans=[span]), candidates, score_U)
        chosen.append(ranked[: question.k])
    return scored(np.array(chosen), score_TU)


def _units_by_best_pair(reduction_of_pair: ReductionOfPair) -> list[int]:
    """Return the units of all pairs, each once, those of the best pair first."""
    best_first = sorted(reduction_of_pair, key=lambda pair: -reduction_of_pair[pair])
    return list(dict.fromkeys(chain(*best_first)))


def _rank_by_score(
    scorer: Scorer, question: Question, candidates: list[int], score_U: np.ndarray
) -> list[int]:
    """Rank units by their scores. Both units of a pair have one score, so the one that does more
    alone ranks first. `question`: of one target."""
    sets = [question.units.places(unit) for unit in candidates]
    (alone,) = loss_reductions(scorer, question, [sets])
    reduction_alone = dict(zip(candidates, alone.tolist(), strict=True))
    return sorted(candidates, key=lambda unit: (-score_U[unit], -reduction_alone[unit]))


def _try_partners(
    scorer: Scorer,
    question: Question,
    opened: list[list[int]],
    reductions: list[ReductionOfPair],
    gate: float,
) -> None:
    """Open units one by one, and evaluate the pair of each with its best partners. Add the new
    pairs of each target to `reductions`. `opened`: units for each target."""
    units = question.units
    # One row of gates for each opened unit of each target.
    row_units: list[int] = []
    row_spans: Spans = []
    for span, target_units in zip(question.spans, opened, strict=True):
        row_units += target_units
        row_spans += [span] * len(target_units)
    if not row_units:
        return
    places = [units.places(unit) for unit in row_units]
    gate_NU = units.total(gate_gradients(scorer, question.context, row_spans, gate, places))
    gate_NU[np.arange(len(row_units)), row_units] = -np.inf  # no pair with itself
    num_partners = min(NUM_PARTNERS, len(units) - 1)
    partners_of_rows = iter(best_of(gate_NU, num_partners).unit_TK.tolist())
    for span, reduction_of_pair, target_units in zip(
        question.spans, reductions, opened, strict=True
    ):
        new_pairs = set()
        for unit in target_units:
            for partner in next(partners_of_rows):
                new_pairs.add((min(unit, partner), max(unit, partner)))
        untried = sorted(new_pairs - reduction_of_pair.keys())
        question_of_target = replace(question, spans=[span])
        sets = [units.places(*pair) for pair in untried]
        (nats,) = loss_reductions(scorer, question_of_target, [sets])
        reduction_of_pair.update(zip(untried, nats.tolist(), strict=True))


def _add_one_of_candidates(
    scorer: Scorer, question: Question, candidates: Sequence[np.ndarray]
) -> Choice:
    """Run add_one on the candidates of each target, of which there must be at least k."""
    sets = [[question.units.places(unit) for unit in units.tolist()] for units in candidates]
    chosen = []
    score_TU = np.zeros((len(candidates), len(question.units)))
    reductions = loss_reductions(scorer, question, sets)
    for score_U, units, reduction in zip(score_TU, candidates, reductions, strict=True):
        chosen.append(units[np.argsort(-reduction, kind="stable")[: question.k]])
        score_U[units] = reduction
    return scored(np.array(chosen), score_TU)


def loss_reductions(
    scorer: Scorer, question: Question, sets: Sequence[Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """Return by how many nats the loss of each target falls when each of its sets of distant places
    is added to the local window. `sets`: a list of sets for each target."""
    context = question.context
    rows = []
    for span, target_sets in zip(question.spans, sets, strict=True):
        # The first row of a target is the local window alone.
        rows += [context.set_row(distant, span) for distant in (NOTHING, *target_sets)]
    loss_N = np.array([loss_W.sum() for loss_W in scorer.losses(rows)])
    ends = np.cumsum([1 + len(target_sets) for target_sets in sets])
    losses_of_targets = np.split(loss_N, ends[:-1])
    reductions = []
    for losses in losses_of_targets:
        loss_short = losses[0]
        reductions.append(loss_short - losses[1:])
    return reductions


def reductions_of_unit_sets(
    scorer: Scorer, question: Question, has_unit_AU: np.ndarray
) -> np.ndarray:
    """Return reduction_TA: by how many nats the loss of each target falls when each set of units is
    added. `has_unit_AU`: whether a set holds a unit."""
    units = question.units
    sets = [units.places(*np.flatnonzero(has_unit_U).tolist()) for has_unit_U in has_unit_AU]
    return np.stack(loss_reductions(scorer, question, [sets] * len(question.spans)))


def gradient(scorer: Scorer, question: Question) -> Choice:
    """Choose by gradient × input on the long window: to first order, the rise of the loss without
    the embeddings of a unit."""
    saliency_TF = embedding_saliency(scorer, question.context, question.spans, loss)
    return best_of(question.units.total(saliency_TF), question.k)


def attention(scorer: Scorer, question: Question) -> Choice:
    """Choose by the mean attention, over all heads of all layers, from the places that predict the
    target."""
    weights_TF = head_attention(scorer, question.context, question.spans).mean(1)
    return best_of(question.units.total(weights_TF), question.k)


def nearest(scorer: Scorer, question: Question) -> Choice:
    """Choose the distant units next to the local window, as a control."""
    scores_U = question.units.end.astype(float)
    return best_of(np.tile(scores_U, (len(question.spans), 1)), question.k)


def random(scorer: Scorer, question: Question) -> Choice:
    """Choose random distant units, as a control."""
    # Numbers are drawn for all targets of the block, also those that are not asked for, so that the
    # draw of one does not depend on which others are.
    shape = (question.context.block.num_targets, len(question.units))
    firsts = [first for first, _ in question.spans]
    return best_of(question.generator.random(shape)[firsts], question.k)


SELECTORS: dict[str, Selector] = {
    "add_one": Selector(add_one, evaluates_every_unit=True),
    "add_one_screened": Selector(add_one_screened, reads_states=True),
    "add_one_nested": Selector(add_one_nested, reads_states=True),
    "pairs": Selector(pairs, reads_states=True),
    "halving": Selector(halving),
    "gradient": Selector(gradient, reads_states=True),
    "attention": Selector(attention, reads_states=True),
    "nearest": Selector(nearest),
    "random": Selector(random, draws=3),
}


def best_of(influence_TU: np.ndarray, k: int) -> Choice:
    """Choose the k units with the largest scores for each target. Ties are in order of place."""
    return scored(np.argsort(-influence_TU, axis=1, kind="stable")[:, :k], influence_TU)


def scored(unit_TK: np.ndarray, score_TU: np.ndarray) -> Choice:
    """Return a `Choice` of these units, with their scores."""
    return Choice(unit_TK, np.take_along_axis(score_TU, unit_TK, axis=1), score_TU)
