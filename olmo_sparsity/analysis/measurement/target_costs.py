"""Count what the evaluation of targets costs, in token-forwards, without computing anything.

The real selectors run with a scorer that counts, so that any selector is counted. A few sets of
targets in a few documents are counted, and the rest is extrapolated from them (`TargetCosts`).

Dimension key: N counted sets of targets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, PLACEBO
from olmo_sparsity.analysis.scoring.cost import counting
from olmo_sparsity.base.streams import stream
from olmo_sparsity.models.use import in_use

TRIED_DOCUMENTS = 3
"""Documents in which the cost of targets is counted."""

TRIED_TARGETS = 6
"""The most targets of each of these."""


class _Amounts(NamedTuple):
    """Three amounts that the token-forwards of a document are proportional to, in the order of
    their rates in `TargetCosts`."""

    num_tokens: float
    document_size: float
    """The size of the document targets (see `_size`)."""

    placebo_size: float


@dataclass(frozen=True)
class TargetCosts:
    """The cost of evaluating the targets of a document, in token-forwards: one rate for each token
    of the document, whose states are computed, and one for each target (see `_size`)."""

    per_token: float
    per_document_target: float
    """For each target in the document's own distant context."""

    per_placebo_target: float

    @staticmethod
    def of(plan: Plan, places: dict[int, np.ndarray]) -> TargetCosts:
        """Count the token-forwards of a few sets of targets, and fit the rates to the counts by
        least squares: forwards ≈ tokens × per_token + size × per_target. `places`: document → the
        places where targets may be."""
        numbers = sorted(places, key=lambda number: len(plan.documents[number].tokens))
        # The shortest document, the longest, and others between.
        spread = np.linspace(0, len(numbers) - 1, TRIED_DOCUMENTS).round().astype(int)
        amounts: list[_Amounts] = []
        num_forwards: list[float] = []
        for number in [numbers[index] for index in np.unique(spread)]:
            drawn = stream(0, "trial", number).permutation(places[number])[:TRIED_TARGETS]
            num_third = -(-len(drawn) // 3)  # rounded up
            # Three parts: own targets, a third of them, and as many targets of the placebo. The
            # first two differ in the number of targets alone, which separates what the tokens of a
            # document cost from what its targets cost.
            parts = [(DOCUMENT, drawn), (DOCUMENT, drawn[:num_third])]
            if plan.fits_threshold:
                parts.append((PLACEBO, drawn))
            num_tokens = len(plan.documents[number].tokens)
            for part, chosen in parts:
                targets = {"document": number, "target": np.sort(chosen), "distant_part": part}
                size = _size(plan, chosen)
                document_size = size if part == DOCUMENT else 0.0
                placebo_size = size if part == PLACEBO else 0.0
                amounts.append(_Amounts(num_tokens, document_size, placebo_size))
                num_forwards.append(spent_forwards(counting_plan(plan), number, targets))

        amount_N3 = np.array(amounts, dtype=float)
        forwards_N = np.array(num_forwards, dtype=float)
        rate_3 = np.linalg.lstsq(amount_N3, forwards_N, rcond=None)[0]
        if rate_3[0] < 0:
            # Targets share so much that fewer of them cost more each.
            rate_2 = np.linalg.lstsq(amount_N3[:, 1:], forwards_N, rcond=None)[0]
            rate_3 = np.concatenate([[0.0], rate_2])
        return TargetCosts(*rate_3.tolist())

    def total(
        self, plan: Plan, expected: dict[int, dict[str, float]], places: dict[int, np.ndarray]
    ) -> float:
        """Return the token-forwards of the targets that are expected: document → kind of distant
        context → number. `places`: document → the places where they may be."""
        total = 0.0
        for number, num_by_part in expected.items():
            num_document = num_by_part.get(DOCUMENT, 0.0)
            num_placebo = num_by_part.get(PLACEBO, 0.0)
            cost_of_texts = self.per_token * len(plan.documents[number].tokens)
            size = _size(plan, places[number]) / len(places[number])
            cost_of_targets = size * (
                num_document * self.per_document_target + num_placebo * self.per_placebo_target
            )
            # The texts of a document are read only if it has a target. Where less than one target
            # is expected, that number is about the chance that there is one.
            chance_of_target = min(num_document + num_placebo, 1.0)
            total += chance_of_target * cost_of_texts + cost_of_targets
        return total


def _size(plan: Plan, targets: np.ndarray) -> float:
    """Return the size of targets in proportion to their cost: their number, or, where a whole
    prompt is computed for each, the tokens before them."""
    replaces = plan.settings.interpretation.replaces
    return float(targets.sum()) if replaces else float(len(targets))


def spent_forwards(plan: Plan, number: int, targets: dict[str, Any]) -> int:
    """Return the token-forwards of targets of one document. They are evaluated, or, if the scorer
    of the plan is one that counts, only counted."""
    forwards_before = plan.scorer.token_forwards
    with in_use(plan.scorer.model):
        plan.recovery(number, pd.DataFrame(targets))
    return plan.scorer.token_forwards - forwards_before


def counting_plan(plan: Plan) -> Plan:
    """Return the plan with a scorer that counts, and computes nothing."""
    return replace(plan, scorer=counting(plan.scorer))
