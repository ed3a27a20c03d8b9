"""What a measurement will cost, from measuring a small piece of it for a few seconds.

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
from analysis.plan import Plan, share_of
from analysis.scoring import TOGETHER
from analysis.statistics import half_of
from analysis.summary import describe_gate
from analysis.windows import Windows
from olmo_sparsity.progress import format_duration

LOSSES_S, ASKING_S = 3.0, 5.0
"""For how long the losses of documents are computed, and questions are asked: at least those of two
documents, and of a few targets."""

SOME_TARGETS, FEW_TARGETS = 256, 8
"""Of one document: whose losses are computed, and that are asked about. It may have thousands."""


QUICK_FORWARDS = 3_000_000
"""Token-forwards that a first look may take, whatever the text and the windows."""


def first_look(documents: Documents, windows: Windows, budget: float = QUICK_FORWARDS) -> Documents:
    """The beginnings of the documents, as much as the budget allows with the rules of `--quick`.

    Of a target in five (half of the documents, and in them a tenth for each of several target sets)
    questions are asked, of three far texts (own, placebo, one foreign): a gradient, then 17 rows of
    the short window. Of every target the losses of two long windows and a short one are computed,
    shared by a block.
    """
    long, short = windows.first_target, windows.short
    losses = (2 * long + short) / windows.stride + 3
    asked = 3 * (3 * short + 17 * (short + TOGETHER) + long / windows.stride)
    num_long = sum(len(document.tokens) > long for document in documents)
    num_targets = max(windows.stride, int(budget / max(num_long, 1) / (losses + asked / 5)))
    items = [replace(d, tokens=d.tokens[: long + num_targets]) for d in documents.items]
    return replace(documents, items=items)


def estimate(plan: Plan, shard: tuple[int, int] = (0, 1)) -> str:
    model, scorer, windows = plan.model, plan.scorer, plan.settings.windows
    ours, whole = share_of(plan.measured, *shard), plan.documents

    def num_targets(numbers: list[int]) -> int:
        return sum(len(whole[number].tokens) - windows.first_target for number in numbers)

    size = windows.first_target + max(SOME_TARGETS, windows.stride)
    if plan.fits_thresholds:  # else targets may lie anywhere in a document
        plan.documents = replace(
            whole, items=[replace(d, tokens=d.tokens[:size]) for d in whole.items]
        )
    tables: dict[int, pd.DataFrame] = {}
    plan.losses(plan.measured[0])  # warm
    spent = _Spent(plan)
    for number in sorted(plan.measured, key=lambda number: (number // 2, number % 2)):
        with spent:
            tables[number] = pd.DataFrame(dict(plan.losses(number)["losses"]))
        if spent.seconds > LOSSES_S and {half_of(n) for n in tables} == {"threshold", "report"}:
            break
    share_of_losses = num_targets(ours) / sum(map(len, tables.values()))
    seconds, forwards = spent.seconds * share_of_losses, spent.forwards * share_of_losses

    losses = pd.concat(tables, names=["document"]).reset_index("document")
    most = plan.settings.max_targets or np.inf
    all_of_them = replace(plan, settings=replace(plan.settings, max_targets=None))
    chosen = all_of_them.targets(losses)
    # Sets by stratum lie within the set by gap.
    within = chosen.target_set.str.startswith("gap_")
    chosen = chosen[chosen.document.isin(list(tables)) & ~within]
    places = chosen.drop_duplicates(["document", "target", "far_part"])
    known, reported = (
        [n for n in numbers if not plan.fits_thresholds or half_of(n) == "report"]
        for numbers in (tables, ours)
    )
    # Of each set, as many of every document as of those known, and no more than `max_targets`.
    density = chosen.groupby(["far_part", "target_set"]).size() / max(
        sum(len(tables[n]) for n in known), 1
    )
    asked = sum(np.minimum(density * num_targets([n]), most).sum() for n in reported)
    asked *= len(places) / max(len(chosen), 1)  # a target may be in several sets
    spent, num_asked = _Spent(plan), 0
    for number, rows in places.groupby("document"):
        # Those of the first blocks, as many as it takes: targets of a block share costs.
        last = windows.start_of(rows.target.to_numpy()[:FEW_TARGETS].max()) + windows.stride
        few = rows[rows.target < last]
        with spent:
            plan.answers(int(number), few)
        num_asked += len(few)
        if spent.seconds > ASKING_S:
            break
    plan.documents = whole
    per_target = spent.forwards / max(num_asked, 1)
    seconds += spent.seconds * asked / max(num_asked, 1)
    forwards += per_target * asked
    if scorer.device.type == "cuda":
        memory, of = torch.cuda.max_memory_allocated(scorer.device), f" of {scorer.device}"
    else:
        memory, of = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10, ""
    skipped = whole.num_too_short + len(whole) - len(plan.measured)
    lines = [
        describe_gate(plan.induction(), plan.settings.far_states, whole.are_planted),
        f"model           {model.name}, {model.num_parameters:,} parameters, on {scorer.device}",
        f"documents       {len(ours):,} to measure, {skipped:,} too short for the long window",
        f"targets         {num_targets(ours):,} with both losses, about {asked:,.0f} asked about",
        f"token-forwards  about {forwards:.2e}, {per_target:,.0f} for each target asked about",
        f"FLOPs           about {forwards * 2 * model.num_parameters:.2e} (2 per parameter)",
        f"memory          {memory / 2**30:.1f} GiB{of} at its peak in a short trial",
        f"time            about {format_duration(seconds)} in one process",
    ]
    return "\n".join(lines)


class _Spent:
    """Seconds and token-forwards of what is done with it."""

    def __init__(self, plan: Plan) -> None:
        self.scorer, self.seconds, self.forwards = plan.scorer, 0.0, 0

    def __enter__(self) -> None:
        self.seconds -= time.perf_counter()
        self.forwards -= self.scorer.token_forwards

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter()
        self.forwards += self.scorer.token_forwards
