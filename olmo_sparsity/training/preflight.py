"""What must hold before the first step, so that a job fails in its first minute and not in its
last: a disk that all processes share and that has room, shards that can be read, the GPUs that were
asked for, and a run that has not died twice in the same place.

Place in the flow: what training/loop.py asks before it begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from olmo_sparsity.config import RunConfig
from olmo_sparsity.config_file import flatten
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.errors import ConfigError, DataError, UserError
from olmo_sparsity.files import write_atomically
from olmo_sparsity.json_files import read_json
from olmo_sparsity.model.checkpoint_files import list_checkpoints
from olmo_sparsity.training.checkpoint import step_of
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.run_folder import read_metrics

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: the weight and Adam's two moments, in fp32, whatever the engine."""


# --- devices ------------------------------------------------------------------------------------


def check_devices(asked: str, device: torch.device, processes: Processes) -> None:
    """GPUs seen = GPUs asked, and no two processes on one."""
    with processes.agree():
        _check_own_device(asked, device)
    name = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"GPU {getattr(properties, 'uuid', device.index)} of {socket.gethostname()}"
    everyone = processes.gather(name)
    with processes.agree():
        if len(set(map(bool, everyone))) > 1:
            raise ConfigError(
                f"process {everyone.index('')} of {processes.world_size} has no GPU, others have; "
                "ask for the same number on every machine, or set training.device=cpu"
            )
        if name and everyone.count(name) > 1:
            raise ConfigError(
                f"{everyone.count(name)} processes would share {name}; launch as many processes as "
                "GPUs"
            )


def _check_own_device(asked: str, device: torch.device) -> None:
    num_asked = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if asked == "auto" and device.type == "cpu" and num_asked not in ("", "0"):
        raise ConfigError(
            f"SLURM gave this machine {num_asked} GPUs (SLURM_GPUS_ON_NODE), but PyTorch sees "
            "none: its build or the driver is at fault; set training.device=cpu to train without"
        )


def check_same_config(config: RunConfig, processes: Processes) -> None:
    """A config file on a disk that is not shared may differ from machine to machine."""
    first = processes.gather(flatten(config) if processes.is_first else None)[0]
    with processes.agree():
        for key, value in flatten(config).items():
            if first[key] != value:
                raise ConfigError(f"{key}={value} here, {first[key]} on the first process")


# --- disks --------------------------------------------------------------------------------------


def check_readable(shards: TokenShards) -> None:
    """Their sizes are checked when they are opened; here that their bytes come."""
    for path in shards.paths:
        try:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                file.read(1)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; restore it") from None


def check_room(run_folder: Path, config: RunConfig, num_parameters: int, step: int) -> None:
    """For the checkpoints this run will keep, and the one being written beside them."""
    kept, num_steps = config.checkpoint, config.training.num_steps
    still_to_come = -(-(num_steps - step) // (kept.interval_steps or num_steps))
    existing = sum(not kept.stays(step_of(path)) for path in list_checkpoints(run_folder))
    num_new = max(min(kept.keep + 1 - existing, still_to_come), 0)
    for_ever = kept.num_staying(step, num_steps)
    needed = max(num_new + for_ever, 1) * num_parameters * BYTES_PER_PARAMETER
    free = shutil.disk_usage(run_folder).free
    if free < needed and still_to_come > 0:
        raise UserError(
            f"run_folder={config.run_folder}: its disk has {free / 2**30:.2f} GiB free, the "
            f"checkpoints to come need {needed / 2**30:.2f} (checkpoint.keep="
            f"{kept.keep}, {for_ever} to stay for ever, {num_parameters:,} parameters); free "
            "space, keep fewer, or choose a run_folder on another disk"
        )


def check_shared(run_folder: Path, processes: Processes, patience_s: float = 10) -> None:
    """Every process must see what the first one writes."""
    if processes.world_size == 1:
        return
    mark = run_folder / f".seen-by-all-{processes.gather(uuid.uuid4().hex)[0]}"
    with processes.agree():
        if processes.is_first:
            mark.touch()
    with processes.agree():
        deadline = time.monotonic() + patience_s
        while not mark.exists():  # a network disk may take a moment
            if time.monotonic() > deadline:
                raise UserError(
                    f"run_folder={run_folder}: what process 0 writes there cannot be seen from "
                    f"{socket.gethostname()}; choose a folder on a disk that all machines share"
                )
            time.sleep(0.1)
    if processes.is_first:
        mark.unlink()


# --- a run that dies again and again ------------------------------------------------------------


SAME_STEP, ANYWHERE = 2, 5
"""Deaths without a new checkpoint between them after which a run is given up."""


@contextlib.contextmanager
def attempt(run_folder: Path, start: int, processes: Processes) -> Iterator[None]:
    """Counts deaths: starts from this checkpoint that ended without a word (killed, crashed, out of
    memory). A run that saves, stops at a signal, or reports a mistake of the user's is not dead."""
    path = run_folder / "attempts.json"
    with processes.agree():
        if processes.is_first:
            _count_deaths(path, start)
    try:
        yield
    except (UserError, KeyboardInterrupt):
        if processes.is_first:
            path.unlink(missing_ok=True)
        raise
    if processes.is_first:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Attempts:
    start: int
    deaths: list[int]


def _count_deaths(path: Path, start: int) -> None:
    """The file is there only while a run is alive, or after it died."""
    deaths: list[int] = []
    with contextlib.suppress(DataError):  # it has nothing to say then
        before = read_json(path, _Attempts, "")
        if before.start == start:
            # How far it came, as precisely as it logs.
            reached = [row["step"] for row in read_metrics(path.parent / "metrics.jsonl")]
            deaths = [*before.deaths, max(reached, default=start)]
    same = deaths.count(deaths[-1]) if deaths else 0
    if same >= SAME_STEP or len(deaths) >= ANYWHERE:
        where = f"{same} times after step {deaths[-1]}" if same >= SAME_STEP else f"after {deaths}"
        raise UserError(
            f"{path.parent} was started from step {start} and died {where}, without a new "
            "checkpoint: to start it again would loop. Find the cause in the job's log (out of "
            f"memory? checkpoint.interval_steps too long for the time limit?), then delete {path}"
        )
    write_atomically(path, json.dumps(asdict(_Attempts(start, deaths))))
