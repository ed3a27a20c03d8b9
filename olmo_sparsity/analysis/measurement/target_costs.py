"""Count what the evaluation of targets costs, in token-forwards, without computing anything.

    ExpectedTargets → a few sets of targets, counted → `TargetCosts.of` → three rates
                                                     → `TargetCosts.total` → all expected targets

The real selectors run with a scorer that counts, so that any selector is counted. `TargetCosts.of`
counts a few sets of targets in a few documents, and fits three rates to these examples:

    tokens   document targets   placebo targets   token-forwards
       600                  6                 0           61,200
       600                  2                 0           21,500
       600                  0                 6           63,000
       …                                                              (two more documents)

    token-forwards ≈ tokens × per_token + document targets × per_document_target
                                        + placebo targets × per_placebo_target

Where distant text is replaced, a whole prompt is computed for each target, so a target costs in
proportion to the tokens before it. Targets are then counted by these tokens (`_amount_of_targets`).
counted_cost.py calls both methods.

Dimension key: N items of a list (examples), Q values of an item (amounts, a rate for each).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.expected_targets import ExpectedTargets
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, PLACEBO
from olmo_sparsity.analysis.scoring.cost import counting_scorer
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

    document_targets: float
    """The amount of document targets (`_amount_of_targets`)."""

    placebo_targets: float
    """The amount of placebo targets."""

    token_forwards: int


@dataclass(frozen=True)
class TargetCosts:
    """The rates at which the targets of a document cost token-forwards."""

    per_token: float
    """For each token of a document that has targets, as its states are computed."""

    per_document_target: float
    """For each target in the document's own distant context."""

    per_placebo_target: float

    @staticmethod
    def of(plan: Plan, targets: ExpectedTargets) -> TargetCosts:
        """Count the token-forwards of a few sets of targets, and fit the rates to the counts by
        least squares."""
        examples = list(_count_examples(plan, targets.places))
        forwards_N = np.array([example.token_forwards for example in examples], dtype=float)
        tokens_N = np.array([example.num_tokens for example in examples], dtype=float)
        targets_N2 = np.array(
            [(example.document_targets, example.placebo_targets) for example in examples],
            dtype=float,
        )

        # `lstsq` returns the smallest rates that fit. So without placebo targets, whose column is
        # 0, their rate is 0.
        amounts_NQ = np.column_stack([tokens_N, targets_N2])
        per_token, per_document_target, per_placebo_target = _fit_rates(amounts_NQ, forwards_N)
        if per_token < 0:
            # Targets share so much that each costs more if there are fewer. The fit has then put
            # into the rate of a target what belongs to the tokens, and more.
            per_token = 0.0
            per_document_target, per_placebo_target = _fit_rates(targets_N2, forwards_N)
        return TargetCosts(per_token, per_document_target, per_placebo_target)

    def total(self, plan: Plan, targets: ExpectedTargets) -> float:
        """Return the token-forwards of all expected targets."""
        total = 0.0
        for number, num_by_part in targets.num_by_document.items():
            num_document = num_by_part.get(DOCUMENT, 0.0)
            num_placebo = num_by_part.get(PLACEBO, 0.0)
            cost_of_texts = self.per_token * len(plan.documents[number].tokens)
            places = targets.places[number]
            amount_of_one = _amount_of_targets(plan, places) / len(places)
            cost_of_targets = amount_of_one * (
                num_document * self.per_document_target + num_placebo * self.per_placebo_target
            )
            # The texts of a document are read only if it has a target. Where less than one target
            # is expected, that number is about the chance that there is one.
            chance_of_target = min(num_document + num_placebo, 1.0)
            total += chance_of_target * cost_of_texts + cost_of_targets
        return total


def _fit_rates(amounts_NQ: np.ndarray, forwards_N: np.ndarray) -> list[float]:
    """Return a rate for each amount, such that the amounts of an example times the rates are its
    token-forwards, with the least squared error over all examples."""
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
    amount = _amount_of_targets(plan, chosen)
    return _Example(
        num_tokens=len(plan.documents[number].tokens),
        document_targets=amount if distant_part == DOCUMENT else 0.0,
        placebo_targets=amount if distant_part == PLACEBO else 0.0,
        token_forwards=spent_forwards(counting_plan(plan), number, targets),
    )


def _amount_of_targets(plan: Plan, places: np.ndarray) -> float:
    """Return a number in proportion to the cost of targets at these places: how many they are, or,
    where a whole prompt is computed for each, how many tokens precede them."""
    if plan.settings.interpretation.replaces:
        return float(places.sum())
    return float(len(places))


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
    return replace(plan, scorer=counting_scorer(plan.scorer))
