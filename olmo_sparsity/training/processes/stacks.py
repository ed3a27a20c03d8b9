"""Write the stacks of processes that wait too long, and find the one that they wait for.

Each process writes a file, whose first line says how many collectives it has begun:

    stacks/20260301-120000/process00000.txt    "step 7, …, collectives begun: 41"
                           process00001.txt    "step 7, …, collectives begun: 40"    the late one

Two kinds of processes keep the others waiting:

    no file         it is stopped as a whole, or its machine is gone
    fewest begun    its thread still runs, but its work hangs before the collective in which the
                    others wait: in a read, a sleep, a computation

A GPU that hangs inside a collective holds up all alike. Then PyTorch's flight recorder tells more.

Called by watchdog.py at a time-out.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.base.launch import node_name
from olmo_sparsity.training.processes.distributed import Processes

GRACE_S = 8.0
"""Seconds within which all processes reach a time-out and write their stacks."""


class LateProcesses(NamedTuple):
    """The processes for which the others waited."""

    ranks: list[int]
    """Empty if no process is behind the others."""

    description: str
    """Names them, and says whose stacks there are: "process 3 on node1 did not come, stacks of the
    others". watchdog.py goes on with the folder of the stacks."""


class Stacks:
    """The files of one start, in a folder that all processes share."""

    def __init__(self, folder: Path, processes: Processes, nodes: Sequence[str]) -> None:
        """Name the folder; nothing is written yet.

        Args:
            nodes: The name of the node of each process, by rank.
        """
        self.folder = folder
        self.processes = processes
        self.nodes = nodes

    def write(self, task: str) -> None:
        """Write the stacks of all threads of this process, which has taken too long for a task."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(self.processes.rank)
        partial = path.with_suffix(".tmp")
        with partial.open("w") as file:
            process = f"process {os.getpid()} on {node_name()}"
            begun = f"collectives begun: {_count_begun()}"
            # Flushed, as faulthandler writes to the descriptor itself.
            print(f"{task}, {process}, {begun}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        partial.rename(path)  # so that another process sees all of it or nothing
        self._write_flight_recorder()

    def _write_flight_recorder(self) -> None:
        """Write NCCL's last collectives, for PyTorch's `torchfrtrace`."""
        import torch

        if torch.cuda.is_available():
            # Only builds with NCCL have this function, and PyTorch's stubs have it in none.
            trace = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
            (self.folder / f"nccl_trace_rank_{self.processes.rank}").write_bytes(trace)

    def wait_for_all(self) -> list[int]:
        """Wait until all processes have written their stacks, but not longer than `GRACE_S`. Return
        the ranks of those that have."""
        deadline = time.monotonic() + GRACE_S
        ranks = range(self.processes.world_size)
        while time.monotonic() < deadline and not all(self._path(r).exists() for r in ranks):
            time.sleep(0.1)
        return [rank for rank in ranks if self._path(rank).exists()]

    def find_late(self, reporting_ranks: Sequence[int]) -> LateProcesses:
        """Return the processes for which the others waited.

        Args:
            reporting_ranks: The ranks of the processes that wrote their stacks.
        """
        ranks = range(self.processes.world_size)
        missing = [rank for rank in ranks if rank not in reporting_ranks]
        if missing:
            names = self._name(missing)
            return LateProcesses(missing, f"{names} did not come, stacks of the others")

        num_begun_of_rank = {}
        for rank in reporting_ranks:
            with contextlib.suppress(OSError, ValueError):  # cannot be read now
                num_begun_of_rank[rank] = self._read_num_begun(rank)
        fewest = min(num_begun_of_rank.values(), default=0)
        behind = [rank for rank, num_begun in num_begun_of_rank.items() if num_begun == fewest]
        if len(behind) == len(num_begun_of_rank):
            return LateProcesses([], "all processes wait in the same collective, all stacks")
        # A process that shares weights with a late one waits for it, so it may be behind the rest,
        # too. But it has begun one collective more than the late one: the one in which it waits.
        names = self._name(behind)
        return LateProcesses(behind, f"{names} did not get to where the others wait, all stacks")

    def _name(self, ranks: Sequence[int]) -> str:
        """Return the names of processes and their nodes."""
        return ", ".join(f"process {rank} on {self.nodes[rank]}" for rank in ranks)

    def _read_num_begun(self, rank: int) -> int:
        """Return how many collectives a process has begun, which is at the end of the first line of
        its stacks."""
        with self._path(rank).open() as file:
            return int(file.readline().rpartition(" ")[2])

    def _path(self, rank: int) -> Path:
        """Return the file for the stacks of a process."""
        return self.folder / f"process{rank:05d}.txt"


def _count_begun() -> int:
    """Return how many collectives this process has begun, in all of its groups: messages, sums of
    gradients, and weights that the processes of a node share."""
    import torch.distributed as dist

    num_begun = 0
    with contextlib.suppress(AttributeError):  # another PyTorch
        groups: list[Any] = [*dist.distributed_c10d._world.pg_map]
        for group in groups:
            with contextlib.suppress(RuntimeError):  # one that cannot tell
                num_begun += group._get_sequence_number_for_group()
    return num_begun
