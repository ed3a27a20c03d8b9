"""Estimate the cost of a measurement by running a small part of it for a few seconds.

Place in the flow: before the measurement. `olmo-sparsity measure … --dry-run`.
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from analysis.documents import Documents
from analysis.plan import MAX_FITTED, Plan, share_of
from analysis.scoring import TOGETHER, Reading, Scorer
from analysis.settings import Settings
from analysis.statistics import half_of
from analysis.summary import describe_gate
from analysis.tables import Columns, joined
from analysis.windows import Windows
from olmo_sparsity.progress import format_duration

LOSSES_S, RECOVERY_S = 1.2, 2.0
"""For how long losses and recovery are computed, at least for two documents and for a target."""

MANY_TARGETS, FEW_TARGETS = 256, 10
"""The most targets of a document that get losses; below so many chosen ones a warning is given."""

QUICK_FORWARDS = 3_000_000
"""Token-forwards of a first look, for any text and windows."""


def first_look(
    documents: Documents,
    windows: Windows,
    far_states: Reading = "contextual",
    budget: float = QUICK_FORWARDS,
    num_halves: int = Settings.num_halves,
) -> Documents:
    """The beginnings of the documents, as much as the budget allows with the settings of `--quick`.

    One target in five is evaluated (half of the documents, and in them a tenth for each of several
    target sets) with three far texts (own, placebo, one foreign): a gradient, then 17 rows of the
    short window; 50 rows with what was chosen, 40 without it and those of random halves, which
    are long windows if far units are shown alone. All targets need the losses of two long windows
    and a short one, shared by a block.
    """
    long, short = windows.first_target, windows.short
    losses = (2 * long + short) / windows.stride + 3
    together = min(TOGETHER, windows.stride)
    near = short + together
    recovery = 3 * (3 * short + 17 * near + long / windows.stride) + 50 * near
    recovery += (40 + num_halves) * (long + together if far_states == "isolated" else near)
    num_long = sum(len(document.tokens) > long for document in documents)
    num_targets = max(windows.stride, int(budget / max(num_long, 1) / (losses + recovery / 5)))
    items = [replace(d, tokens=d.tokens[: long + num_targets]) for d in documents.items]
    return replace(documents, items=items)


def estimate(plan: Plan, shard: tuple[int, int] = (0, 1)) -> str:
    model, scorer, windows = plan.model, plan.scorer, plan.settings.windows
    ours, documents = share_of(plan.measured, *shard), plan.documents

    def num_targets(numbers: list[int]) -> int:
        return sum(len(documents[number].tokens) - windows.first_target for number in numbers)

    def beginnings(num_blocks: int) -> Plan:
        size = windows.first_target + num_blocks * windows.stride
        items = [replace(d, tokens=d.tokens[:size]) for d in documents.items]
        return replace(plan, documents=replace(documents, items=items))

    for _ in range(2):  # the first is slower
        a_block = _Spent(scorer)
        with a_block:
            beginnings(1).losses(plan.measured[0])
    # Some targets of several documents, and several blocks, which share forwards.
    num_blocks = min(LOSSES_S / 4 / a_block.seconds, MANY_TARGETS / windows.stride)
    sample = beginnings(max(int(num_blocks), 1))
    tables: dict[int, Columns] = {}
    spent = _Spent(scorer)
    for number in sorted(plan.measured, key=lambda number: (number // 2, number % 2)):
        with spent:
            tables[number] = sample.losses(number)["losses"]
        if spent.seconds > LOSSES_S and {half_of(n) for n in tables} == {"threshold", "report"}:
            break
    losses = joined(tables)
    share_of_losses = num_targets(ours) / len(losses)
    seconds, forwards = spent.seconds * share_of_losses, spent.forwards * share_of_losses

    if plan.fits_thresholds:
        reported = [number for number in ours if half_of(number) == "report"]
        evaluated, targets = _chosen_targets(sample, losses, [num_targets([n]) for n in reported])
        spent = _Spent(scorer)
        with spent:
            heads = sample.fit_heads(losses, max_targets=2)
        if heads is not None:
            half = [number for number in plan.measured if half_of(number) == "threshold"]
            fitted = min(MAX_FITTED, max(1, plan.settings.target_share * num_targets(half)))
            seconds += spent.seconds * fitted / heads.num_targets
            forwards += spent.forwards * fitted / heads.num_targets
    else:  # they may lie anywhere in a document
        sample = plan
        targets = _distinct(plan.targets(pd.DataFrame()))
        evaluated = float(targets.document.isin(ours).sum())
    spent, num_tried = _Spent(scorer), 0
    for number, rows in targets.groupby("document"):
        # Targets of a block share costs, and few that are drawn from a document stand alone.
        start = pd.Series(windows.start_of(rows.target.to_numpy()), index=rows.index)
        alike = ~start.duplicated() if plan.settings.max_targets else start == start.min()
        room = int((RECOVERY_S - spent.seconds) * num_tried / max(spent.seconds, 1e-9))
        few = rows[alike].head(max(room, 1))
        with spent:
            sample.recovery(int(number), few)
        num_tried += len(few)
        if spent.seconds > RECOVERY_S:
            break
    per_target = spent.forwards / max(num_tried, 1)
    seconds += spent.seconds * evaluated / max(num_tried, 1)
    forwards += per_target * evaluated
    if scorer.device.type == "cuda":
        memory, of = torch.cuda.max_memory_allocated(scorer.device), f" of {scorer.device}"
    else:
        memory, of = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10, ""
    chosen = f"about {evaluated:,.0f} evaluated"
    if len(targets) < FEW_TARGETS:
        chosen += f" (uncertain: {len(targets)} in the sample)"
    skipped = documents.num_too_short + len(documents) - len(plan.measured)
    lines = [
        describe_gate(plan.induction(), plan.settings.far_states, documents.are_planted),
        f"model           {model.name}, {model.num_parameters:,} parameters, on {scorer.device}",
        f"documents       {len(ours):,} to measure, {skipped:,} too short for the long window",
        f"targets         {num_targets(ours):,} with both losses, {chosen}",
        f"token-forwards  about {forwards:.2e}, {per_target:,.0f} for each evaluated target",
        f"FLOPs           about {forwards * 2 * model.num_parameters:.2e} (2 per parameter)",
        f"memory          {memory / 2**30:.1f} GiB{of} at the peak of a short trial",
        f"time            about {format_duration(seconds)} in one process",
    ]
    return "\n".join(lines)


def _chosen_targets(
    plan: Plan, losses: pd.DataFrame, num_targets: list[int]
) -> tuple[float, pd.DataFrame]:
    """The targets that are chosen among those with losses, and how many come of `num_targets` in
    the documents that results come from."""
    unlimited = replace(plan, settings=replace(plan.settings, max_targets=None))
    chosen = unlimited.targets(losses)
    # The sets gap_recurs and gap_new are part of the set gap.
    chosen = chosen[~chosen.target_set.str.startswith("gap_")]
    # Each set has the same density in all documents, and at most `max_targets` of each. A share of
    # few targets is rounded up.
    most = plan.settings.max_targets or np.inf
    known = int((losses.document.map(half_of) == "report").sum())
    density = chosen.groupby(["far_part", "target_set"]).size() / max(known, 1)
    by_share = density.index.isin(["recurs", "new"], level="target_set")
    density[by_share] = density[by_share].clip(upper=plan.settings.target_share)
    evaluated = sum(np.minimum(density * n, most).sum() for n in num_targets)
    targets = _distinct(chosen)
    return evaluated * len(targets) / max(len(chosen), 1), targets


def _distinct(targets: pd.DataFrame) -> pd.DataFrame:
    """A target may be in several sets."""
    return targets.drop_duplicates(["document", "target", "far_part"])


class _Spent:
    """Counts the seconds and token-forwards of `with` blocks."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.seconds, self.forwards = scorer, 0.0, 0

    def __enter__(self) -> None:
        self.seconds -= time.perf_counter()
        self.forwards -= self.scorer.token_forwards

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter()
        self.forwards += self.scorer.token_forwards
