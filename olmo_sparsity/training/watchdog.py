"""End a run whose processes wait for one that does not come: stacks, one line, exit code 76.

A thread of each process compares the time with the limit of the current task (`expect`). At a
time-out each process writes its stacks into `stacks/` of the run folder, and how many collectives
it has begun. Two kinds of processes keep the others waiting:

    no file         it is stopped as a whole, or its machine is gone
    fewest begun    its thread still runs, but its work hangs before the collective in which the
                    others wait: in a read, a sleep, a computation

If these are on one node, slurm/job.sh is told which, and excludes it from the next start. A GPU
that hangs inside a collective holds up all alike. Then PyTorch's flight recorder tells more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.base.launch import EXIT_LOST_PROCESS, node_name, suspect
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.sections import EngineConfig
from olmo_sparsity.training.distributed import Processes

GRACE_S = 8.0
"""Seconds within which all processes reach a time-out and write their stacks."""

REPORT_S = 3.0
"""Seconds that the others leave to the process that reports."""

DISK_PATIENCE_S = 30.0
"""Seconds after which a process ends whether its stacks are written or not: a network disk that
hangs may be what the run waits for, and blocks whoever writes to it."""


class LateProcesses(NamedTuple):
    """The processes for which the others waited."""

    ranks: list[int]
    """Empty if no process is behind the others."""

    description: str
    """Names them, and says whose stacks there are."""


class Task(NamedTuple):
    """What this process does now. It is one object, because the main thread may go on to another
    task while the watching thread reads it."""

    name: str
    setting: str
    """The setting of `engine` that limits it."""

    limit_s: float
    deadline: float
    """The time, by `time.monotonic`, at which it must have ended."""


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
        starts = processes.gather((time.strftime("%Y%m%d-%H%M%S"), node_name()))
        self.folder = run_folder / "stacks" / starts[0][0]
        self.nodes = [node for _, node in starts]
        """The name of the node of each process."""

        threading.Thread(target=self._watch, daemon=True).start()

    def expect(self, task: str, setting: str) -> None:
        """Expect this process to finish a task, whose limit is this setting of `engine`. The next
        call, or `stop`, ends the task."""
        limit_s = getattr(self.limits, setting)
        self.task = Task(task, setting, limit_s, time.monotonic() + limit_s)

    def stop(self) -> None:
        """Stop watching."""
        self.task = self.task._replace(deadline=float("inf"))
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        """End the process if its task takes too long. Runs in a thread."""
        while self.task.deadline < float("inf"):
            # If this thread is blocked, too, one without Python prints stacks and ends the process.
            faulthandler.dump_traceback_later(self.limits.work_timeout_s + 60, exit=True)
            time.sleep(min(1.0, self.limits.step_timeout_s / 4))
            task = self.task
            if time.monotonic() > task.deadline:
                self._end(task)

    def _end(self, task: Task) -> None:
        """Report that a task took too long, and end this process."""
        late = f"olmo-sparsity: {task.name} took more than engine.{task.setting}={task.limit_s}"
        try:
            reporting = threading.Thread(target=self._report, args=(task.name, late), daemon=True)
            reporting.start()
            reporting.join(DISK_PATIENCE_S)
            if reporting.is_alive() and self.processes.is_first:
                say(f"{late}: the disk of {self.folder} takes no stacks; the same command goes on")
        finally:
            # Other threads wait in collectives that cannot be interrupted.
            os._exit(EXIT_LOST_PROCESS)

    def _report(self, task: str, late: str) -> None:
        """Write the stacks, let one process say which ones are missing or behind, and unlock the
        run folder. `late`: which task took too long, in words."""
        rank = self.processes.rank
        self._write_stacks(task)
        present = self._wait_for_stacks()
        # The first process may be the one that hangs.
        if rank == min(present, default=rank):
            late_processes = self._find_late(present)
            stacks = f"{late_processes.description} are in {self.folder}"
            say(f"{late}: {stacks}; the same command goes on")
            nodes = {self.nodes[late_rank] for late_rank in late_processes.ranks}
            if len(nodes) == 1:
                suspect(nodes.pop())
        else:
            # The end of this process closes its connections. Then the work of the reporting process
            # fails, and may end it before it has reported.
            time.sleep(REPORT_S)
        self.release()

    def _find_late(self, present: list[int]) -> LateProcesses:
        """Return the processes for which the others waited. `present`: the ranks of those that
        wrote their stacks."""
        missing = [rank for rank in range(self.processes.world_size) if rank not in present]
        if missing:
            names = self._name(missing)
            return LateProcesses(missing, f"{names} did not come, stacks of the others")
        num_begun = {}
        for rank in present:
            with contextlib.suppress(OSError, ValueError):  # cannot be read now
                num_begun[rank] = self._read_num_begun(rank)
        fewest = min(num_begun.values(), default=0)
        behind = [rank for rank, number in num_begun.items() if number == fewest]
        if len(behind) == len(num_begun):
            return LateProcesses([], "all processes wait in the same collective, all stacks")
        # A process that shares weights with a late one waits for it, so it may be behind the rest,
        # too. But it has begun one collective more than the late one: the one in which it waits.
        names = self._name(behind)
        return LateProcesses(behind, f"{names} did not get to where the others wait, all stacks")

    def _name(self, ranks: list[int]) -> str:
        """Return the names of processes and their nodes."""
        return ", ".join(f"process {rank} on {self.nodes[rank]}" for rank in ranks)

    def _num_begun(self) -> int:
        """Return how many collectives this process has begun, in all of its groups: messages, sums
        of gradients, and weights that the processes of a node share."""
        import torch.distributed as dist

        num_begun = 0
        with contextlib.suppress(AttributeError):  # another PyTorch
            groups: list[Any] = [*dist.distributed_c10d._world.pg_map]
            for group in groups:
                with contextlib.suppress(RuntimeError):  # one that cannot tell
                    num_begun += group._get_sequence_number_for_group()
        return num_begun

    def _read_num_begun(self, rank: int) -> int:
        """Return how many collectives a process has begun, which is in the first line of its
        stacks."""
        with self._path(rank).open() as file:
            return int(file.readline().rpartition(" ")[2])

    def _path(self, rank: int) -> Path:
        """Return the file for the stacks of a process."""
        return self.folder / f"process{rank:05d}.txt"

    def _write_stacks(self, task: str) -> None:
        """Write the stacks of all threads of this process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(self.processes.rank)
        partial = path.with_suffix(".tmp")
        with partial.open("w") as file:
            process = f"process {os.getpid()} on {node_name()}"
            # Flushed, as faulthandler writes to the descriptor itself.
            begun = f"collectives begun: {self._num_begun()}"
            print(f"{task}, {process}, {begun}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        partial.rename(path)
        self._write_flight_recorder()

    def _write_flight_recorder(self) -> None:
        """Write NCCL's last collectives, for PyTorch's `torchfrtrace`."""
        import torch

        if torch.cuda.is_available():
            trace = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
            (self.folder / f"nccl_trace_rank_{self.processes.rank}").write_bytes(trace)

    def _wait_for_stacks(self) -> list[int]:
        """Return the ranks of the processes that wrote their stacks."""
        deadline = time.monotonic() + GRACE_S
        ranks = range(self.processes.world_size)
        while time.monotonic() < deadline and not all(self._path(r).exists() for r in ranks):
            time.sleep(0.1)
        return [rank for rank in ranks if self._path(rank).exists()]
