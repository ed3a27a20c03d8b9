"""Notice what does not end a run but should be looked at: a loss that rises, a slow process.

    alarm = LossAlarm(config, [])
    alarm.describe_rise(100, mean_loss=2.9)    # ""
    alarm.describe_rise(110, mean_loss=3.5)    # "step 110: LOSS HAS RISEN to 3.50, from 2.90 at …"
    alarm.describe_rise(120, mean_loss=3.6)    # "": it is said once, until the loss has fallen

steps.py asks both alarms at each logging interval, and prints their lines.
"""

from __future__ import annotations

from collections.abc import Iterable

from olmo_sparsity.config.sections import RunConfig

RISE_NATS = 0.5
"""How far the mean loss of a logging interval must be above the lowest one before."""

SLOW_RATIO = 1.2
"""How many times as long as the median process a slow one takes."""

NUM_SLOW_ROWS = 3
"""Number of rows in a row in which it is the slowest: a single one may be chance."""


class LossAlarm:
    """Notices that the mean loss of a logging interval is `RISE_NATS` above the lowest mean of the
    intervals before, after the warm-up. Each stage of `training.length` begins anew, as its text
    may be harder."""

    def __init__(self, config: RunConfig, losses: Iterable[tuple[int, float]]) -> None:
        """Begin with the losses of earlier starts: pairs of a step and its loss."""
        self.config = config
        self.first_of_stage = 1
        self.lowest = float("inf")
        """The lowest mean loss of an interval of this stage."""

        self.lowest_step = 0
        """The last step of that interval."""

        self.has_risen = False
        interval_steps = config.logging.interval_steps
        losses_of_interval: list[float] = []
        for step, loss in losses:
            losses_of_interval.append(loss)
            if step % interval_steps == 0:
                self.describe_rise(step, sum(losses_of_interval) / len(losses_of_interval))
                losses_of_interval = []

    def describe_rise(self, step: int, mean_loss: float) -> str:
        """Return a line if the mean loss of the interval that ends at a step has risen, once until
        it has fallen again; otherwise an empty text."""
        self._begin_stage_of(step)
        first_of_interval = step - self.config.logging.interval_steps + 1
        # Two stages have two kinds of text, and in the warm-up a loss may rise and fall.
        if first_of_interval < self.first_of_stage:
            return ""
        if first_of_interval <= self.config.optimizer.warmup_steps:
            return ""

        if mean_loss < self.lowest:
            self.lowest = mean_loss
            self.lowest_step = step
        was_risen = self.has_risen
        self.has_risen = mean_loss > self.lowest + RISE_NATS
        if was_risen or not self.has_risen:  # said already, or no rise
            return ""
        return (
            f"step {step}: LOSS HAS RISEN to {mean_loss:.2f}, from {self.lowest:.2f} at step "
            f"{self.lowest_step}; if it does not fall again, branch_from a checkpoint before"
        )

    def _begin_stage_of(self, step: int) -> None:
        """Forget the losses of earlier stages, if a new one has begun by this step."""
        first_steps = self.config.training.first_steps
        first_of_stage = max(first for first in first_steps if first <= max(step, 1))
        if first_of_stage != self.first_of_stage:
            self.first_of_stage = first_of_stage
            self.lowest = float("inf")
            self.has_risen = False


class StragglerAlarm:
    """Notices that one process is the slowest, `SLOW_RATIO` times as slow as the median, in
    `NUM_SLOW_ROWS` rows of the metrics in a row."""

    def __init__(self, nodes: list[str]) -> None:
        """Begin with the name of the node of each process."""
        self.nodes = nodes
        self.slow_rank = -1
        """The process that was slow in the last row."""

        self.num_rows = 0
        """The number of rows in a row in which it was slow."""

        self.reported: set[int] = set()

    def describe_slow(self, rank: int, ratio: float) -> str:
        """Return a line if a process is slow, once for each; otherwise an empty text.

        Args:
            rank: The slowest process of a row.
            ratio: Its time divided by that of the median process.
        """
        if ratio <= SLOW_RATIO:
            self.num_rows = 0
            return ""
        # If another process is slow now, its rows are counted anew.
        self.num_rows = self.num_rows + 1 if rank == self.slow_rank else 1
        self.slow_rank = rank
        if self.num_rows < NUM_SLOW_ROWS or rank in self.reported:
            return ""
        self.reported.add(rank)
        return (
            f"SLOW PROCESS: {rank} on {self.nodes[rank]} takes {ratio:.1f} times as long as the "
            "median process, and all wait for it; look at its GPU (clocks, temperature), or leave "
            "the node out with sbatch --exclude"
        )
