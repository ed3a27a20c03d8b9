"""End a run whose processes wait for one that does not come: stacks, one line, exit code 76.

A thread of each process compares the time with the limit of the current task (`expect`). At a
time-out all processes that still run write their stacks into `stacks/` of the run folder. The
process whose file is missing is the one that hangs, or whose machine is gone.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from olmo_sparsity.base.launch import EXIT_LOST_PROCESS
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.sections import EngineConfig
from olmo_sparsity.training.distributed import Processes

GRACE_S = 8.0
"""Seconds within which all processes reach a time-out and write their stacks."""


class Watchdog:
    """Watches the tasks of this process. With several processes, a thread ends it at a time-out."""

    def __init__(
        self,
        run_folder: Path,
        limits: EngineConfig,
        processes: Processes,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to watch. `release` is called before this process is ended: it unlocks the run
        folder."""
        self.limits = limits
        self.processes = processes
        self.release = release
        self.expect("the start", "work_timeout_s")
        if processes.world_size == 1 and "WORLD_SIZE" not in os.environ:
            return
        # All write into one folder, named by the clock of the first.
        starts = processes.gather((time.strftime("%Y%m%d-%H%M%S"), socket.gethostname()))
        self.folder = run_folder / "stacks" / starts[0][0]
        self.hosts = [host for _, host in starts]
        threading.Thread(target=self._watch, daemon=True).start()

    def expect(self, task: str, setting: str) -> None:
        """Expect this process to finish a task, whose limit is this setting of `engine`. The next
        call, or `stop`, ends the task."""
        self.task = task
        self.setting = setting
        self.limit_s = getattr(self.limits, setting)
        self.deadline = time.monotonic() + self.limit_s

    def stop(self) -> None:
        """Stop watching."""
        self.deadline = float("inf")
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        """End the process if its task takes too long. Runs in a thread."""
        while self.deadline < float("inf"):
            # If this thread is blocked, too, one without Python prints stacks and ends the process.
            faulthandler.dump_traceback_later(self.limits.work_timeout_s + 60, exit=True)
            time.sleep(min(1.0, self.limits.step_timeout_s / 4))
            if time.monotonic() > self.deadline:
                self._end()

    def _end(self) -> None:
        """Write the stacks, let one process report which ones are missing, and end this process."""
        task = self.task  # the main thread may go on meanwhile
        rank = self.processes.rank
        try:
            self._write_stacks(task)
            missing, present = self._wait_for_stacks()
            # The first process may be the one that hangs.
            if rank == min(present, default=rank):
                stacks = "all stacks"
                if missing:
                    names = [f"process {number} on {self.hosts[number]}" for number in missing]
                    stacks = f"{', '.join(names)} did not come, stacks of the others"
                say(
                    f"olmo-sparsity: {task} took more than engine.{self.setting}={self.limit_s}: "
                    f"{stacks} are in {self.folder}; the same command goes on"
                )
            self.release()
        finally:
            # Other threads wait in collectives that cannot be interrupted.
            os._exit(EXIT_LOST_PROCESS)

    def _path(self, rank: int) -> Path:
        """Return the file for the stacks of a process."""
        return self.folder / f"process{rank:05d}.txt"

    def _write_stacks(self, task: str) -> None:
        """Write the stacks of all threads of this process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(self.processes.rank)
        partial = path.with_suffix(".tmp")
        with partial.open("w") as file:
            process = f"process {os.getpid()} on {socket.gethostname()}"
            # Flushed, as faulthandler writes to the descriptor itself.
            print(f"{task}, {process}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        partial.rename(path)
        self._write_flight_recorder()

    def _write_flight_recorder(self) -> None:
        """Write NCCL's last collectives, for PyTorch's `torchfrtrace`."""
        import torch

        if torch.cuda.is_available():
            trace = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
            (self.folder / f"nccl_trace_rank_{self.processes.rank}").write_bytes(trace)

    def _wait_for_stacks(self) -> tuple[list[int], list[int]]:
        """Return the ranks of processes that wrote no stacks, and of those that did."""
        deadline = time.monotonic() + GRACE_S
        ranks = range(self.processes.world_size)
        while time.monotonic() < deadline and not all(self._path(r).exists() for r in ranks):
            time.sleep(0.1)
        present = [rank for rank in ranks if self._path(rank).exists()]
        return [rank for rank in ranks if rank not in present], present
