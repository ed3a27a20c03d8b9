"""Estimate the cost of a measurement before it runs.

Cost is counted in token-forwards, and a time follows from the speed of the model:

    trial.py              runs the model for seconds: its speed, and losses of a few blocks
    expected_targets.py   how many targets there will be: extrapolated from these losses
    counted_cost.py       token-forwards of losses, counted exactly, and of targets
      target_costs.py     token-forwards of a target: counted in a few documents

`estimate` is the entry point of a dry run, and prints the cost. `estimate_untrained` prices a model
that has no weights yet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from olmo_sparsity.analysis.measurement.counted_cost import CountedCost, count_cost
from olmo_sparsity.analysis.measurement.expected_targets import ExpectedTargets, expect_targets
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.trial import Trial, speed_of_targets
from olmo_sparsity.analysis.options import ALL_DOCUMENTS, Shard
from olmo_sparsity.analysis.results.notes import describe_induction
from olmo_sparsity.analysis.results.view import num_of
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.analysis.scoring.induction import passages_of
from olmo_sparsity.base.devices import known_gpu, peak_memory_gib
from olmo_sparsity.base.progress import format_duration
from olmo_sparsity.models.loaded import using
from olmo_sparsity.text.documents import Documents

FEW_TARGETS = 10
"""With fewer chosen targets in the trial, the estimate says that it is uncertain."""

WIDTHS = {"recovery": 0.67, "net excess": 1.36}
"""Half the width of a 95% interval, times the root of the number of targets. So with 100 targets a
recovery is known to about ±0.067. This is the median of 175 stored measurements with at most five
targets a document. In a tenth of these it is 1.13 and 1.91 or more
(study/results/summary.parquet)."""

LONG_S = 300
"""Seconds from which a dry run says how to measure less."""

USED_SHARE_OF_PEAK = 0.4
"""The share of its stated peak that a GPU is assumed to reach; never timed on a large one."""


def estimate(plan: Plan, shard: tuple[int, int] = ALL_DOCUMENTS, speed: str | None = None) -> Cost:
    """Estimate what a measurement, or one shard of it, costs. This runs the model for seconds.
    `speed`: another machine to give a time for: a GPU, or token-forwards a second."""
    shard = Shard(*shard)
    machine = _machine_of_speed(plan.model.num_parameters, speed)
    numbers = shard.of(plan.measured)
    with using(plan.model):
        trial = Trial.of(plan)
        targets = expect_targets(plan, numbers, trial.losses)
        cost = count_cost(plan, numbers, targets)
        seconds_of_losses = cost.loss_forwards / trial.speed
        seconds_of_recovery = cost.recovery_forwards / speed_of_targets(plan, targets, trial.speed)
    estimated = _Estimate(trial, targets, cost, seconds_of_losses + seconds_of_recovery)
    details = "\n".join(_describe(plan, estimated, shard, machine))
    return Cost(round(cost.forwards), plan.model.num_parameters, details)


class _Estimate(NamedTuple):
    """The numbers that a dry run prints."""

    trial: Trial
    targets: ExpectedTargets
    cost: CountedCost
    seconds: float
    """Seconds of one process on this machine."""


def _describe(
    plan: Plan, estimated: _Estimate, shard: Shard, machine: _Machine | None
) -> list[str]:
    """Return the lines that a dry run prints."""
    trial, targets, cost, seconds = estimated
    model = plan.model
    documents = plan.documents
    device = plan.scorer.device
    num_measured = len(shard.of(plan.measured))
    # Some were left out when the text was read, others have no target with a full window.
    num_skipped = documents.num_too_short + len(documents) - len(plan.measured)
    per_target = cost.recovery_forwards / max(targets.num_evaluated, 1e-9)
    chosen = f"about {targets.num_evaluated:,.0f} evaluated"
    if plan.chooses_by_gap and targets.num_chosen_in_trial < FEW_TARGETS:
        chosen += f" (uncertain: {targets.num_chosen_in_trial} in the sample)"
    lines = [
        _describe_induction_of_trial(plan, trial.induction),
        f"model           {model.name}, {model.num_parameters:,} parameters, on {device}",
        f"documents       {num_measured:,} to measure, {num_skipped:,} too short for the long "
        f"window{_describe_parts(documents)}",
        f"targets         {cost.num_targets:,} with both losses, {chosen}",
        # All shards together determine the intervals.
        f"intervals       {_describe_intervals(targets.num_document_targets * shard.num_shards)}",
        f"token-forwards  about {cost.forwards:.2e}, {per_target:,.0f} for each evaluated target",
        f"FLOPs           about {cost.forwards * 2 * model.num_parameters:.2e} (2 per parameter)",
        f"memory          {peak_memory_gib(device):.1f} GiB of {device} at the peak of a trial",
        f"time            about {format_duration(seconds)} in one process "
        f"({cost.forwards / seconds:,.0f} token-forwards a second, tried here)",
    ]
    if round(targets.num_evaluated) == 0:
        lines.append(f"warning         {_describe_nothing_evaluated(plan)}")
    if seconds > LONG_S:
        lines.append(
            "to shrink       --quick, or fewer: --max-documents, --max-targets, --blocks, --ks"
        )
    if machine is not None:
        lines.append(
            f"GPU-hours       about {machine.hours(cost.forwards):.2g} "
            f"({machine.forwards_per_s:,.0f} a second, {machine.origin})"
        )
    return lines


def _describe_nothing_evaluated(plan: Plan) -> str:
    """Return a warning that a measurement would evaluate no target: why, and what to change."""
    nothing = "this measurement would evaluate nothing: "
    if not plan.chooses_by_gap:
        return nothing + (
            "no given target lies in a measured document after a whole long window; give targets "
            "further back, longer documents, or a smaller --long"
        )
    settings = plan.settings
    return nothing + (
        f"hardly a token that was tried is in the {settings.share:.0%} of largest gap (--share) "
        f"and gains {settings.min_gap:g} nats (--min-gap) from distant text. Pass more or longer "
        "documents, lower --min-gap or --short, or draw targets evenly: --sets every"
    )


def _describe_induction_of_trial(plan: Plan, tried: dict[str, Any]) -> str:
    """Describe the induction check of a trial. If the measurement itself repeats other passages,
    say so in place of a verdict. `tried`: the result of the trial's check."""
    passages = passages_of(*plan.induction_texts())
    is_same = tried["num_passages"] == len(passages) and (
        not passages or tried["passage_length"] == len(passages[0])
    )
    if is_same:
        return describe_induction(tried, plan.settings.interpretation)
    # A verdict on other passages than the measurement reads could differ from its own.
    loss_line = describe_induction(tried, plan.settings.interpretation).splitlines()[0]
    return (
        f"{loss_line}\n  tried on {num_of(tried['num_passages'], 'passage')} of "
        f"{num_of(tried['passage_length'], 'token')}; the measurement reads {len(passages)} of "
        f"{len(passages[0]) if passages else 0} and may find another drop"
    )


