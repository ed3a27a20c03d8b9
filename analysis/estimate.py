"""What a measurement will cost, from measuring a small piece of it for a few seconds.

Place in the flow: before the measurement. `olmo-sparsity measure … --dry-run`.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import replace

import pandas as pd
import torch

from analysis.measurement import Plan, share_of
from analysis.statistics import half_of
from analysis.summary import describe_gate
from olmo_sparsity.progress import format_duration

LOSSES_S, ASKING_S = 3.0, 5.0
"""For how long the losses of documents are computed, and questions are asked: at least those of two
documents, and of a few targets."""

SOME_TARGETS, FEW_TARGETS = 256, 8
"""Of one document: whose losses are computed, and that are asked about. It may have thousands."""


def estimate(plan: Plan, shard: tuple[int, int] = (0, 1)) -> str:
    model, scorer, windows = plan.model, plan.scorer, plan.settings.windows
    ours = share_of(plan.measured, *shard)

    def num_targets(numbers: list[int]) -> int:
        return sum(len(plan.documents[number].tokens) - windows.first_target for number in numbers)

    whole, size = plan.documents, windows.first_target + max(SOME_TARGETS, windows.stride)
    if plan.fits_thresholds:  # else targets may lie anywhere in a document
        plan.documents = replace(
            whole, items=[replace(d, tokens=d.tokens[:size]) for d in whole.items]
        )
    tables: dict[int, pd.DataFrame] = {}

    def losses(number: int) -> None:
        tables[number] = pd.DataFrame(dict(plan.losses(number)["losses"])).assign(document=number)

    losses(plan.measured[0])  # warm
    in_turn = sorted(plan.measured, key=lambda number: (number // 2, number % 2))
    spent = _Spent(plan)
    for number in in_turn:
        # The defaults hold this turn's values; mypy infers no lambda that has any.
        spent.on(lambda n=number: losses(n))  # type: ignore[misc]
        if spent.seconds > LOSSES_S and {half_of(n) for n in tables} == {"threshold", "report"}:
            break
    share_of_losses = num_targets(ours) / sum(map(len, tables.values()))
    seconds, forwards = spent.seconds * share_of_losses, spent.forwards * share_of_losses

    chosen = plan.targets(pd.concat(tables.values()))
    chosen = chosen[chosen.document.isin(list(tables))]
    known = [n for n in tables if not plan.fits_thresholds or half_of(n) == "report"]
    places = chosen.drop_duplicates(["document", "target", "far_part"])
    reported = [n for n in ours if not plan.fits_thresholds or half_of(n) == "report"]
    asked = len(places) * num_targets(reported) / max(sum(len(tables[n]) for n in known), 1)
    spent, num_asked = _Spent(plan), 0
    for number, rows in places.groupby("document"):
        # Those of the first blocks, as many as it takes: targets of a block share costs.
        last = windows.start_of(rows.target.to_numpy()[:FEW_TARGETS].max()) + windows.stride
        few = rows[rows.target < last]
        spent.on(lambda n=int(number), few=few: plan.answers(n, few))  # type: ignore[misc]
        num_asked += len(few)
        if spent.seconds > ASKING_S:
            break
    plan.documents = whole
    per_target = spent.forwards / max(num_asked, 1)
    seconds += spent.seconds * asked / max(num_asked, 1)
    forwards += per_target * asked
    if scorer.device.type == "cuda":
        memory = (
            f"{torch.cuda.max_memory_allocated(scorer.device) / 2**30:.1f} GiB of {scorer.device}"
        )
    else:
        memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"
    skipped = whole.num_too_short + len(whole) - len(plan.measured)
    lines = [
        describe_gate(plan.induction(), plan.settings.far_states, whole.are_planted),
        f"model           {model.name}, {model.num_parameters:,} parameters, on {scorer.device}",
        f"documents       {len(ours):,} to measure, {skipped:,} too short for the long window",
        f"targets         {num_targets(ours):,} with both losses, about {asked:,.0f} asked about",
        f"token-forwards  about {forwards:.2e}, {per_target:,.0f} for each target asked about",
        f"FLOPs           about {forwards * 2 * model.num_parameters:.2e} (2 per parameter)",
        f"memory          {memory} at its peak in a short trial",
        f"time            about {format_duration(seconds)} in one process",
    ]
    return "\n".join(lines)


class _Spent:
    """Seconds and token-forwards of what is done."""

    def __init__(self, plan: Plan) -> None:
        self.scorer, self.seconds, self.forwards = plan.scorer, 0.0, 0

    def on(self, do: Callable[[], object]) -> None:
        before, started = self.scorer.token_forwards, time.perf_counter()
        do()
        self.seconds += time.perf_counter() - started
        self.forwards += self.scorer.token_forwards - before
