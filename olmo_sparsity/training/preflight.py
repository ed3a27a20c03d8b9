"""Check disks, GPUs and earlier attempts, so that a job fails in its first minute."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.base.folders import differences
from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.checkpoint import Attempts, step_of
from olmo_sparsity.training.distributed import Processes

BYTES_PER_PARAMETER = 12
"""Size of a checkpoint: weight and Adam's two moments in fp32, for any engine."""


def check_devices(requested: str, device: torch.device, processes: Processes) -> None:
    """Check that the requested GPUs are visible, and that no two processes share one."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    with processes.agree():
        if requested == "auto" and device.type == "cpu" and given not in ("", "0"):
            found = f"SLURM_GPUS_ON_NODE={given}, but PyTorch sees no GPU"
            raise ConfigError(f"training.device=auto: {found}; fix the installation, or set cpu")
    name = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"GPU {getattr(properties, 'uuid', device.index)} of {socket.gethostname()}"
    names = processes.gather(name)
    with processes.agree():
        if len(set(map(bool, names))) > 1:
            raise ConfigError(
                f"process {names.index('')} has no GPU, others have; request one each"
            )
        if name and names.count(name) > 1:
            raise ConfigError(f"{names.count(name)} processes share {name}; launch one for each")


def check_same(settings: Mapping[str, Any], processes: Processes) -> None:
    """Config files on disks that are not shared may differ between machines."""
    first = processes.gather(settings if processes.is_first else None)[0]
    with processes.agree():
        if changed := differences(first, settings):
            raise ConfigError(f"config of the first process: {changed[0]}; give all the same file")


def check_room(
    run_folder: Path, kept: CheckpointConfig, num_parameters: int, step: int, num_steps: int
) -> None:
    """Check the disk for the checkpoints that the run will keep, and one being written."""
    interval = 1 if kept.interval_steps == 0 else kept.interval_steps or num_steps
    num_left = -(-(num_steps - step) // interval)
    existing = sum(not kept.stays(step_of(path)) for path in list_checkpoints(run_folder))
    num_new = max(min(kept.keep + 1 - existing, num_left), 0)
    num_staying = kept.num_staying(step, num_steps)
    needed = max(num_new + num_staying, 1) * num_parameters * BYTES_PER_PARAMETER
    free = shutil.disk_usage(run_folder).free
    if free < needed and num_left > 0:
        sizes = f"{free / 2**30:.2f} GiB free, checkpoints need {needed / 2**30:.2f}"
        why = f"checkpoint.keep={kept.keep}, {num_staying} to stay forever"
        raise UserError(f"run_folder={run_folder}: its disk has {sizes} ({why})")


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
                where = f"a disk that {socket.gethostname()} shares with the first process"
                raise UserError(f"run_folder={run_folder} is not on {where}")
            time.sleep(0.1)
    if processes.is_first:
        mark.unlink()


# --- repeated deaths ----------------------------------------------------------------------------


@contextlib.contextmanager
def attempt(run_folder: Path, max_starts: int, processes: Processes) -> Iterator[None]:
    """Refuse a run that was started `max_starts` times and died each time before it saved. An end
    that the run reports (a signal, an error of the user) is no death."""
    with processes.agree():
        if processes.is_first:
            _count_start(run_folder, max_starts)
    try:
        yield
    except (UserError, KeyboardInterrupt):
        if processes.is_first:
            _forget_starts(run_folder)
        raise
    if processes.is_first:
        _forget_starts(run_folder)


def _count_start(run_folder: Path, max_starts: int) -> None:
    attempts = Attempts.read(run_folder)
    if attempts.starts >= max_starts:
        died = f"died {attempts.starts} times without a new checkpoint"
        more = f"--checkpoint.max_starts={attempts.starts + max_starts}"
        remedy = f"find the cause in the log (memory? time limit?), then pass {more}"
        raise UserError(f"{run_folder} {died} after step {attempts.saved_step}; {remedy}")
    Attempts(attempts.saved_step, attempts.starts + 1).write(run_folder)


def _forget_starts(run_folder: Path) -> None:
    Attempts(Attempts.read(run_folder).saved_step).write(run_folder)
