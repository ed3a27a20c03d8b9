"""Check disks, GPUs and earlier attempts before training, so that a job fails in its first minute.

Place in the flow: called by training/loop.py before the first step. The disk must be shared by all
processes and have room, the requested GPUs there, and the run must not have died repeatedly at the
same step.
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

from olmo_sparsity.config.run import flatten
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.errors import ConfigError, DataError, UserError
from olmo_sparsity.io import read_json, write_atomically
from olmo_sparsity.model.checkpoint_files import list_checkpoints
from olmo_sparsity.training.checkpoint import step_of
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.run_folder import read_metrics

BYTES_PER_PARAMETER = 12
"""Size of a checkpoint: weight and Adam's two moments in fp32, for any engine."""


# --- devices ------------------------------------------------------------------------------------


def check_devices(requested: str, device: torch.device, processes: Processes) -> None:
    """Check that the requested GPUs are visible, and that no two processes share one."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    with processes.agree():
        if requested == "auto" and device.type == "cpu" and given not in ("", "0"):
            raise ConfigError(
                f"SLURM gave this machine {given} GPUs (SLURM_GPUS_ON_NODE), but PyTorch sees "
                "none: its build or the driver does not fit; set training.device=cpu to train "
                "without"
            )
    name = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"GPU {getattr(properties, 'uuid', device.index)} of {socket.gethostname()}"
    names = processes.gather(name)
    with processes.agree():
        if len(set(map(bool, names))) > 1:
            raise ConfigError(
                f"process {names.index('')} of {processes.world_size} has no GPU, others have; "
                "request the same number on every machine, or set training.device=cpu"
            )
        if name and names.count(name) > 1:
            raise ConfigError(
                f"{names.count(name)} processes would share {name}; launch as many processes as "
                "GPUs"
            )


def check_same_config(config: RunConfig, processes: Processes) -> None:
    """Config files on disks that are not shared may differ between machines."""
    first = processes.gather(flatten(config) if processes.is_first else None)[0]
    with processes.agree():
        for key, value in flatten(config).items():
            if (other := first.get(key)) != value:
                raise ConfigError(
                    f"{key}={value} here, {other} on the first process; give all the same file"
                )


# --- disks --------------------------------------------------------------------------------------


def check_room(run_folder: Path, config: RunConfig, num_parameters: int, step: int) -> None:
    """Check the disk for the checkpoints that the run will keep, and one being written."""
    kept, num_steps = config.checkpoint, config.training.num_steps
    num_left = -(-(num_steps - step) // (kept.interval_steps or num_steps))
    existing = sum(not kept.stays(step_of(path)) for path in list_checkpoints(run_folder))
    num_new = max(min(kept.keep + 1 - existing, num_left), 0)
    num_staying = kept.num_staying(step, num_steps)
    needed = max(num_new + num_staying, 1) * num_parameters * BYTES_PER_PARAMETER
    free = shutil.disk_usage(run_folder).free
    if free < needed and num_left > 0:
        raise UserError(
            f"run_folder={config.run_folder}: its disk has {free / 2**30:.2f} GiB free, the "
            f"checkpoints to come need {needed / 2**30:.2f} (checkpoint.keep="
            f"{kept.keep}, {num_staying} to stay forever, {num_parameters:,} parameters); free "
            "space, keep fewer, or choose a run_folder on another disk"
        )


def check_shared(run_folder: Path, processes: Processes, patience_s: float = 10) -> None:
    """Check that all processes see what the first one writes."""
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


# --- repeated deaths ----------------------------------------------------------------------------


SAME_STEP, ANYWHERE = 2, 5
"""Deaths without a new checkpoint, at one step or in total, after which a run is not restarted."""


@contextlib.contextmanager
def attempt(run_folder: Path, start: int, processes: Processes) -> Iterator[None]:
    """Count deaths: attempts from this checkpoint that ended without a message (killed, crashed,
    out of memory). A run that saves, stops on a signal, or reports a user error does not count."""
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
    """The file exists only while a run is alive, or after it died."""
    deaths: list[int] = []
    with contextlib.suppress(DataError):  # a damaged file does not count
        before = read_json(path, _Attempts, "")
        if before.start == start:
            # The last logged step.
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
