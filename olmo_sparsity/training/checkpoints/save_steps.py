"""Decide after which steps a checkpoint is saved (`checkpoint.interval_steps`).

    saves = SaveSteps(config.checkpoint, step=0, num_steps=5000)
    saves.due(10)                            # True: with `auto`, step 10 is the first
    saves.after_save(10, SaveTime(waited_s=0, copied_s=18), processes)
    saves.next_step                          # 610: at 1.5 s a step, 15 minutes later

With a number of steps, `due` is a plain interval. With `auto`, steps and copies are timed: a save
is due every ten minutes. Where copies would then take more than 2% of the time it is due more
seldom, up to every 30 minutes. steps.py calls `due` after each step, and `after_save` after each
save.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.training.processes.distributed import Processes


def is_due(step: int, interval_steps: int | None, num_steps: int) -> bool:
    """Return whether a task is due after this step: at an interval, and after the last step. None:
    after the last one only."""
    return step == num_steps or (interval_steps is not None and step % interval_steps == 0)


class SaveTime(NamedTuple):
    """How long training stood still for a save."""

    waited_s: float
    """Seconds until the checkpoint before was on the disk."""

    copied_s: float
    """Seconds in which weights and moments were copied. The time that a disk takes is not part of
    it: a single stall would postpone all later saves."""


class SaveSteps:
    """Decides after which steps to save. With `interval_steps=auto` it measures steps and saves,
    and the first process chooses the next step after each save."""

    STEPS_BEFORE_FIRST = 10
    """Number of steps before the first save, which shows how long steps and saves take."""

    USUAL_INTERVAL_S = 600.0
    """Seconds of work that a crash may lose."""

    LONGEST_INTERVAL_S = 1800.0
    """The same, where saves take long."""

    LARGEST_COPY_SHARE = 0.02
    """Share of the time that training may stand still for copies, as long as saves are at most
    `LONGEST_INTERVAL_S` apart."""

    def __init__(self, settings: CheckpointConfig, step: int, num_steps: int) -> None:
        """Begin with the step from which a start resumes.

        Args:
            settings: The section `checkpoint`.
            step: The last step that is done.
            num_steps: The number of steps of the whole run.
        """
        self.settings = settings
        self.is_auto = settings.interval_steps == 0
        self.num_steps = num_steps
        self.first_step = step + 1
        self.next_step = step + self.STEPS_BEFORE_FIRST
        """With `auto`, the step after which to save."""

        self.timed_from_step = step
        self.timed_from_s = time.perf_counter()
        self.reported_steps = 0
        """The number of steps between saves that the log last said; 0 before that."""

        self.shortest_copy_s = float("inf")
        """Seconds of the fastest copy so far: a single slow one says nothing about the next."""

    def due(self, step: int) -> bool:
        """Return whether to save after this step. It must be called after each step: the first
        call begins to time steps."""
        if step == self.first_step:  # its time, with compilation, says nothing about later steps
            self._restart_timing(step)
        if self.settings.stays(step):
            return True
        if self.is_auto:
            return step >= self.next_step or step == self.num_steps
        return is_due(step, self.settings.interval_steps, self.num_steps)

    def after_save(self, step: int, save_time: SaveTime, processes: Processes) -> str:
        """Decide when to save next, with `auto`. Return a line for the log that says so, or an
        empty one if that is no news (`_describe_next`). Every process must call it.

        Args:
            step: The step that was saved.
            save_time: How long training stood still for it.
        """
        if not self.is_auto:
            return ""
        num_timed = step - self.timed_from_step
        if num_timed == 0:  # the first step of a start is saved: nothing is timed yet
            self.next_step = step + self.STEPS_BEFORE_FIRST
            return ""

        since_last_s = time.perf_counter() - self.timed_from_s
        training_s = since_last_s - save_time.waited_s - save_time.copied_s
        step_s = max(training_s / num_timed, 1e-6)
        interval_s = self._seconds_to_next_save(save_time, since_last_s)
        # The first process decides for all: their clocks differ, and they must save together.
        interval_steps = processes.gather(max(1, round(interval_s / step_s)))[0]
        self.next_step = min(step + interval_steps, self.num_steps)
        self._restart_timing(step)
        return self._describe_next(step, interval_steps, step_s)

    def _seconds_to_next_save(self, save_time: SaveTime, since_last_s: float) -> float:
        """Return the seconds until the next save.

        Args:
            save_time: The time of the save that has just begun.
            since_last_s: The seconds from the save before to this one.
        """
        self.shortest_copy_s = min(self.shortest_copy_s, save_time.copied_s)
        written_s = 0.0
        # Training waits for a checkpoint if it takes longer to write than the time between saves.
        # The one before was then being written all the time since it was begun. A wait of a second
        # is no sign of that.
        if save_time.waited_s > 1:
            written_s = since_last_s - save_time.copied_s
        return self.seconds_between_saves(self.shortest_copy_s, written_s)

    @staticmethod
    def seconds_between_saves(copied_s: float, written_s: float = 0.0) -> float:
        """Return the seconds from one save to the next.

        Args:
            copied_s: How long a copy takes, in which training stands still.
            written_s: How long the last checkpoint took to be written, if training waited for it.
        """
        # With copies of 18 s it is 900 s, of which copies are 2%.
        seconds = max(
            SaveSteps.USUAL_INTERVAL_S, copied_s / SaveSteps.LARGEST_COPY_SHARE, written_s
        )
        return min(seconds, SaveSteps.LONGEST_INTERVAL_S)

    def _describe_next(self, step: int, interval_steps: int, step_s: float) -> str:
        """Return a line about the next save. It is empty if the interval is within a factor of 2 of
        the one that the log last said, and a crash costs at most twice `USUAL_INTERVAL_S`."""
        lost_s = (self.next_step - step) * step_s  # what a crash just before the next save costs
        is_as_reported = self.reported_steps / 2 < interval_steps < 2 * self.reported_steps
        is_far = lost_s > 2 * self.USUAL_INTERVAL_S
        is_last = self.next_step == self.num_steps
        if not is_far and (is_last or is_as_reported):
            return ""
        self.reported_steps = interval_steps
        return (
            f"the next checkpoint is in {self.next_step - step:,} steps, about "
            f"{lost_s / 60:,.0f} min of training (interval_steps=auto)"
        )

    def _restart_timing(self, step: int) -> None:
        """Time the steps after this one."""
        self.timed_from_step = step
        self.timed_from_s = time.perf_counter()
