"""Run the model of a plan for a few seconds, and extrapolate what its measurement will cost.

    trial = Trial.of(plan)    # the speed of the model, and losses of a few blocks
    cost = trial.cost(plan)   # token-forwards and seconds of all documents

Losses are counted exactly, from the lengths of documents and windows. How many targets there will
be is extrapolated from the losses of the trial; target_costs.py counts what one of them costs.

Dimension key: T targets of a document.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.plan import Plan, ReusedLosses
from olmo_sparsity.analysis.measurement.target_costs import (
    TRIED_DOCUMENTS,
    TargetCosts,
    counting_plan,
    spent_forwards,
)
from olmo_sparsity.analysis.measurement.targets import places_of
from olmo_sparsity.analysis.options import ALL_DOCUMENTS, Shard
from olmo_sparsity.analysis.results.tables import Columns, join_documents
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, KEYS, PARTS, PLACEBO, half_of
from olmo_sparsity.analysis.scoring.cost import counting
from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.induction import passages_of, repetition_drop
from olmo_sparsity.text.windows import Block

TRIED_S = 4.0
"""For about how many seconds a trial computes losses. It computes those of a block of two documents
at least, unless a block takes longer than this and more than `TRIED_FORWARDS` token-forwards."""

TRIED_FORWARDS = 1024
"""So many token-forwards a trial computes even if the model takes long for them."""

TRIED_TOKENS = 512
"""How many tokens of a document get losses in a trial, at most."""

NUM_PASSAGES = 2
"""Passages that the induction check of a trial repeats."""

PASSAGE_LENGTH = 64
"""Tokens of such a passage, at most."""

PLACEBO_RATE = 0.5
"""Assumed number of placebo targets for each own target, where a trial computes no losses."""


@dataclass(frozen=True)
class EstimatedCost:
    """The estimated cost of the documents of one shard."""

    num_losses: int
    """Targets whose losses are computed."""

    num_evaluated: float
    """Targets for which units are ranked, those of the placebo included."""

    num_document_targets: float
    """Those among them that are in the documents' own distant context."""

    loss_forwards: float
    """Token-forwards of the losses, with those of the induction check."""

    recovery_forwards: float
    """Token-forwards of the evaluated targets."""

    seconds: float

    @property
    def forwards(self) -> float:
        """Return all token-forwards."""
        return self.loss_forwards + self.recovery_forwards


