"""Connect the processes of a run: process group, small messages over gloo, and common errors.

    with connect(limits) as processes:
        with processes.agree():      # what any process may fail at
            ...

An error of one process must stop all of them, and be reported once. So what may fail runs inside
`processes.agree()`, which raises on all processes together. A process that dies or hangs is noticed
by the others as `LostProcess`, or by watchdog.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from olmo_sparsity.base.errors import ConfigError, ReportedElsewhere, UserError, one_line
from olmo_sparsity.base.launch import Launch, read_launch
from olmo_sparsity.config.sections import EngineConfig
from olmo_sparsity.training.interface import choose_interface


class LostProcess(Exception):
    """Another process of this run has died or does not respond."""


@dataclass(frozen=True)
class Processes(Launch):
    """The rank of this process, and communication with the others. A single process sends
    nothing."""

    group: Any = None
    """A gloo group of all processes, for any backend of the gradients."""

    @property
    def is_first(self) -> bool:
        """Whether this process prints, and writes files that are written once."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def add_up(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sums of these numbers over all processes, computed in place on the CPU."""
        if self.world_size > 1:
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def sum(self, number: int) -> int:
        """Return the sum of a number over all processes."""
        return number if self.world_size == 1 else int(self.add_up(torch.tensor(number)))

    def first_text(self, text: str) -> str:
        """Return the first text that is not empty, by rank. While there is none, processes exchange
        one number alone, so that it can be called each step."""
        if not self.sum(bool(text)):
            return ""
        return next(filter(None, self.gather(text)))

    @contextlib.contextmanager
    def agree(self) -> Iterator[None]:
        """Run the body on all processes, then wait for all. If some of them had an error, all
        raise: the first of these by rank its error, and the others `ReportedElsewhere`, which is
        silent."""
        error: UserError | None = None
        try:
            yield
        except UserError as caught:
            error = caught
        except OSError as caught:
            if self.world_size == 1 or caught.filename is None:
                raise
            error = UserError(f"{caught.filename}: {caught.strerror}")
            error.errno = caught.errno
        reports = self.gather(None if error is None else (str(error), error.diverged_at))
        failed = [rank for rank, report in enumerate(reports) if report is not None]
        if not failed:
            return
        if error is None or self.rank != failed[0]:
            error = ReportedElsewhere()
        elif len(failed) < self.world_size:
            where = f"process {self.rank} of {self.world_size} on {socket.gethostname()}"
            error.args = (f"{where}: {error}",)
        error.diverged_at = reports[failed[0]][1]  # so that all processes act alike
        raise error


@contextlib.contextmanager
def connect(limits: EngineConfig | None = None) -> Iterator[Processes]:
    """Connect to the other processes of this launch. An error that means that one of them died is
    raised as LostProcess."""
    launch = read_launch()
    limits = limits or EngineConfig()
    # Longer than the watchdog waits, which names the process that did not come.
    patience = timedelta(seconds=limits.work_timeout_s + 60)
    if launch.world_size > 1:
        _meet(launch, limits.meeting_timeout_s, patience)
    try:
        yield among(launch, patience) if launch.world_size > 1 else Processes()
    except (RuntimeError, OSError) as error:
        if launch.world_size == 1 or not _means_lost(error):
            raise
        raise LostProcess(one_line(error)) from error
    if dist.is_initialized():
        # The DDP engine must be deleted by now, as after `train`: one that outlives its group
        # sometimes waits for gloo's threads forever. For DeepSpeed see cli.entry.
        dist.destroy_process_group()


def among(launch: Launch, patience: timedelta | None = None) -> Processes:
    """Return the processes of an initialised process group, with a gloo group for messages."""
    group = (
        dist.group.WORLD
        if dist.get_backend() == "gloo"
        else dist.new_group(backend="gloo", timeout=patience)
    )
    return Processes(**asdict(launch), group=group)


def start_alone() -> None:
    """Make a process group of this process alone, unless there is a group: DDP, `fully_shard` and
    DeepSpeed need one."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)


def _meet(launch: Launch, limit_s: int, patience: timedelta) -> None:
    """Initialise the process group of a launch.

    limit_s: Seconds in which all processes must come.
    patience: How long a collective may take.
    """
    address, port = _meeting_point()
    # DeepSpeed reads these itself, and some launchers set only some of them.
    os.environ |= {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # for watchdog.py
    is_host = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=limit_s)
    try:
        store: dist.Store = dist.TCPStore(
            address, int(port), None, is_host, timeout=limit, wait_for_workers=False
        )
        # torchrun keeps one store for all its attempts.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), store)
        _wait_for_all(store, launch, limit)
        choose_interface(store, launch, address)
        dist.init_process_group(
            _backend(),
            timeout=patience,
            world_size=launch.world_size,
            rank=launch.rank,
            store=store,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"process {launch.rank} of {launch.world_size} did not reach the others at "
            f"MASTER_ADDR={address} (of the first process), MASTER_PORT={port} (a free one): "
            f"{reason}"
        ) from None


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


def _meeting_point() -> tuple[str, str]:
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
    return address, port


def _means_lost(error: BaseException) -> bool:
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
