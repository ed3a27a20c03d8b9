"""Run the model of a plan for a few seconds, to learn its speed and losses of a few blocks.

    trial = Trial.of(plan)
    targets = expect_targets(plan, numbers, trial.losses)       # expected_targets.py
    cost = count_cost(plan, numbers, targets)                   # counted_cost.py
    seconds = cost.loss_forwards / trial.speed + cost.recovery_forwards / speed_of_targets(…)

A dry run (estimate.py) puts these together. A trial takes about `TRIED_S` seconds for the losses,
and as long for a target.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.counted_cost import count_losses_of_document
from olmo_sparsity.analysis.measurement.expected_targets import ExpectedTargets
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.reuse import ReusedLosses
from olmo_sparsity.analysis.measurement.target_costs import (
    TRIED_DOCUMENTS,
    counting_plan,
    spent_forwards,
)
from olmo_sparsity.analysis.results.meta import InductionCheck
from olmo_sparsity.analysis.results.schemas import Columns
from olmo_sparsity.analysis.results.tables import join_documents
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, half_of
from olmo_sparsity.analysis.scoring.induction import passages_of, repetition_drop
from olmo_sparsity.text.windows import Block

TRIED_S = 4.0
"""For about how many seconds a trial computes losses. It computes at least one block in each of two
documents, unless already the first block would take longer than this."""

TRIED_FORWARDS = 1024
"""A block with at most this many token-forwards is computed however long it takes."""

TRIED_TOKENS = 512
"""How many tokens of a document get losses in a trial, at most."""

NUM_PASSAGES = 2
"""Passages that the induction check of a trial repeats."""

PASSAGE_LENGTH = 64
"""Tokens of such a passage, at most."""


@dataclass(frozen=True)
class Trial:
    """Measurements of a few seconds: how a model computes, and how its losses on a text behave."""

    induction: InductionCheck
    """The result of the induction check on a few passages."""

    speed: float
    """Token-forwards a second while losses are computed."""

    losses: pd.DataFrame | None
    """Losses of a few blocks. None if targets are fixed already, or if computing even one block
    would take too long."""

    @staticmethod
    def of(plan: Plan) -> Trial:
        """Run the model of a plan on a few passages and blocks."""
        passages = _try_passages(plan)
        if not plan.chooses_by_gap:
            return Trial(passages.induction, passages.speed, losses=None)

        forwards_before = plan.scorer.token_forwards
        began_s = time.perf_counter()
        losses = _compute_losses_of_first_blocks(plan, passages.speed)
        seconds = time.perf_counter() - began_s
        if losses is None:
            return Trial(passages.induction, passages.speed, losses=None)
        # Forwards of several rows, as in the measurement, say more about speed than passages.
        num_forwards = plan.scorer.token_forwards - forwards_before
        return Trial(passages.induction, num_forwards / seconds, losses)


class _TriedPassages(NamedTuple):
    """What a few repeated passages say of a model."""

    induction: InductionCheck
    speed: float
    """Token-forwards a second."""


def _try_passages(plan: Plan) -> _TriedPassages:
    """Repeat a few short passages. If the passages of the measurement's own induction check fit
    into the time of a trial, return the result of that check."""
    length = max(1, min(PASSAGE_LENGTH, plan.passage_length))
    # The first forward is slower, so the second run is the one that counts.
    for num_passages in (1, NUM_PASSAGES):
        began_s = time.perf_counter()
        induction = repetition_drop(plan.scorer, plan.measured_documents, length, num_passages)
        seconds = time.perf_counter() - began_s
    num_forwards = 2 * length * max(induction["num_passages"], 1)  # with the repetitions
    speed = num_forwards / seconds

    passages = passages_of(plan.measured_documents, plan.passage_length)
    if sum(2 * len(passage) for passage in passages) <= TRIED_S * speed:
        induction = plan.run_induction_check()
    return _TriedPassages(induction, speed)


def _compute_losses_of_first_blocks(plan: Plan, speed: float) -> pd.DataFrame | None:
    """Compute losses of the first blocks of several documents, of both halves, for `TRIED_S`
    seconds. Return None if that is too short even for one block.

    Args:
        speed: Token-forwards a second, by which the number of blocks is chosen.
    """
    windows = plan.settings.windows
    began_s = time.perf_counter()
    max_forwards = max(TRIED_S * speed, TRIED_FORWARDS)
    tables: dict[int, Columns] = {}
    for number in sorted(plan.measured_numbers):  # neighbours are of different halves
        document = plan.documents[number]
        blocks = list(windows.blocks(document.tokens[: windows.first_target + TRIED_TOKENS]))
        # The cost of the first block, of the first two, and so on, with blocks taken as equal.
        num_forwards = count_losses_of_document(plan, number, blocks)
        forwards_of_blocks = num_forwards * np.arange(1, len(blocks) + 1) / len(blocks)
        if not tables and forwards_of_blocks[0] > max_forwards:
            return None
        # Each document gets a part of the time only, so that several are tried.
        num_blocks = _num_affordable(forwards_of_blocks, max_forwards / TRIED_DOCUMENTS)
        tables[number] = _compute_losses_of_beginning(plan, number, blocks[:num_blocks])

        is_time_over = time.perf_counter() - began_s > TRIED_S
        # The threshold is fitted on one half, and the targets are chosen in the other.
        has_both_halves = {half_of(number) for number in tables} == {"threshold", "report"}
        if is_time_over and has_both_halves:
            break
    return join_documents(tables)


def _num_affordable(forwards_of_blocks: np.ndarray, max_forwards: float) -> int:
    """Return how many blocks cost at most `max_forwards`, but at least one.

    Args:
        forwards_of_blocks: The token-forwards of the first block, of the first two, and so on.
    """
    return max(1, int(np.searchsorted(forwards_of_blocks, max_forwards, "right")))


def _compute_losses_of_beginning(plan: Plan, number: int, blocks: list[Block]) -> Columns:
    """Return the losses of the first blocks of a document. It is cut after them, so that the rest,
    which may be long, costs nothing."""
    document = plan.documents[number]
    num_tokens = blocks[-1].start + plan.settings.windows.stride
    # Other documents keep their lengths, as they serve as unrelated texts.
    items = list(plan.documents.items)
    items[number] = replace(document, tokens=document.tokens[:num_tokens])
    plan_of_beginning = replace(
        plan,
        documents=replace(plan.documents, items=items),
        settings=replace(plan.settings, sample=1.0),  # all blocks of the beginning
        reused_losses=ReusedLosses(),
    )
    return plan_of_beginning.compute_losses(number)["losses"]


def speed_of_targets(plan: Plan, targets: ExpectedTargets, speed: float) -> float:
    """Return the token-forwards a second of evaluating a target, tried in a document of median
    length. Return `speed` if that would take too long, or if there is no target.

    Args:
        targets: The expected targets, one of which is evaluated.
        speed: Token-forwards a second while losses are computed.
    """
    numbers = [number for number, places in targets.places.items() if len(places)]
    numbers.sort(key=lambda number: len(plan.documents[number].tokens))
    if not numbers:
        return speed
    number = numbers[len(numbers) // 2]
    # With long="all" the last target has the longest window, and takes the longest.
    last_target = targets.places[number][-1:]
    target = {"document": number, "target": last_target, "distant_part": DOCUMENT}
    if spent_forwards(counting_plan(plan), number, target) > TRIED_S * speed:
        return speed
    began_s = time.perf_counter()
    num_forwards = spent_forwards(plan, number, target)
    return num_forwards / (time.perf_counter() - began_s)
