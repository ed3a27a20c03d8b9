"""Read the launcher's environment variables, handle signals, and name the exit codes.

    started by                        read from                               read_launch()
    torchrun, deepspeed, accelerate   RANK, WORLD_SIZE, LOCAL_RANK, …         Launch(3, 8, 3, 4)
    srun                              SLURM_PROCID, SLURM_STEP_NUM_TASKS, …   Launch(3, 8, 3, 4)
    neither                                                                   Launch(0, 1, 0, 1)

`Launch(3, 8, 3, 4)` is the fourth of 8 processes, and the fourth of 4 on its machine. The exit
codes, and the two files of `forget_deaths` and `suspect`, tell slurm/job.sh what a job should do
next. Imports nothing of ours but errors.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.base.errors import ConfigError

EXIT_STOPPED = 75
"""The exit code of a command that a signal has stopped. The same command resumes."""

EXIT_LOST_PROCESS = 76
"""The exit code after another process of the run died or did not come. The same command resumes."""

EXIT_UNREACHED = 69
"""The exit code of a process that could not reach the first one at the start. The same command
resumes. `EX_UNAVAILABLE` of sysexits.h. It differs from EXIT_LOST_PROCESS, so that slurm/job.sh can
tell a node that reached nobody from those that waited for it."""

EXIT_FAULTY_NODE = 71
"""The exit code after the weights on one node came to differ from those on all others. The same
command resumes from the last checkpoint. `EX_OSERR` of sysexits.h."""

DEATHS_FILE = "OLMO_SPARSITY_DEATHS"
"""The environment variable by which slurm/job.sh names the file in which it counts how often a job
has died."""

SUSPECT_FILE = "OLMO_SPARSITY_SUSPECT"
"""The environment variable by which slurm/job.sh names the file for the node that has failed."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""Signals at which a command saves and stops: from SLURM and `kill`, from Ctrl-C, and the one that
our SLURM scripts ask for before a time limit."""


# --- the place of this process --------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """The place of this process among the processes of its run; by default it is the only one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The rank among the processes of this machine, which is also the index of its GPU."""

    local_world_size: int = 1
    """The number of processes of the run on this machine."""


def read_launch() -> Launch:
    """Return the rank of this process and the number of processes, as `torchrun`, `deepspeed`,
    `accelerate launch` or a bare `srun` have set them. Without a launcher this is rank 0 of 1."""
    # A launcher comes first: it may itself be a task of `srun`, which has started it once a node.
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        launch = _read_launcher()
    # Both are set inside `srun` only. The batch script around it has SLURM_PROCID=0 alone, and is
    # not a task of the job.
    elif "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:
        launch = _read_srun()
    else:
        launch = Launch()
    if not 0 <= launch.rank < launch.world_size:
        raise ConfigError(
            f"RANK={launch.rank} must be 0 or more and below WORLD_SIZE={launch.world_size}; "
            "start the processes with torchrun, deepspeed or srun, which set both"
        )
    return launch


def _read_launcher() -> Launch:
    """Return the launch that a launcher other than srun has set."""
    for name, partner in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in os.environ:
            raise ConfigError(
                f"the environment sets {partner}, but not {name}; a launcher sets both: "
                f"unset {partner} to run one process"
            )
    # Launchers that leave out LOCAL_RANK and LOCAL_WORLD_SIZE start one process per machine.
    # DeepSpeed's sets LOCAL_SIZE in place of LOCAL_WORLD_SIZE.
    local_rank = _read_number("LOCAL_RANK", 0)
    local_size = max(_read_number("LOCAL_SIZE", 1), local_rank + 1)
    return Launch(
        rank=_read_number("RANK"),
        world_size=_read_number("WORLD_SIZE"),
        local_rank=local_rank,
        local_world_size=_read_number("LOCAL_WORLD_SIZE", local_size),
    )


def _read_srun() -> Launch:
    """Return the launch that srun has set for this task."""
    tasks_of_nodes = _expand_task_counts(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return Launch(
        rank=_read_number("SLURM_PROCID"),
        world_size=_read_number("SLURM_STEP_NUM_TASKS", _read_number("SLURM_NTASKS", 1)),
        local_rank=_read_number("SLURM_LOCALID", 0),
        local_world_size=tasks_of_nodes[_read_number("SLURM_NODEID", 0)],
    )


def _expand_task_counts(counts: str) -> list[int]:
    """Return [2, 2, 2, 1] for SLURM's `2(x3),1`: two tasks on each of three nodes, one on the
    fourth."""
    expanded = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        expanded += [int(tasks)] * int(times or 1)
    return expanded


def _read_number(name: str, default: int | None = None) -> int:
    """Return the number in an environment variable, or the default if it is not set."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"{name}={text} in the environment must be a whole number; unset it, or start with "
            "torchrun, deepspeed or srun, which set it"
        ) from None


# --- what slurm/job.sh reads ----------------------------------------------------------------------


def forget_deaths() -> None:
    """Let the job count its deaths from 0 again. It is called once the command has made
    progress."""
    path = os.environ.get(DEATHS_FILE)
    if path:
        with contextlib.suppress(OSError):  # there may be no file, or this machine cannot see it
            os.unlink(path)


def node_name() -> str:
    """Return the name of this machine: within SLURM, the name by which SLURM knows it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def suspect(node: str) -> None:
    """Tell the job which node kept the others waiting, or has wrong weights, so that the next start
    can leave it out."""
    path = os.environ.get(SUSPECT_FILE)
    if path:
        with contextlib.suppress(OSError):  # the next start then takes the node again
            Path(path).write_text(f"{node}\n")


# --- signals --------------------------------------------------------------------------------------


@contextlib.contextmanager
def handling(signals: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Let `handler` handle these signals inside the block. Afterwards the earlier handlers do so
    again."""
    earlier = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier_handler in earlier.items():
            signal.signal(number, earlier_handler)
