"""Connect to the other processes of a launch, and make PyTorch's process group.

    with connect(limits) as processes:    # waits until all have come; Processes(rank=2, …)
        train(config, processes)

    connect
      ─> read_launch         rank and number of processes, from the launcher's variables
      ─> open_store          a key-value store where all write that they have come (meeting.py)
      ─> init_process_group  collectives: NCCL for tensors of GPUs, gloo for those of CPUs
      ─> processes_of_group  `Processes`, with a gloo group for messages (distributed.py)

The commands call `connect`. DDP, `fully_shard` and DeepSpeed need a process group also for a single
process, which `start_alone` makes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from olmo_sparsity.base.errors import UserError, one_line
from olmo_sparsity.base.launch import EXIT_UNREACHED, Launch, read_launch
from olmo_sparsity.config.sections import EngineConfig
from olmo_sparsity.training.processes.distributed import LostProcess, Processes
from olmo_sparsity.training.processes.meeting import open_store, read_meeting_point


@contextlib.contextmanager
def connect(limits: EngineConfig | None = None) -> Iterator[Processes]:
    """Connect to the other processes of this launch. An error that means that one of them died is
    raised as LostProcess."""
    launch = read_launch()
    limits = limits or EngineConfig()
    # Longer than the watchdog waits, which names the process that did not come. A time-out of a
    # collective says only that one did not.
    collective_limit = timedelta(seconds=limits.work_timeout_s + 60)
    if launch.world_size > 1:
        _init_process_group(launch, limits.meeting_timeout_s, collective_limit)
    try:
        if launch.world_size > 1:
            yield processes_of_group(launch, collective_limit)
        else:
            yield Processes()
    except (RuntimeError, OSError) as error:
        if launch.world_size == 1 or not _is_broken_connection(error):
            raise
        raise LostProcess(one_line(error)) from error
    if dist.is_initialized():
        # The DDP engine must be deleted by now, as after `train`: one that outlives its group
        # sometimes waits for gloo's threads forever. For DeepSpeed see cli.entry.
        dist.destroy_process_group()


def _init_process_group(launch: Launch, meeting_limit_s: int, collective_limit: timedelta) -> None:
    """Initialise the process group of a launch.

    Args:
        meeting_limit_s: Seconds in which all processes must come.
        collective_limit: How long a collective may take.
    """
    meeting_point = read_meeting_point()
    # DeepSpeed reads these itself, and some launchers set only some of them.
    os.environ |= {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "MASTER_ADDR": meeting_point.address,
        "MASTER_PORT": meeting_point.port,
    }
    # NCCL's last 2000 collectives, which watchdog.py writes after a time-out.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")

    try:
        store = open_store(launch, meeting_point, timedelta(seconds=meeting_limit_s))
        dist.init_process_group(
            _backend(),
            timeout=collective_limit,
            world_size=launch.world_size,
            rank=launch.rank,
            store=store,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        unreached = UserError(
            f"process {launch.rank} of {launch.world_size} did not reach the others at "
            f"MASTER_ADDR={meeting_point.address} (of the first process), "
            f"MASTER_PORT={meeting_point.port} (a free one): {reason}"
        )
        # The address may be right: the first process may be late or dead, the network away, or
        # the port taken. So a job tries again.
        unreached.exit_code = EXIT_UNREACHED
        raise unreached from None


def _backend() -> str:
    """Return the backend: NCCL for tensors on a GPU, gloo for tensors on the CPU."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def processes_of_group(launch: Launch, collective_limit: timedelta | None = None) -> Processes:
    """Return the processes of an initialised process group, with a gloo group for messages."""
    if dist.get_backend() == "gloo":
        group = dist.group.WORLD
    else:
        # NCCL would send a message through the GPU, and let it wait behind what was launched.
        group = dist.new_group(backend="gloo", timeout=collective_limit)
    return Processes(**asdict(launch), group=group)


def _is_broken_connection(error: BaseException) -> bool:
    """Return whether an error means that a connection broke. gloo and NCCL raise RuntimeError, so
    only the message tells."""
    words = (
        "closed by peer",
        "reset by peer",
        "Broken pipe",
        "Timed out",
        "timed out",
        "Read error",
    )
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def start_alone() -> None:
    """Make a process group of this process alone, unless there is a group: DDP, `fully_shard` and
    DeepSpeed need one."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)
