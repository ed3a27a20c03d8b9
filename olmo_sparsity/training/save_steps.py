"""Decide after which steps a checkpoint is saved (`checkpoint.interval_steps`)."""

from __future__ import annotations

import time

from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.training.distributed import Processes


def is_due(step: int, interval_steps: int | None, num_steps: int) -> bool:
    """Return whether a task is due after this step: at an interval, and after the last step. None:
    after the last one only."""
    return step == num_steps or (interval_steps is not None and step % interval_steps == 0)


class SaveSteps:
    """Decides after which steps to save. With `interval_steps=auto` it measures steps and saves,
    and the first process chooses the next step after each save."""

    FIRST = 10
    """Number of steps before the first save, which shows how long steps and saves take."""

    PAUSE_S = 600.0
    """Seconds of work that a crash may lose."""

    SHARE = 0.02
    """Share of the time that training may stand still for saves."""

    def __init__(self, settings: CheckpointConfig, step: int, num_steps: int) -> None:
        self.settings = settings
        self.num_steps = num_steps
        self.first_step = step + 1
        self.next = step + self.FIRST
        self.timed_from_step = step
        self.timed_from_s = time.perf_counter()
        self.reported_steps = 0

    def due(self, step: int) -> bool:
        """Return whether to save after this step. It must be called after each step, which it
        times."""
        if step == self.first_step:  # its time, with compilation, says nothing about later steps
            self._restart_timing(step)
        if self.settings.stays(step):
            return True
        if self.settings.interval_steps == 0:
            return step >= self.next or step == self.num_steps
        return is_due(step, self.settings.interval_steps, self.num_steps)

    def after_save(self, step: int, stood_still_s: float, processes: Processes) -> str:
        """Decide when to save next. Return a line that says so, or nothing if the last line is
        still about right. `stood_still_s`: how long the save stopped training."""
        if self.settings.interval_steps != 0:  # not `auto`
            return ""
        num_timed = step - self.timed_from_step
        if num_timed == 0:
            self.next = step + self.FIRST
            return ""
        seconds = (time.perf_counter() - self.timed_from_s) / num_timed
        pause_s = max(self.PAUSE_S, stood_still_s / self.SHARE)
        # The first process decides for all: their clocks differ, and they must save together.
        num_steps = processes.gather(max(1, round(pause_s / seconds)))[0]
        self.next = step + num_steps
        self._restart_timing(step)

        is_news = not self.reported_steps / 2 < num_steps < 2 * self.reported_steps
        if not is_news or self.next >= self.num_steps:
            return ""
        self.reported_steps = num_steps
        minutes = num_steps * seconds / 60
        return (
            f"the next checkpoint is in {num_steps:,} steps, about {minutes:,.0f} min of training "
            "(interval_steps=auto)"
        )

    def _restart_timing(self, step: int) -> None:
        """Time the steps after this one."""
        self.timed_from_step = step
        self.timed_from_s = time.perf_counter()
