"""Read this process's rank and the number of processes from the launcher's variables.

Place in the flow: beneath training and analysis; no torch. `torchrun`, `deepspeed` and `accelerate
launch` set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE; under a bare `srun` they are taken from
SLURM's variables. Without any, this is rank 0 of 1.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine, and the number of its GPU."""

    local_world_size: int = 1
    """Processes on this machine."""


def read_launch() -> Launch:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if any(name in os.environ for name in names[:2]):
        missing = [name for name in names[:2] if name not in os.environ]
        if missing:
            raise ConfigError(f"the launcher sets some of {', '.join(names)}, but not {missing[0]}")
        rank, world_size = _number("RANK"), _number("WORLD_SIZE")
        # Launchers that leave these two out start one process per machine.
        local_rank = _number("LOCAL_RANK", 0)
        launch = Launch(rank, world_size, local_rank, _number("LOCAL_WORLD_SIZE", local_rank + 1))
    elif "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:  # inside srun, not sbatch
        # 2(x3),1: two tasks on each of three nodes, one on the fourth.
        groups = re.findall(
            r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
        )
        per_node = [int(tasks) for tasks, times in groups for _ in range(int(times or 1))]
        launch = Launch(
            _number("SLURM_PROCID"),
            _number("SLURM_STEP_NUM_TASKS", _number("SLURM_NTASKS", 1)),
            _number("SLURM_LOCALID", 0),
            per_node[_number("SLURM_NODEID", 0)],
        )
    else:
        launch = Launch()
    if not 0 <= launch.rank < launch.world_size:
        raise ConfigError(f"RANK={launch.rank} must be below WORLD_SIZE={launch.world_size}")
    return launch


def launch_id() -> str:
    """Equal for the processes of one launch, and different from all other running launches."""
    get = os.environ.get
    if read_launch().world_size == 1:
        return f"{socket.gethostname()} {os.getpid()}"
    if "SLURM_STEP_ID" in os.environ:
        # Also with a torchrun on each node. A requeued job counts its steps from 0 again.
        return f"slurm {get('SLURM_JOB_ID')}.{get('SLURM_STEP_ID')}.{get('SLURM_RESTART_COUNT', 0)}"
    # torchrun, deepspeed, accelerate: the rendezvous. torchrun's run ID is often "none".
    address = get("MASTER_ADDR", "localhost")
    if address in ("localhost", "127.0.0.1", "::1"):
        address = socket.gethostname()
    return f"{get('TORCHELASTIC_RUN_ID', '')} {address}:{get('MASTER_PORT', '')}"


def machine_id() -> str:
    """Identifies a boot of a machine and a PID namespace, within which PIDs are unique."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def process_start(pid: int) -> str | None:
    """The start time of a process in the kernel's count, which with the PID identifies it. None if
    there is no such process (or only a zombie), or no /proc."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name}={text} in the environment must be a whole number") from None
