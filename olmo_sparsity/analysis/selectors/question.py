"""Define what a selector is asked and what it answers, and evaluate sets of distant units for it.

    Question (a context, its distant units, some targets, k) → Selector → Choice (k units a target)

A selector is a function `(scorer, question) → Choice`. measurement/ranking.py calls it for each
block of targets. With 5 distant units, 2 targets and k=2 a choice holds:

    score_TU        0.1  0.0  2.3  0.2  0.0        unit_TK    2  3     influence_TK   2.3  0.2
                    0.5  0.1  0.0  0.0  1.7                   4  0                    1.7  0.5

Most selectors evaluate sets of distant tokens with `loss_reductions`, and choose with `best_of`.

Dimension key: T targets, U distant units, K ranks or numbers of units, W targets of a row or block,
A sets of units, N items of a list (the rows of all targets).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from olmo_sparsity.analysis.scoring.rows import Context
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.text.units import NO_INDICES, Spans, Units


@dataclass(frozen=True)
class Question:
    """The input of a selector: a context, whose distant units are to be ranked for some targets."""

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
    """The scores that the selector gave the chosen units."""

    score_TU: np.ndarray
    """The scores of all units; 0 for units that the selector did not evaluate."""


@dataclass(frozen=True)
class Selector:
    """A rule that ranks units, and what a caller must know about it. To add a rule of your own:

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


def best_of(influence_TU: np.ndarray, k: int) -> Choice:
    """Choose the k units with the largest scores for each target. Of equal scores, the unit that
    comes first in the text is chosen."""
    return choice_of(np.argsort(-influence_TU, axis=1, kind="stable")[:, :k], influence_TU)


def choice_of(unit_TK: np.ndarray, score_TU: np.ndarray) -> Choice:
    """Return the `Choice` of these units, the most influential first, with their scores."""
    return Choice(unit_TK, np.take_along_axis(score_TU, unit_TK, axis=1), score_TU)


def loss_reductions(
    scorer: Scorer, question: Question, sets: Sequence[Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """Return by how many nats the loss of each target falls when each of its sets of distant tokens
    is added to the local window: an array for each target, with a number for each of its sets.

    Args:
        sets: For each target of the question, its sets of distant tokens, as distant indices.
    """
    context = question.context
    # The rows of all targets are evaluated together. The first row of a target is the local window
    # alone, so that its loss is L_short.
    rows = []
    for span, target_sets in zip(question.spans, sets, strict=True):
        rows.append(context.set_row(NO_INDICES, span))
        rows += [context.set_row(distant, span) for distant in target_sets]
    # A target may have several tokens, whose losses are added.
    loss_N = np.array([loss_W.sum() for loss_W in scorer.losses(rows)])

    ends = np.cumsum([1 + len(target_sets) for target_sets in sets])
    reductions = []
    for losses_of_target in np.split(loss_N, ends[:-1]):
        loss_short = losses_of_target[0]
        losses_of_sets = losses_of_target[1:]
        reductions.append(loss_short - losses_of_sets)
    return reductions


def reductions_of_unit_sets(
    scorer: Scorer, question: Question, has_unit_AU: np.ndarray
) -> np.ndarray:
    """Return reduction_TA: by how many nats the loss of each target falls when each set of units is
    added to the local window. `has_unit_AU` says which units each set holds."""
    units = question.units
    sets = []
    for has_unit_U in has_unit_AU:
        unit_indices = np.flatnonzero(has_unit_U).tolist()
        sets.append(units.distant_indices(*unit_indices))
    return np.stack(loss_reductions(scorer, question, [sets] * len(question.spans)))
