"""End a run whose processes wait for one that does not come: stacks, one line, exit code 76.

A thread of each process compares the time with the limit of what it does now (`expect`). At a
time-out all processes that still run write their stacks into `stacks/` of the run folder; the one
whose file is not there is the one that did not come."""

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
"""Processes reach a time-out within so many seconds of each other."""


class Watchdog:
    """`release` is called before this process ends: it unlocks the run folder."""

    def __init__(
        self,
        run_folder: Path,
        limits: EngineConfig,
        processes: Processes,
        release: Callable[[], None] = lambda: None,
    ) -> None:
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

    def expect(self, what: str, limit: str) -> None:
        """From now on do `what`, within the limit of this setting of `engine`."""
        self.doing = what
        self.setting = limit
        self.limit_s = getattr(self.limits, limit)
        self.deadline = time.monotonic() + self.limit_s

    def stop(self) -> None:
        self.deadline = float("inf")
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while self.deadline < float("inf"):
            # Should this thread be blocked too, one without Python prints stacks, and ends it all.
            faulthandler.dump_traceback_later(self.limits.work_timeout_s + 60, exit=True)
            time.sleep(min(1.0, self.limits.step_timeout_s / 4))
            if time.monotonic() > self.deadline:
                self._end()

    def _end(self) -> None:
        """Write the stacks, let one process say who did not come, and end this process."""
        doing = self.doing  # another thread may go on meanwhile
        rank = self.processes.rank
        try:
            self._write_stacks(doing)
            missing, present = self._wait_for_stacks()
            # The first process may be the one that hangs.
            if rank == min(present, default=rank):
                stacks = "all stacks"
                if missing:
                    names = [f"process {number} on {self.hosts[number]}" for number in missing]
                    stacks = f"{', '.join(names)} did not come, stacks of the others"
                say(
                    f"olmo-sparsity: {doing} took more than engine.{self.setting}={self.limit_s}: "
                    f"{stacks} are in {self.folder}; the same command goes on"
                )
            self.release()
        finally:
            # Other threads wait in collectives that cannot be interrupted.
            os._exit(EXIT_LOST_PROCESS)

    def _path(self, rank: int) -> Path:
        return self.folder / f"process{rank:05d}.txt"

    def _write_stacks(self, doing: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(self.processes.rank)
        partial = path.with_suffix(".tmp")
        with partial.open("w") as file:
            where = f"process {os.getpid()} on {socket.gethostname()}"
            # Flushed, as faulthandler writes to the descriptor itself.
            print(f"{doing}, {where}", file=file, flush=True)
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
        """Return the processes that wrote no stacks, and those that did."""
        deadline = time.monotonic() + GRACE_S
        ranks = range(self.processes.world_size)
        while time.monotonic() < deadline and not all(self._path(r).exists() for r in ranks):
            time.sleep(0.1)
        present = [rank for rank in ranks if self._path(rank).exists()]
        return [rank for rank in ranks if rank not in present], present
