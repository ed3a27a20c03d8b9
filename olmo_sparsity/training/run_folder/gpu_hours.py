"""Count the GPU-hours of a run over all of its starts, and end it at `training.max_gpu_hours`.

    gpu_hours.json          {"gpu_hours": 12.5}      written by an earlier start
    30 minutes on 8 GPUs    {"gpu_hours": 16.5}      12.5 + 0.5 × 8

The file is in the run folder, so that a job that is requeued goes on counting. A thread writes it
each minute, from the time at which the start has locked the folder, and it is written once more
when the folder is unlocked. So the hours of a start that hangs count, too, and a start loses a
minute at most if its first process is killed. (If that process is stopped, the time until the
others end is lost.) On a CPU the hours are those of processes.

prepared_run.py makes the counter, start.py stores its hours while the folder is locked, and
steps.py asks it after each step whether to stop.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.files import read_json, write_json
from olmo_sparsity.base.locks import check_not_taken_over
from olmo_sparsity.base.progress import say
from olmo_sparsity.training.processes.distributed import Processes

WRITE_EVERY_S = 60.0
"""Seconds between two writes of the file."""


@dataclass
class StoredHours:
    """The content of `gpu_hours.json`."""

    gpu_hours: float


class GpuHours:
    """Counts the GPU-hours of a run. The first process counts for all, and alone writes the file:
    the clocks of processes differ, and one of them must decide when the limit is reached."""

    SPENT = "training.max_gpu_hours is reached"
    """The reason for which a run stops."""

    def __init__(self, run_folder: Path, limit: float | None, processes: Processes) -> None:
        """Begin to count.

        Args:
            limit: `training.max_gpu_hours`. None: no limit.
        """
        self.run_folder = run_folder
        self.limit = limit
        self.processes = processes
        self.begun_s = time.perf_counter()
        self.earlier_hours = 0.0
        """GPU-hours of earlier starts."""

        self._last_write_succeeded = True
        """Whether the disk took the last file."""

    @contextlib.contextmanager
    def keep_stored(self) -> Iterator[None]:
        """Go on with the hours of earlier starts, and store them while the block runs. The first
        process calls it while it holds the lock of the run folder."""
        if self.path.exists():
            remedy = "write the GPU-hours that the run has taken, or delete it to count from 0"
            self.earlier_hours = read_json(self.path, StoredHours, remedy).gpu_hours
        ended = threading.Event()
        # A daemon, as a disk that hangs must not keep the process from ending.
        threading.Thread(target=self._write_until, args=(ended,), daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            self._write()

    def _write_until(self, ended: threading.Event) -> None:
        """Write the file again and again. Runs in a thread."""
        while not ended.wait(WRITE_EVERY_S):
            self._write()

    @property
    def path(self) -> Path:
        return self.run_folder / "gpu_hours.json"

    @property
    def total(self) -> float:
        """Return the GPU-hours of all starts until now."""
        hours = (time.perf_counter() - self.begun_s) / 3600
        return self.earlier_hours + hours * self.processes.world_size

    def reason_to_stop(self) -> str:
        """Return `SPENT` on the first process if the limit is reached, otherwise an empty text."""
        is_spent = self.limit is not None and self.total >= self.limit
        return self.SPENT if is_spent and self.processes.is_first else ""

    def check_earlier(self, saved_step: int) -> None:
        """Raise UserError if earlier starts have reached the limit."""
        if self.limit is not None and self.earlier_hours >= self.limit:
            raise self.limit_error(saved_step)

    def limit_error(self, saved_step: int) -> UserError:
        """Return the error with which a run ends at its limit, and which no job requeues."""
        return UserError(
            f"training.max_gpu_hours={self.limit:g} is reached: {self.total:.4g} GPU-hours, step "
            f"{saved_step} is saved; raise it to go on with the same command"
        )

    def _write(self) -> None:
        """Store the hours until now. A disk that takes no file does not end the run: the next file
        holds these hours, too."""
        try:
            check_not_taken_over(self.run_folder)
        except UserError:  # the file is that of another process now; the run ends on its own
            return
        try:
            write_json(self.path, asdict(StoredHours(self.total)))
            self._last_write_succeeded = True
        except UserError as error:
            if self._last_write_succeeded:  # said once, until a write succeeds
                say(f"{error}; training goes on, and GPU-hours are counted in memory")
            self._last_write_succeeded = False