@dataclass
class Trial:
    """The result of running the model for a few seconds: its speed, and the share of all targets
    that is chosen."""

    induction: dict[str, Any]
    """The result of the induction check on a few passages."""

    speed: float
    """Token-forwards a second while losses are computed."""

    losses: pd.DataFrame | None
    """Losses of a few blocks; None if computing them would take too long."""

    num_chosen: int = 0
    """How many targets are chosen by these losses."""

    speed_of_targets: float | None = None
    """Token-forwards a second while targets are evaluated; None before it is tried."""

    target_costs: TargetCosts | None = None
    """Kept for other samples of the same plan, which have the same costs."""

    @staticmethod
    def of(plan: Plan) -> Trial:
        """Run the model of a plan on a few passages and blocks."""
        scorer = plan.scorer
        length = max(1, min(PASSAGE_LENGTH, plan.settings.windows.first_target // 2))
        documents = [plan.documents[number] for number in plan.measured]
        # The first forward is slower, so the second run is the one that counts.
        for num_passages in (1, NUM_PASSAGES):
            began = time.perf_counter()
            induction = repetition_drop(scorer, documents, length, num_passages)
            seconds = time.perf_counter() - began
        speed = 2 * length * max(induction["num_passages"], 1) / seconds
        # If the measurement's own check fits into the time of a trial, it replaces this one.
        passages = passages_of(*plan.induction_texts())
        if sum(2 * len(passage) for passage in passages) <= TRIED_S * speed:
            induction = repetition_drop(scorer, *plan.induction_texts())
        trial = Trial(induction, speed, None)
        if plan.fits_threshold:
            trial._try_losses(plan)
        return trial

    def _try_losses(self, plan: Plan) -> None:
        """Compute losses of the first blocks of several documents, of both halves."""
        windows = plan.settings.windows
        scorer = plan.scorer
        tables: dict[int, Columns] = {}
        forwards_before = scorer.token_forwards
        began = time.perf_counter()
        max_forwards = max(TRIED_S * self.speed, TRIED_FORWARDS)
        for number in sorted(plan.measured):  # neighbours are of different halves
            document = plan.documents[number]
            blocks = list(windows.blocks(document.tokens[: windows.first_target + TRIED_TOKENS]))
            # The cost of the first block, of the first two, and so on, with blocks taken as equal.
            num_forwards = count_forwards_of_losses(plan, number, blocks)
            forwards_of_blocks = num_forwards * np.arange(1, len(blocks) + 1) / len(blocks)
            if not tables and forwards_of_blocks[0] > max_forwards:
                return  # even one block takes too long
            forwards_of_document = max_forwards / TRIED_DOCUMENTS
            num_affordable = int(np.searchsorted(forwards_of_blocks, forwards_of_document, "right"))
            num_blocks = max(1, num_affordable)

            num_tokens = blocks[num_blocks - 1].start + windows.stride
            tables[number] = _losses_of_beginning(plan, number, num_tokens)
            is_long = time.perf_counter() - began > TRIED_S
            if is_long and set(map(half_of, tables)) == {"threshold", "report"}:
                break
        # Forwards of several rows, as in the measurement, say more about speed than passages.
        seconds = time.perf_counter() - began
        self.speed = (scorer.token_forwards - forwards_before) / seconds
        self.losses = join_documents(tables)

    # --- the cost of a plan, of this model and text ---

    def cost(self, plan: Plan, shard: Shard = ALL_DOCUMENTS) -> EstimatedCost:
        """Estimate the cost of a plan, or of a shard of its documents."""
        numbers = shard.of(plan.measured)
        blocks = {number: plan.blocks(plan.documents[number]) for number in numbers}
        num_losses = {
            number: sum(block.num_targets for block in blocks[number]) for number in numbers
        }
        loss_forwards = _forwards_of_first_phase(plan, blocks)

        # `places`: where targets may be. `expected`: how many of them are evaluated.
        if plan.fits_threshold:
            num_reported = {n: num for n, num in num_losses.items() if half_of(n) == "report"}
            expected = self._expected_targets(plan, num_reported)
            places = {number: places_of(blocks[number]) for number in expected}
        else:
            places = _fixed_places(plan, numbers)
            expected = {
                number: {DOCUMENT: float(len(places_T))} for number, places_T in places.items()
            }

        recovery_forwards = 0.0
        if expected:
            if self.target_costs is None:
                self.target_costs = TargetCosts.of(plan, places)
            recovery_forwards = self.target_costs.total(plan, expected, places)
        if self.speed_of_targets is None:
            self.speed_of_targets = self._try_target(plan, places)
        return EstimatedCost(
            num_losses=sum(num_losses.values()),
            num_evaluated=sum(sum(by_part.values()) for by_part in expected.values()),
            num_document_targets=sum(by_part[DOCUMENT] for by_part in expected.values()),
            loss_forwards=loss_forwards,
            recovery_forwards=recovery_forwards,
            seconds=loss_forwards / self.speed + recovery_forwards / self.speed_of_targets,
        )

    def _try_target(self, plan: Plan, places: dict[int, np.ndarray]) -> float:
        """Return the token-forwards a second of evaluating a target, tried in a document of median
        length. If that would take too long, return the speed of losses."""
        numbers = [number for number in places if len(places[number])]
        numbers.sort(key=lambda number: len(plan.documents[number].tokens))
        if not numbers:
            return self.speed
        number = numbers[len(numbers) // 2]
        target = {"document": number, "target": places[number][-1:], "distant_part": DOCUMENT}
        if spent_forwards(counting_plan(plan), number, target) > TRIED_S * self.speed:
            return self.speed
        began = time.perf_counter()
        num_forwards = spent_forwards(plan, number, target)
        return num_forwards / (time.perf_counter() - began)

    def _expected_targets(
        self, plan: Plan, num_losses: dict[int, int]
    ) -> dict[int, dict[str, float]]:
        """Return how many targets are expected to be evaluated: document → kind of distant context
        → number. `num_losses`: document → number of its targets with losses."""
        if self.losses is None:
            return _expected_by_share(plan, num_losses)
        without_limit = replace(_with_sample(plan, 1.0).settings, max_targets="all")
        chosen = replace(plan, settings=without_limit).targets(self.losses)
        self.num_chosen = len(chosen.drop_duplicates([*KEYS, "distant_part"]))

        # A target that is in several sets is evaluated once.
        share_distinct = chosen.groupby("distant_part").apply(
            lambda rows: len(rows.drop_duplicates(KEYS)) / len(rows)
        )
        # Each set is assumed to be as dense in all documents as in those that were tried.
        num_tried = max(int((self.losses.document.map(half_of) == "report").sum()), 1)
        density = chosen.groupby(["distant_part", "target_set"]).size() / num_tried
        max_targets = plan.settings.max_targets_of_set

        def num_expected(part: str, num_losses_of_document: int) -> float:
            if part not in share_distinct.index:
                return 0.0
            num_by_set = (density[part] * num_losses_of_document).clip(upper=max_targets)
            return share_distinct[part] * float(num_by_set.sum())

        return {
            number: {part: num_expected(part, num) for part in PARTS}
            for number, num in num_losses.items()
            if num
        }


def _expected_by_share(plan: Plan, num_losses: dict[int, int]) -> dict[int, dict[str, float]]:
    """Return what `Trial._expected_targets` returns, without any losses: as many targets as
    `share` and `max_targets` allow."""
    settings = plan.settings
    expected = {}
    for number, num in num_losses.items():
        num_of_set = min(settings.share * num, settings.max_targets_of_set)
        num_targets = len(settings.sets) * num_of_set
        if num_targets:
            expected[number] = {DOCUMENT: num_targets, PLACEBO: PLACEBO_RATE * num_targets}
    return expected


def _fixed_places(plan: Plan, numbers: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the places of targets that are fixed before the measurement, by document."""
    targets = plan.targets(pd.DataFrame()).drop_duplicates([*KEYS, "distant_part"])
    by_document = targets[targets.document.isin(numbers)].groupby("document").target
    return {int(number): places.to_numpy() for number, places in by_document}


def _forwards_of_first_phase(plan: Plan, blocks: dict[int, list[Block]]) -> float:
    """Return the token-forwards of the first phase: of the losses of these blocks, by document,
    that are not reused, and of the induction check."""
    forwards = 0.0
    for number, blocks_of_document in blocks.items():
        if number not in plan.reused_losses.by_document:
            forwards += count_forwards_of_losses(plan, number, blocks_of_document)
    for passage in passages_of(*plan.induction_texts()):
        forwards += 2 * len(passage)  # the passage and its repetition
    return forwards


def count_forwards_of_losses(plan: Plan, number: int, blocks: Sequence[Block]) -> int:
    """Return the token-forwards of the losses of these blocks of a document. There are three losses
    of each target: with the local window, with the long one, and with the long one of the
    placebo."""
    if not blocks:
        return 0
    if plan.settings.interpretation.replaces:
        document = plan.documents[number]
        scorer = counting(plan.scorer).of_document(document, plan.controls)
        context_losses(scorer, document, plan.settings.windows, plan.controls, blocks)
        return scorer.token_forwards
    short = plan.settings.short
    num_prefix = len(plan.settings.prefix_ids)
    num_local = sum(short + block.num_targets - 1 for block in blocks)
    num_prefixes = num_prefix * len(blocks)
    if not plan.settings.windows.has_all:
        num_long = sum(len(block.tokens) - 1 for block in blocks)
        return num_local + num_prefixes + 2 * num_long
    # One pass over the document predicts all its targets. An unrelated text takes one pass, too,
    # and then the local windows of all blocks behind it.
    last_block = blocks[-1]
    num_document = len(last_block.tokens) - 1
    num_unrelated = num_prefix + last_block.num_distant + num_local
    return num_local + num_prefixes + num_document + num_unrelated


def _losses_of_beginning(plan: Plan, number: int, num_tokens: int) -> Columns:
    """Compute the losses of the first tokens of a document, in all blocks."""
    document = plan.documents[number]
    # Other documents keep their lengths, as they serve as unrelated texts.
    items = list(plan.documents.items)
    items[number] = replace(document, tokens=document.tokens[:num_tokens])
    documents = replace(plan.documents, items=items)
    plan_of_beginning = replace(plan, documents=documents, reused_losses=ReusedLosses())
    return _with_sample(plan_of_beginning, 1.0).losses(number)["losses"]


def _with_sample(plan: Plan, sample: float) -> Plan:
    """Return the plan with another share of blocks."""
    return replace(plan, settings=replace(plan.settings, sample=sample))
