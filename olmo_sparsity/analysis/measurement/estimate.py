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

from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.measurement.plan import Plan, share_of
from olmo_sparsity.analysis.results.statistics import half_of
from olmo_sparsity.analysis.results.summary import describe_induction
from olmo_sparsity.analysis.results.tables import Columns, joined
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.runtime import format_duration

LOSSES_S, RECOVERY_S = 1.2, 2.0
"""For how long losses and recovery are computed, at least for two documents and for a target."""

MANY_TARGETS, FEW_TARGETS = 256, 10
"""The most targets of a document that get losses; below so many chosen ones a warning is given."""


def estimate(plan: Plan, shard: tuple[int, int] = (0, 1)) -> Cost:
    """Runs the induction check, the losses of some targets, and the recovery of a few."""
    ours = share_of(plan.measured, *shard)
    losses, of_losses = _try_losses(plan)
    scale = _num_targets(plan, [n for n in ours if n not in plan.known]) / len(losses)
    seconds, forwards = of_losses.seconds * scale, of_losses.forwards * scale
    if plan.fits_thresholds:
        sample = _beginnings(plan, _blocks_of(losses, plan.settings.windows))
        reported = [number for number in ours if half_of(number) == "report"]
        sizes = [_num_targets(plan, [number]) for number in reported]
        evaluated, targets = _chosen_targets(sample, losses, sizes)
    else:  # they may lie anywhere in a document
        sample, targets = plan, _distinct(plan.targets(pd.DataFrame()))
        evaluated = float(targets.document.isin(ours).sum())
    num_tried, of_recovery = _try_recovery(sample, targets)
    per_target = of_recovery.forwards / max(num_tried, 1)
    seconds += of_recovery.seconds * evaluated / max(num_tried, 1)
    forwards += per_target * evaluated
    chosen = f"about {evaluated:,.0f} evaluated"
    if len(targets) < FEW_TARGETS:
        chosen += f" (uncertain: {len(targets)} in the sample)"
    model, documents, device = plan.model, plan.documents, plan.scorer.device
    skipped = documents.num_too_short + len(documents) - len(plan.measured)
    num_losses = _num_targets(plan, ours)
    lines = [
        describe_induction(plan.induction(), plan.settings.far_states, documents.are_planted),
        f"model           {model.name}, {model.num_parameters:,} parameters, on {device}",
        f"documents       {len(ours):,} to measure, {skipped:,} too short for the long window",
        f"targets         {num_losses:,} with both losses, {chosen}",
        f"token-forwards  about {forwards:.2e}, {per_target:,.0f} for each evaluated target",
        f"FLOPs           about {forwards * 2 * model.num_parameters:.2e} (2 per parameter)",
        f"memory          {_peak_memory(device)} at the peak of a short trial",
        f"time            about {format_duration(seconds)} in one process",
    ]
    return Cost(round(forwards), model.num_parameters, "\n".join(lines))


def _num_targets(plan: Plan, numbers: list[int]) -> int:
    first = plan.settings.windows.first_target
    return sum(len(plan.documents[number].tokens) - first for number in numbers)


def _beginnings(plan: Plan, num_blocks: int) -> Plan:
    windows = plan.settings.windows
    size = windows.first_target + num_blocks * windows.stride
    items = [replace(d, tokens=d.tokens[:size]) for d in plan.documents.items]
    return replace(plan, documents=replace(plan.documents, items=items), known={})


def _blocks_of(losses: pd.DataFrame, windows: Windows) -> int:
    """How many blocks of a document got losses."""
    return -(-int(losses.groupby("document").size().max()) // windows.stride)


def _try_losses(plan: Plan) -> tuple[pd.DataFrame, _Spent]:
    """Losses of the beginnings of several documents, of both halves; several blocks of each, which
    share forwards."""
    for _ in range(2):  # the first is slower
        a_block = _Spent(plan.scorer)
        with a_block:
            _beginnings(plan, 1).losses(plan.measured[0])
    num_blocks = min(LOSSES_S / 4 / a_block.seconds, MANY_TARGETS / plan.settings.stride)
    sample = _beginnings(plan, max(int(num_blocks), 1))
    tables: dict[int, Columns] = {}
    spent = _Spent(plan.scorer)
    for number in sorted(plan.measured, key=lambda number: (number // 2, number % 2)):
        with spent:
            tables[number] = sample.losses(number)["losses"]
        if spent.seconds > LOSSES_S and {half_of(n) for n in tables} == {"threshold", "report"}:
            break
    return joined(tables), spent


def _try_recovery(plan: Plan, targets: pd.DataFrame) -> tuple[int, _Spent]:
    """Some targets of several documents; returns their number."""
    windows, spent, num_tried = plan.settings.windows, _Spent(plan.scorer), 0
    for number, rows in targets.groupby("document"):
        # Targets of a block share costs, and few that are drawn from a document stand alone.
        start = pd.Series(windows.start_of(rows.target.to_numpy()), index=rows.index)
        alike = ~start.duplicated() if plan.settings.max_targets else start == start.min()
        room = int((RECOVERY_S - spent.seconds) * num_tried / max(spent.seconds, 1e-9))
        few = rows[alike].head(max(room, 1))
        with spent:
            plan.recovery(int(number), few)
        num_tried += len(few)
        if spent.seconds > RECOVERY_S:
            break
    return num_tried, spent


def _peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB of {device}"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"


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
    density[by_share] = density[by_share].clip(upper=plan.settings.share)
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
