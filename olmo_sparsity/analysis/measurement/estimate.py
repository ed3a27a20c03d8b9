"""Estimate the cost of a measurement before it runs.

Cost is counted in token-forwards, and a time follows from the speed of the model:

    trial.py              runs the model for seconds: its speed, and losses of a few blocks
    expected_targets.py   how many targets there will be: extrapolated from these losses
    counted_cost.py       token-forwards of losses, counted exactly, and of targets
      target_costs.py     token-forwards of a target: counted in a few documents
    cost_report.py        the lines that a dry run prints

If losses take 1.2e6 token-forwards at 60,000 a second, and targets 0.9e6 at 45,000 a second, a
measurement takes about 20 + 20 seconds.

`estimate` is the entry point of a dry run. `estimate_untrained` prices a model that has no weights
yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from olmo_sparsity.analysis.measurement.cost_report import EstimatedWork, describe_estimate
from olmo_sparsity.analysis.measurement.counted_cost import count_cost
from olmo_sparsity.analysis.measurement.expected_targets import expect_targets
from olmo_sparsity.analysis.measurement.machine import machine_of_speed
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.trial import Trial, speed_of_targets
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.analysis.shard import ALL_DOCUMENTS, Shard
from olmo_sparsity.models.loaded import using


def estimate(plan: Plan, shard: tuple[int, int] = ALL_DOCUMENTS, speed: str | None = None) -> Cost:
    """Estimate what a measurement, or one shard of it, costs. This runs the model for seconds.

    Args:
        shard: (i, n): only shard i of n of the documents, from 0.
        speed: Another machine to give a time for: a GPU, or token-forwards a second.
    """
    shard = Shard(*shard)
    # First, as a name that is no GPU should fail before the model runs.
    machine = machine_of_speed(plan.model.num_parameters, speed)
    numbers = shard.of(plan.measured_numbers)
    with using(plan.model):
        trial = Trial.of(plan)
        targets = expect_targets(plan, numbers, trial.losses)
        cost = count_cost(plan, numbers, targets)
        # Targets have rows of other lengths than losses, so their speed is tried apart.
        seconds_of_losses = cost.loss_forwards / trial.speed
        seconds_of_recovery = cost.recovery_forwards / speed_of_targets(plan, targets, trial.speed)

    estimated = EstimatedWork(trial, targets, cost, seconds_of_losses + seconds_of_recovery)
    details = "\n".join(describe_estimate(plan, estimated, shard, machine))
    return Cost(round(cost.forwards), plan.model.num_parameters, details)


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
    many targets as `share` and `max_targets` allow, and half as many of the placebo.

    Args:
        speed: A GPU, or token-forwards a second. With None, no GPU-hours are computed.
    """
    machine = machine_of_speed(plan.model.num_parameters, speed)
    targets = expect_targets(plan, plan.measured_numbers, losses=None)
    cost = count_cost(plan, plan.measured_numbers, targets)
    hours = None if machine is None else machine.hours(cost.forwards)
    return Untrained(targets.num_evaluated, cost.forwards, hours)
