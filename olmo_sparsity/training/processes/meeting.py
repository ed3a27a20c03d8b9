"""Have all processes of a launch meet at a key-value store, before any collective is possible.

    MASTER_ADDR=node1 MASTER_PORT=29500 ─> read_meeting_point ─> MeetingPoint("node1", "29500")
                                        ─> open_store

The first process, or torchrun, hosts the store. With three processes, of which the last is late, it
holds

    process 0    "node1"
    process 1    "node1"

until the limit is reached, and then processes 0 and 1 raise `LostProcess`: process 2 did not come.
process_group.py calls both functions, and makes the process group with the store.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.launch import Launch
from olmo_sparsity.training.processes.distributed import LostProcess
from olmo_sparsity.training.processes.network_interface import choose_interface


class MeetingPoint(NamedTuple):
    """Where all processes meet: at the first one."""

    address: str
    port: str


def read_meeting_point() -> MeetingPoint:
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
    return MeetingPoint(address, port)


def open_store(launch: Launch, meeting_point: MeetingPoint, limit: timedelta) -> dist.Store:
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
