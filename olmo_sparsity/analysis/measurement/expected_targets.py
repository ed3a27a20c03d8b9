"""Predict how many targets a measurement will evaluate, and where they may be.

    Plan, losses of a few blocks → `expect_targets` → ExpectedTargets

Some targets are fixed before the measurement and can be counted. Others are chosen by their gaps,
of which a dry run knows only those of a few blocks. If 3 of 100 tokens there become targets of the
set `gap`, a document with 1,000 tokens is expected to have 30 of them, or `max_targets` if that is
less. Without any losses, as many targets are assumed as `share` and `max_targets` allow.

Dimension key: T targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.targets import places_of
from olmo_sparsity.analysis.results.target_rows import (
    DISTANT_PARTS,
    DOCUMENT,
    KEYS,
    PLACEBO,
    half_of,
)

PLACEBO_RATE = 0.5
"""Assumed number of placebo targets for each document target, where no losses are known."""

NumByPart = dict[str, float]
"""Distant part (`document` or `placebo`) → the number of targets evaluated with it."""


@dataclass(frozen=True)
class ExpectedTargets:
    """The targets of some documents that a measurement is expected to evaluate."""

    num_by_document: dict[int, NumByPart]
    """The expected number of targets of each document."""

    places: dict[int, np.ndarray]
    """The places of each document where its targets may be."""

    num_chosen_in_trial: int = 0
    """The number of targets in the blocks whose losses are known, from which the others are
    extrapolated."""

    @property
    def num_evaluated(self) -> float:
        """Return the number of all targets."""
        return sum(sum(num_by_part.values()) for num_by_part in self.num_by_document.values())

    @property
    def num_document_targets(self) -> float:
        """Return the number of targets in the documents' own distant context."""
        return sum(num_by_part[DOCUMENT] for num_by_part in self.num_by_document.values())


def expect_targets(
    plan: Plan, numbers: Sequence[int], losses: pd.DataFrame | None
) -> ExpectedTargets:
    """Predict the targets of documents.

    Args:
        numbers: The numbers of the documents.
        losses: The losses of a few blocks of the plan; None if none were computed.
    """
    if not plan.chooses_by_gap:
        return _fixed_targets(plan, numbers)

    # Targets are evaluated in the report half only.
    blocks_of_reported = {
        number: plan.blocks_with_losses(plan.documents[number])
        for number in numbers
        if half_of(number) == "report"
    }
    # Any token with a loss may become a target.
    num_candidates = {
        number: sum(block.num_targets for block in blocks)
        for number, blocks in blocks_of_reported.items()
    }
    num_chosen_in_trial = 0
    if losses is None:
        num_by_document = _as_many_as_allowed(plan, num_candidates)
    else:
        chosen = _choose_in_tried_blocks(plan, losses)
        num_chosen_in_trial = len(chosen.drop_duplicates([*KEYS, "distant_part"]))
        num_by_document = _extrapolate(plan, losses, chosen, num_candidates)
    places = {number: places_of(blocks_of_reported[number]) for number in num_by_document}
    return ExpectedTargets(num_by_document, places, num_chosen_in_trial)


def _fixed_targets(plan: Plan, numbers: Sequence[int]) -> ExpectedTargets:
    """Return the targets of a plan that are fixed before any loss is computed."""
    no_losses = pd.DataFrame()  # fixed targets need none
    targets = plan.select_targets(no_losses).drop_duplicates([*KEYS, "distant_part"])
    target_by_document = targets[targets.document.isin(numbers)].groupby("document").target
    places = {int(number): places_T.to_numpy() for number, places_T in target_by_document}
    num_by_document = {
        number: {DOCUMENT: float(len(places_T))} for number, places_T in places.items()
    }
    return ExpectedTargets(num_by_document, places)


def _as_many_as_allowed(plan: Plan, num_candidates: dict[int, int]) -> dict[int, NumByPart]:
    """Return as many targets as `share` and `max_targets` allow. Documents without candidates are
    left out.

    Args:
        num_candidates: Document → the number of its tokens that may become targets.
    """
    settings = plan.settings
    num_by_document = {}
    for number, num_candidates_of_document in num_candidates.items():
        num_of_set = min(settings.share * num_candidates_of_document, settings.max_targets_of_set)
        num_targets = len(settings.sets) * num_of_set
        if num_targets:
            num_by_document[number] = {
                DOCUMENT: num_targets,
                PLACEBO: PLACEBO_RATE * num_targets,
            }
    return num_by_document


def _choose_in_tried_blocks(plan: Plan, losses: pd.DataFrame) -> pd.DataFrame:
    """Return the targets of all sets among the tried tokens, without the limit of a document."""
    # A trial computes the first blocks of a document, whatever the sample is.
    settings = replace(plan.settings, sample=1.0, max_targets="all")
    return replace(plan, settings=settings).select_targets(losses)


def _extrapolate(
    plan: Plan, losses: pd.DataFrame, chosen: pd.DataFrame, num_candidates: dict[int, int]
) -> dict[int, NumByPart]:
    """Return the expected targets of each document, with each target set assumed to be as dense in
    all documents as among the tried tokens.

    Args:
        losses: The losses of the tried tokens.
        chosen: The targets among them.
        num_candidates: Document → the number of its tokens that may become targets.
    """
    # A target that is in several sets is evaluated once.
    fraction_distinct = chosen.groupby("distant_part").apply(
        lambda rows: len(rows.drop_duplicates(KEYS)) / len(rows)
    )
    is_reported = losses.document.map(half_of) == "report"
    num_tried = max(int(is_reported.sum()), 1)
    # (distant part, target set) → the fraction of tokens that become such targets.
    density = chosen.groupby(["distant_part", "target_set"]).size() / num_tried
    max_targets = plan.settings.max_targets_of_set

    def num_expected(distant_part: str, num_candidates_of_document: int) -> float:
        # No tried token was chosen with this distant part.
        if distant_part not in fraction_distinct.index:
            return 0.0
        num_by_set = (density[distant_part] * num_candidates_of_document).clip(upper=max_targets)
        return fraction_distinct[distant_part] * float(num_by_set.sum())

    return {
        number: {part: num_expected(part, num_candidates_of_document) for part in DISTANT_PARTS}
        for number, num_candidates_of_document in num_candidates.items()
        if num_candidates_of_document
    }
