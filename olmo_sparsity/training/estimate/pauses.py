"""Estimate the time of a run outside of its steps: evaluations, and saves in which it stands still.

    pauses_of(config, hardware, step_s=1.4)
    # Pauses(num_evaluations=20, evaluating_s=41.5, num_saves=47, saving_s=59.3)

The start, restarts, and steps that a crash loses are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.training.checkpoints.save_steps import SaveSteps
from olmo_sparsity.training.estimate.evaluations import seconds_of_evaluation
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.host import predict_save


@dataclass(frozen=True)
class Pauses:
    """The time of a run outside of its steps."""

    num_evaluations: int
    evaluating_s: float
    """Seconds of all evaluations."""

    num_saves: int
    saving_s: float
    """Seconds in which all saves stop training."""

    @property
    def total_s(self) -> float:
        """Return the seconds of evaluations and saves together."""
        return self.evaluating_s + self.saving_s


def pauses_of(config: RunConfig, hardware: Hardware, step_s: float) -> Pauses:
    """Return the evaluations and saves of a run on known GPUs, each step of which takes `step_s`
    seconds."""
    num_steps = config.training.num_steps
    num_evaluations = _count_due(num_steps, config.evaluation.interval_steps)

    save = predict_save(config, hardware)
    checkpoint = config.checkpoint
    interval_steps = checkpoint.interval_steps
    if interval_steps == 0:  # auto: what SaveSteps will choose once it has timed steps and saves
        between_s = SaveSteps.seconds_between_saves(save.pause_s)
        interval_steps = max(1, round(between_s / step_s))
    num_saves = _count_due(num_steps, interval_steps) + checkpoint.num_staying(0, num_steps)
    # A save waits until the one before is on the disk. So training waits, too, if the steps between
    # two saves take less time than writing.
    writing_s = save.total_s - save.pause_s
    waiting_s = max(0.0, writing_s - step_s * num_steps / num_saves)
    return Pauses(
        num_evaluations=num_evaluations,
        evaluating_s=num_evaluations * seconds_of_evaluation(config, hardware),
        num_saves=num_saves,
        saving_s=num_saves * (save.pause_s + waiting_s),
    )


def _count_due(num_steps: int, interval_steps: int | None) -> int:
    """Return how often a task is due: at an interval, and after the last step."""
    return 1 if interval_steps is None else math.ceil(num_steps / interval_steps)