def _describe_parts(documents: Documents) -> str:
    """Return how many documents were split into how many parts; empty if none was split."""
    if not documents.parts:
        return ""
    return f"; {len(documents):,} parts of {len(documents.parts):,} documents"


def _describe_intervals(num_targets: float) -> str:
    """Return how wide the intervals over this number of document targets will be."""
    if not num_targets:
        return "none, as no target of the sample passes"
    widths = [f"±{width / num_targets**0.5:.2f} of {name}" for name, width in WIDTHS.items()]
    return f"about {' and '.join(widths)} (by stored measurements)"


@dataclass(frozen=True)
class _Machine:
    """A machine that a measurement may run on, and how fast it computes."""

    forwards_per_s: float
    """Token-forwards a second."""

    origin: str
    """Where this number comes from, for readers."""

    def hours(self, token_forwards: float) -> float:
        """Return how many hours the machine takes for this many token-forwards."""
        return token_forwards / self.forwards_per_s / 3600


def _machine_of_speed(num_parameters: int, speed: str | None) -> _Machine | None:
    """Return the machine that `speed` describes, or None if `speed` is None. `speed`: the name of a
    GPU, or a number of token-forwards a second."""
    if speed is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?(e\d+)?", speed) and float(speed):
        return _Machine(float(speed), "given")
    gpu = known_gpu(speed, "--speed", or_else="token-forwards a second above 0, or ")
    flops = USED_SHARE_OF_PEAK * gpu.tflops * 1e12
    origin = f"predicted: {USED_SHARE_OF_PEAK:.0%} of {gpu.tflops:,.0f} TFLOP/s, without attention"
    return _Machine(flops / (2 * num_parameters), origin)


# --- a model that is not trained yet --------------------------------------------------------------


@dataclass(frozen=True)
class Untrained:
    """What measuring a model that is not trained yet will cost."""

    num_targets: float
    """Targets for which units are ranked, those of the placebo included."""

    forwards: float
    """Token-forwards of the whole measurement."""

    gpu_hours: float | None
    """None without the name of a GPU."""


def estimate_untrained(plan: Plan, speed: str | None = None) -> Untrained:
    """Estimate a measurement without running its model, which may have no weights. It assumes as
    many targets as `share` and `max_targets` allow, and half as many of the placebo. `speed`: a
    GPU, or token-forwards a second."""
    machine = _machine_of_speed(plan.model.num_parameters, speed)
    targets = expect_targets(plan, plan.measured, losses=None)
    cost = count_cost(plan, plan.measured, targets)
    hours = None if machine is None else machine.hours(cost.forwards)
    return Untrained(targets.num_evaluated, cost.forwards, hours)
