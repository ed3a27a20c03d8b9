"""Print the estimated cost of a measurement, as the lines of a dry run.

    model           runs/mine, 360,000 parameters, on cpu
    documents       40 to measure, 3 too short for the long window
    targets         9,400 with both losses, about 80 evaluated
    intervals       about ±0.09 of recovery and ±0.18 of net excess (by stored measurements)
    token-forwards  about 2.10e+06, 24,000 for each evaluated target
    …

`describe_estimate` is the entry point. estimate.py computes the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from olmo_sparsity.analysis.measurement.counted_cost import CountedCost
from olmo_sparsity.analysis.measurement.expected_targets import ExpectedTargets
from olmo_sparsity.analysis.measurement.machine import Machine
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.trial import Trial
from olmo_sparsity.analysis.results.meta import InductionCheck
from olmo_sparsity.analysis.results.notes import describe_induction
from olmo_sparsity.analysis.results.view import num_of
from olmo_sparsity.analysis.scoring.induction import passages_of
from olmo_sparsity.analysis.shard import Shard
from olmo_sparsity.base.devices import peak_memory_gib
from olmo_sparsity.base.progress import format_duration
from olmo_sparsity.text.documents import Documents

FEW_TARGETS = 10
"""With fewer chosen targets in the trial, the estimate says that it is uncertain."""

WIDTH_AT_ONE_TARGET = {"recovery": 0.67, "net excess": 1.36}
"""Half the width of a 95% interval over one target. It falls with the root of the number of
targets: 100 targets give a recovery to about ±0.067. The numbers are medians of 175 stored
measurements with at most five targets a document (study/results/summary.parquet). In a tenth of
these they are 1.13 and 1.91 or more."""

LONG_S = 300
"""Seconds from which a dry run says how to measure less."""

LABEL_WIDTH = 16
"""Characters of the first column."""


@dataclass(frozen=True)
class EstimatedWork:
    """What one shard of a measurement will compute, and how long it takes; a dry run prints it."""

    trial: Trial
    targets: ExpectedTargets
    cost: CountedCost
    seconds: float
    """Seconds of one process on this machine."""


def describe_estimate(
    plan: Plan, work: EstimatedWork, shard: Shard, machine: Machine | None
) -> list[str]:
    """Return the lines that a dry run prints.

    Args:
        machine: Another machine, for which GPU-hours are given. None if no other is asked for.
    """
    lines = [
        _describe_induction_of_trial(plan, work.trial.induction),
        *_describe_work(plan, work, shard),
        *_describe_resources(plan, work),
    ]
    if round(work.targets.num_evaluated) == 0:
        lines.append(_labelled("warning", _describe_nothing_evaluated(plan)))
    if work.seconds > LONG_S:
        advice = "--quick, or fewer: --max-documents, --max-targets, --blocks, --ks"
        lines.append(_labelled("to shrink", advice))
    if machine is not None:
        hours = machine.hours(work.cost.forwards)
        speed = f"{machine.forwards_per_s:,.0f} a second, {machine.origin}"
        lines.append(_labelled("GPU-hours", f"about {hours:.2g} ({speed})"))
    return lines


def _describe_induction_of_trial(plan: Plan, tried: InductionCheck) -> str:
    """Describe the induction check of a trial. The measurement itself may repeat other passages.
    Then say so, and give no verdict.

    Args:
        tried: The result of the trial's check.
    """
    passages = passages_of(plan.measured_documents, plan.passage_length)
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


def _describe_work(plan: Plan, work: EstimatedWork, shard: Shard) -> list[str]:
    """Return the lines on model, documents, targets and intervals: what is measured."""
    model = plan.model
    documents = plan.documents
    targets = work.targets
    num_measured = len(shard.of(plan.measured_numbers))
    # Some were left out when the text was read, others have no target with a full window.
    num_skipped = documents.num_too_short + len(documents) - len(plan.measured_numbers)

    chosen = f"about {targets.num_evaluated:,.0f} evaluated"
    if plan.chooses_by_gap and targets.num_chosen_in_trial < FEW_TARGETS:
        chosen += f" (uncertain: {targets.num_chosen_in_trial} in the sample)"
    # All shards together determine the intervals.
    num_targets_of_shards = targets.num_document_targets * shard.num_shards
    return [
        _labelled(
            "model",
            f"{model.name}, {model.num_parameters:,} parameters, on {plan.scorer.device}",
        ),
        _labelled(
            "documents",
            f"{num_measured:,} to measure, {num_skipped:,} too short for the long window"
            f"{_describe_parts(documents)}",
        ),
        _labelled("targets", f"{work.cost.num_targets:,} with both losses, {chosen}"),
        _labelled("intervals", _describe_intervals(num_targets_of_shards)),
    ]


def _labelled(label: str, text: str) -> str:
    """Return a line whose text begins in the second column."""
    return label.ljust(LABEL_WIDTH) + text


def _describe_parts(documents: Documents) -> str:
    """Return how many documents were split into how many parts; empty if none was split."""
    if not documents.parts:
        return ""
    return f"; {len(documents):,} parts of {len(documents.parts):,} documents"


def _describe_intervals(num_targets: float) -> str:
    """Return how wide the intervals over this number of document targets will be."""
    if not num_targets:
        return "none, as no target of the sample passes"
    widths = [
        f"±{width / num_targets**0.5:.2f} of {name}" for name, width in WIDTH_AT_ONE_TARGET.items()
    ]
    return f"about {' and '.join(widths)} (by stored measurements)"


def _describe_resources(plan: Plan, work: EstimatedWork) -> list[str]:
    """Return the lines on token-forwards, FLOPs, memory and time: what it takes."""
    cost = work.cost
    device = plan.scorer.device
    # Without an expected target this is 0, and not a division by 0.
    per_target = cost.recovery_forwards / max(work.targets.num_evaluated, 1e-9)
    flops = cost.forwards * 2 * plan.model.num_parameters
    speed = f"{cost.forwards / work.seconds:,.0f} token-forwards a second, tried here"
    return [
        _labelled(
            "token-forwards",
            f"about {cost.forwards:.2e}, {per_target:,.0f} for each evaluated target",
        ),
        _labelled("FLOPs", f"about {flops:.2e} (2 per parameter)"),
        _labelled(
            "memory", f"{peak_memory_gib(device):.1f} GiB of {device} at the peak of a trial"
        ),
        _labelled("time", f"about {format_duration(work.seconds)} in one process ({speed})"),
    ]


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
