"""Measure the speed of training, and how long it waits for data, evaluations and saves.

clock = Clock(step=0)
with clock.measuring("data_wait_s"):     # part of the time of steps
    batch = next(batches)
with clock.paused():                     # not part of it
    with clock.measuring("save_s"):
        save(step)
clock.steps_per_s(step)                  # since the last call, without the pauses
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Measures the speed of training, without the time of evaluations and saves, and how long
    training waits for these and for its data."""

    def __init__(self, step: int) -> None:
        """Begin to measure after a step that is done."""
        self.began_s = time.perf_counter()
        """When the steps that are measured began, later by the pauses since."""

        self.last_step = step
        self.measured = dict.fromkeys(("data_wait_s", "save_s", "evaluation_s"), 0.0)
        """Seconds of each kind of wait since `take_measured`, by its name in the metrics."""

    def steps_per_s(self, step: int) -> float:
        """Return the steps per second since the last call."""
        now_s = time.perf_counter()
        speed = (step - self.last_step) / (now_s - self.began_s)
        self.began_s = now_s
        self.last_step = step
        return speed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time inside this block."""
        pause_began_s = time.perf_counter()
        yield  # an error ends the run, so its time need not be measured
        self.began_s += time.perf_counter() - pause_began_s

    @contextlib.contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """Add the time inside this block to a kind of wait."""
        wait_began_s = time.perf_counter()
        yield
        self.measured[name] += time.perf_counter() - wait_began_s

    def take_measured(self) -> dict[str, float]:
        """Return the seconds of each kind of wait since the last call."""
        measured = self.measured
        self.measured = dict.fromkeys(measured, 0.0)
        return measured
