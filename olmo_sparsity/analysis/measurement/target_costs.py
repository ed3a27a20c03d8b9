"""Count what the evaluation of targets costs, in token-forwards, without computing anything.

The real selectors run with a scorer that counts, so that any selector is counted. A few sets of
targets in a few documents are counted. `TargetCosts.of` fits three rates to these examples, and
`TargetCosts.total` extrapolates to all documents. counted_cost.py calls both.

    tokens   document targets   placebo targets   token-forwards
       600                  6                 0           61,200
       600                  2                 0           21,500
       600                  0                 6           63,000
       …                                                              (two more documents)

    token-forwards ≈ tokens × per_token + document targets × per_document_target
                                        + placebo targets × per_placebo_target

Dimension key: N items of a list (examples), Q values of an item (amounts, a rate for each).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, PLACEBO
from olmo_sparsity.analysis.scoring.cost import counting
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.identity.use import in_use

TRIED_DOCUMENTS = 3
"""Documents in which the cost of targets is counted."""

TRIED_TARGETS = 6
"""The most targets of each of these."""


@dataclass(frozen=True)
class _Example:
    """Targets of one document, and the token-forwards that their evaluation takes."""

    num_tokens: int
    """Tokens of the document."""

    document_size: float
    """The size of the targets, if they are document targets (see `_size_of_targets`); else 0."""

    placebo_size: float
    """The size of the targets, if they are placebo targets; else 0."""

    num_forwards: int


@dataclass(frozen=True)
class TargetCosts:
    """The cost of evaluating the targets of a document, in token-forwards: a rate for each token of
    the document, whose states are computed, and one for each target (see `_size_of_targets`)."""

    per_token: float
    per_document_target: float
    """For each target in the document's own distant context."""

    per_placebo_target: float

    @staticmethod
    def of(plan: Plan, places: dict[int, np.ndarray]) -> TargetCosts:
        """Count the token-forwards of a few sets of targets, and fit the rates to the counts by
        least squares.

        Args:
            places: Document → the places where targets may be.
        """
        examples = list(_count_examples(plan, places))
        forwards_N = np.array([example.num_forwards for example in examples], dtype=float)
        tokens_N = np.array([example.num_tokens for example in examples], dtype=float)
        sizes_N2 = np.array(
            [(example.document_size, example.placebo_size) for example in examples], dtype=float
        )

        # `lstsq` returns the smallest rates that fit. So without placebo targets, whose column is
        # 0, their rate is 0.
        amounts_NQ = np.column_stack([tokens_N, sizes_N2])
        per_token, per_document_target, per_placebo_target = _fit_rates(amounts_NQ, forwards_N)
        if per_token < 0:
            # Targets share so much that fewer of them cost more each.
            per_token = 0.0
            per_document_target, per_placebo_target = _fit_rates(sizes_N2, forwards_N)
        return TargetCosts(per_token, per_document_target, per_placebo_target)

    def total(
        self, plan: Plan, expected: dict[int, dict[str, float]], places: dict[int, np.ndarray]
    ) -> float:
        """Return the token-forwards of all expected targets.

        Args:
            expected: Document → distant part → number of targets.
            places: Document → the places where its targets may be.
        """
        total = 0.0
        for number, num_by_part in expected.items():
            num_document = num_by_part.get(DOCUMENT, 0.0)
            num_placebo = num_by_part.get(PLACEBO, 0.0)
            cost_of_texts = self.per_token * len(plan.documents[number].tokens)
            mean_size = _size_of_targets(plan, places[number]) / len(places[number])
            cost_of_targets = mean_size * (
                num_document * self.per_document_target + num_placebo * self.per_placebo_target
            )
            # The texts of a document are read only if it has a target. Where less than one target
            # is expected, that number is about the chance that there is one.
            chance_of_target = min(num_document + num_placebo, 1.0)
            total += chance_of_target * cost_of_texts + cost_of_targets
        return total


def _fit_rates(amounts_NQ: np.ndarray, forwards_N: np.ndarray) -> list[float]:
    """Return R rates, in token-forwards, that predict the forwards of N examples from their amounts
    with the least squared error."""
    rates: list[float] = np.linalg.lstsq(amounts_NQ, forwards_N, rcond=None)[0].tolist()
    return rates


def _count_examples(plan: Plan, places: dict[int, np.ndarray]) -> Iterator[_Example]:
    """Yield the token-forwards of several sets of targets, of the shortest document, the longest,
    and one between.

    Args:
        places: Document → the places where targets may be.
    """
    numbers = sorted(places, key=lambda number: len(plan.documents[number].tokens))
    spread_indices = np.linspace(0, len(numbers) - 1, TRIED_DOCUMENTS).round().astype(int)
    # With fewer documents than are tried, an index is there twice.
    for number in [numbers[index] for index in np.unique(spread_indices)]:
        # Always the same targets, so that two dry runs count the same.
        drawn = stream(0, "trial", number).permutation(places[number])[:TRIED_TARGETS]
        # All of these targets and a third of them differ in the number of targets alone. That
        # separates what the tokens of a document cost from what its targets cost.
        num_third = math.ceil(len(drawn) / 3)
        yield _count_example(plan, number, drawn, DOCUMENT)
        yield _count_example(plan, number, drawn[:num_third], DOCUMENT)
        if plan.chooses_by_gap:
            yield _count_example(plan, number, drawn, PLACEBO)


def _count_example(plan: Plan, number: int, chosen: np.ndarray, distant_part: str) -> _Example:
    """Count the token-forwards of targets of one document with one distant part."""
    targets = {"document": number, "target": np.sort(chosen), "distant_part": distant_part}
    size = _size_of_targets(plan, chosen)
    return _Example(
        num_tokens=len(plan.documents[number].tokens),
        document_size=size if distant_part == DOCUMENT else 0.0,
        placebo_size=size if distant_part == PLACEBO else 0.0,
        num_forwards=spent_forwards(counting_plan(plan), number, targets),
    )


def _size_of_targets(plan: Plan, targets: np.ndarray) -> float:
    """Return a number in proportion to the cost of targets at these places: how many they are, or,
    where a whole prompt is computed for each, how many tokens precede them."""
    if plan.settings.interpretation.replaces:
        return float(targets.sum())
    return float(len(targets))


def spent_forwards(plan: Plan, number: int, targets: dict[str, Any]) -> int:
    """Evaluate targets of one document, and return the token-forwards that it took. With
    `counting_plan(plan)` nothing is computed.

    Args:
        targets: Columns of a table of targets.
    """
    forwards_before = plan.scorer.token_forwards
    with in_use(plan.scorer.model):
        plan.evaluate_targets(number, pd.DataFrame(targets))
    return plan.scorer.token_forwards - forwards_before


def counting_plan(plan: Plan) -> Plan:
    """Return the plan with a scorer that counts, and computes nothing."""
    return replace(plan, scorer=counting(plan.scorer))
