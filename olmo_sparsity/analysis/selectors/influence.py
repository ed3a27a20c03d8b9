"""Rank distant units by how much they matter to a target: Eq. (20) and alternative selectors.

Every selector has one signature, `(scorer, question) → Choice`, and runs its own forwards, so that
costs can be compared. `SELECTORS` lists them by name. We interpret Eq. (20) as `add_one` over
single tokens: the influence of a distant unit u on a target is the loss reduction when u alone is
added to the local window,

    I(u) = L_short − L({u})

and the k influential units are those of largest I. The others approximate this with fewer forwards
(`add_one_screened`, `add_one_nested`, `halving`), look for units that help only together (`pairs`),
read the inside of the model (`gradient`, `attention`), or are controls (`nearest`, `random`).

Dimension key: T chosen targets, F distant places, U distant units, K ranks, W targets of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

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
    falls = loss_reductions(scorer, question, sets)

    units_of_targets = []
    for firsts, fall in zip(groups, falls, strict=True):
        best_firsts = np.sort(firsts[np.argsort(-fall, kind="stable")[:num_opened]])
        opened_units = (best_firsts[:, None] + np.arange(size)).ravel()
        units_of_targets.append(opened_units[opened_units < len(units)])
    return units_of_targets


GROUP_TOKENS = 64
"""Tokens of the first groups of `halving`; twice as many if there are more than `MANY_TOKENS`
distant tokens."""

MANY_TOKENS = 1024

NUM_HALVED = 4
"""How many of the best groups `halving` halves in a step."""


def first_groups(units: Units, num_distant: int) -> list[tuple[int, int]]:
    """Cut the units into groups of about `GROUP_TOKENS` tokens. Return the first unit of each and
    one past its last."""
    num_tokens = GROUP_TOKENS if num_distant <= MANY_TOKENS else 2 * GROUP_TOKENS
    size = max(1, num_tokens * len(units) // num_distant)
    return [(first, min(first + size, len(units))) for first in range(0, len(units), size)]


def halves_of(groups: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return both halves of each group, in order. A group of one unit has none."""
    halves = []
    for first, end in sorted(groups):
        if end - first > 1:
            middle = (first + end) // 2
            halves += [(first, middle), (middle, end)]
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
        falls = loss_reductions(scorer, question, sets)
        halves = []
        for target, (target_groups, fall) in enumerate(zip(groups, falls, strict=True)):
            for (first, end), nats in zip(target_groups, fall.tolist(), strict=True):
                score_TU[target, first:end] = nats / (end - first)
                is_single_TU[target, first:end] = end - first == 1
            order = np.argsort(-fall, kind="stable")
            halves.append(halves_of([target_groups[index] for index in order[:NUM_HALVED]]))
        groups = halves
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
    falls: list[dict[tuple[int, int], float]] = [{} for _ in spans]
    first = best_of(gate_TU, max(NUM_FIRST, question.k)).unit_TK.tolist()
    _try_partners(scorer, question, first, falls, gate)
    again = []
    for fall, opened in zip(falls, first, strict=True):
        not_opened = [unit for unit in _units_by_best_pair(fall) if unit not in opened]
        again.append(not_opened[:NUM_AGAIN])
    _try_partners(scorer, question, again, falls, gate)

    chosen = []
    score_TU = np.zeros((len(spans), len(units)))
    for span, score_U, fall in zip(spans, score_TU, falls, strict=True):
        # The best pair is written last, so that a unit keeps the score of its best pair.
        for pair, nats in sorted(fall.items(), key=lambda item: item[1]):
            score_U[list(pair)] = nats / 2
        # Both units of a pair have one score, so the one that does more alone ranks first.
        tried = _units_by_best_pair(fall)[: question.k + 1]
        question_of_target = replace(question, spans=[span])
        sets = [units.places(unit) for unit in tried]
        (alone,) = loss_reductions(scorer, question_of_target, [sets])
        fall_alone = dict(zip(tried, alone.tolist(), strict=True))
        ranked = sorted(tried, key=lambda unit: (-score_U[unit], -fall_alone[unit]))
        chosen.append(ranked[: question.k])
    return scored(np.array(chosen), score_TU)


def _units_by_best_pair(falls: dict[tuple[int, int], float]) -> list[int]:
    """Return the units of all pairs, each once, those of the best pair first. `falls`: pair → loss
    reduction."""
    pairs_by_fall = sorted(falls, key=lambda pair: -falls[pair])
    return list(dict.fromkeys(chain(*pairs_by_fall)))


def _try_partners(
    scorer: Scorer,
    question: Question,
    opened: list[list[int]],
    falls: list[dict[tuple[int, int], float]],
    gate: float,
) -> None:
    """Open units one by one, and evaluate the pair of each with its best partners. `opened`: units
    for each target. `falls`: pair → loss reduction for each target, to which the new pairs are
    added."""
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
    for span, fall, target_units in zip(question.spans, falls, opened, strict=True):
        new_pairs = set()
        for unit in target_units:
            for partner in next(partners_of_rows):
                new_pairs.add((min(unit, partner), max(unit, partner)))
        untried = sorted(new_pairs - fall.keys())
        question_of_target = replace(question, spans=[span])
        sets = [units.places(*pair) for pair in untried]
        (nats,) = loss_reductions(scorer, question_of_target, [sets])
        fall.update(zip(untried, nats.tolist(), strict=True))


def _add_one_of_candidates(
    scorer: Scorer, question: Question, candidates: Sequence[np.ndarray]
) -> Choice:
    """Run add_one on the candidates of each target, of which there must be at least k."""
    sets = [[question.units.places(unit) for unit in units.tolist()] for units in candidates]
    chosen = []
    score_TU = np.zeros((len(candidates), len(question.units)))
    falls = loss_reductions(scorer, question, sets)
    for score_U, units, fall in zip(score_TU, candidates, falls, strict=True):
        chosen.append(units[np.argsort(-fall, kind="stable")[: question.k]])
        score_U[units] = fall
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
    losses = np.array([loss_W.sum() for loss_W in scorer.losses(rows)])
    parts = np.split(losses, np.cumsum([1 + len(target_sets) for target_sets in sets])[:-1])
    return [part[0] - part[1:] for part in parts]


def falls_of_sets(scorer: Scorer, question: Question, kept_AU: np.ndarray) -> np.ndarray:
    """Return fall_TA: by how many nats the loss of each target falls when each set of units is
    added. `kept_AU`: whether a set holds a unit."""
    units = question.units
    sets = [units.places(*np.flatnonzero(kept_U).tolist()) for kept_U in kept_AU]
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
