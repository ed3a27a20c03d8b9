"""Decide after which steps a checkpoint is saved (`checkpoint.interval_steps`)."""

from __future__ import annotations

import time
from typing import NamedTuple

from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.training.distributed import Processes


def is_due(step: int, interval_steps: int | None, num_steps: int) -> bool:
    """Return whether a task is due after this step: at an interval, and after the last step. None:
    after the last one only."""
    return step == num_steps or (interval_steps is not None and step % interval_steps == 0)


class SaveTime(NamedTuple):
    """How long training stood still for a save."""

    waited_s: float
    """Seconds until the checkpoint before was on the disk."""

    copied_s: float
    """Seconds in which weights and moments were copied. Tries of a disk are not part of it: one
    stall would postpone all later saves."""


class SaveSteps:
    """Decides after which steps to save. With `interval_steps=auto` it measures steps and saves,
    and the first process chooses the next step after each save."""

    FIRST = 10
    """Number of steps before the first save, which shows how long steps and saves take."""

    PAUSE_S = 600.0
    """Seconds of work that a crash may lose."""

    LONGEST_PAUSE_S = 1800.0
    """The same, where saves take long."""

    SHARE = 0.02
    """Share of the time that training may stand still for copies."""

    @staticmethod
    def seconds_between_saves(copied_s: float, written_s: float = 0.0) -> float:
        """Return the seconds from one save to the next. `copied_s`: how long a copy takes;
        `written_s`: how long the last checkpoint took to be written, if training waited for it."""
        seconds = max(SaveSteps.PAUSE_S, copied_s / SaveSteps.SHARE, written_s)
        return min(seconds, SaveSteps.LONGEST_PAUSE_S)

    def __init__(self, settings: CheckpointConfig, step: int, num_steps: int) -> None:
        self.settings = settings
        self.num_steps = num_steps
        self.first_step = step + 1
        self.next = step + self.FIRST
        self.timed_from_step = step
        self.timed_from_s = time.perf_counter()
        self.reported_steps = 0
        self.shortest_copy_s = float("inf")
        """Seconds of the fastest copy so far: a single slow one says nothing about the next."""

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

    def after_save(self, step: int, save_time: SaveTime, processes: Processes) -> str:
        """Decide when to save next. Return a line that says so, or nothing if the last line is
        still about right and a crash costs about `PAUSE_S` at most."""
        if self.settings.interval_steps != 0:  # not `auto`
            return ""
        num_timed = step - self.timed_from_step
        if num_timed == 0:
            self.next = step + self.FIRST
            return ""
        since_last_s = time.perf_counter() - self.timed_from_s
        training_s = since_last_s - save_time.waited_s - save_time.copied_s
        step_s = max(training_s / num_timed, 1e-6)
        self.shortest_copy_s = min(self.shortest_copy_s, save_time.copied_s)
        # Training waits for a checkpoint if it takes longer to write than the time between saves.
        written_s = since_last_s - save_time.copied_s if save_time.waited_s > 1 else 0.0
        pause_s = self.seconds_between_saves(self.shortest_copy_s, written_s)
        # The first process decides for all: their clocks differ, and they must save together.
        num_steps = processes.gather(max(1, round(pause_s / step_s)))[0]
        self.next = min(step + num_steps, self.num_steps)
        self._restart_timing(step)

        lost_s = (self.next - step) * step_s
        is_news = not self.reported_steps / 2 < num_steps < 2 * self.reported_steps
        is_far = lost_s > 2 * self.PAUSE_S
        if not is_far and (not is_news or self.next == self.num_steps):
            return ""
        self.reported_steps = num_steps
        return (
            f"the next checkpoint is in {self.next - step:,} steps, about {lost_s / 60:,.0f} min "
            "of training (interval_steps=auto)"
        )

    def _restart_timing(self, step: int) -> None:
        """Time the steps after this one."""
        self.timed_from_step = step
        self.timed_from_s = time.perf_counter()
