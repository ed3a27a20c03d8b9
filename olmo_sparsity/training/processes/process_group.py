"""Connect to the other processes of a launch, and make PyTorch's process group.

    with connect(limits) as processes:    # waits until all have come; Processes(rank=2, …)
        train(config, processes)

    MASTER_ADDR, MASTER_PORT ─> a store in the first process, where all write that they have come
                             ─> process group: NCCL for tensors of GPUs, gloo for those of CPUs
                             ─> a gloo group for messages (distributed.py)

The commands call `connect`. DDP, `fully_shard` and DeepSpeed need a process group also for a single
process, which `start_alone` makes.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from olmo_sparsity.base.errors import ConfigError, UserError, one_line
from olmo_sparsity.base.launch import EXIT_UNREACHED, Launch, read_launch
from olmo_sparsity.config.sections import EngineConfig
from olmo_sparsity.training.processes.distributed import LostProcess, Processes
from olmo_sparsity.training.processes.network_interface import choose_interface


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
    meeting_point = _read_meeting_point()
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
        store = _open_store(launch, meeting_point, timedelta(seconds=meeting_limit_s))
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


class _MeetingPoint(NamedTuple):
    """Where all processes meet: at the first one."""

    address: str
    port: str


def _read_meeting_point() -> _MeetingPoint:
    """Return address and port of the first process, as torchrun, deepspeed and slurm/job.sh set
    them."""
    address = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    if not address or not port:
        missing = "MASTER_PORT" if address else "MASTER_ADDR"
        raise ConfigError(
            f"{missing} is not set, which all processes must share: launch with torchrun, "
            "deepspeed or slurm/job.sh"
        )
    return _MeetingPoint(address, port)


def _open_store(launch: Launch, meeting_point: _MeetingPoint, limit: timedelta) -> dist.Store:
    """Return the key-value store of the first process, through which all find each other, once all
    have come.

    Args:
        limit: How long to wait for them.
    """
    # torchrun keeps a store in its own process, to which also the first of ours connects.
    is_host = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # `wait_for_workers` would time out without saying who is missing. `_wait_for_all` does.
    store = dist.TCPStore(
        meeting_point.address,
        int(meeting_point.port),
        is_master=is_host,
        timeout=limit,
        wait_for_workers=False,
    )
    # torchrun keeps one store for all its attempts, so each attempt has names of its own in it.
    own_store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), store)
    _wait_for_all(own_store, launch, limit)
    choose_interface(own_store, launch, meeting_point.address)
    return own_store


def _wait_for_all(store: dist.Store, launch: Launch, limit: timedelta) -> None:
    """Wait until all processes have come. Raise LostProcess, which names those that have not."""
    store.set(f"process {launch.rank}", socket.gethostname())
    names = [f"process {rank}" for rank in range(launch.world_size)]
    try:
        store.wait(names, limit)
    except dist.DistStoreError:
        missing = [name for name in names if not store.check([name])]
        raise LostProcess(
            f"{', '.join(missing)} of {launch.world_size} did not come within "
            f"engine.meeting_timeout_s={limit.total_seconds():.0f}"
        ) from None


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
