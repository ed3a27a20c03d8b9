"""Check GPUs, settings and disks before training, so that a job that must fail
does so in its first minute."""

from __future__ import annotations

import os
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from olmo_sparsity.base.differences import differences
from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.models.checkpoint_files import list_checkpoints, step_of
from olmo_sparsity.training.distributed import Processes

BYTES_PER_PARAMETER = 12
"""Size of a checkpoint: weight and Adam's two moments in fp32, for any engine."""


def check_devices(requested: str, device: torch.device, processes: Processes) -> None:
    """Check that the requested GPUs are visible, and that no two processes share one."""
    num_allocated = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    with processes.raising_together():
        if requested == "auto" and device.type == "cpu" and num_allocated not in ("", "0"):
            raise ConfigError(
                f"training.device=auto: SLURM_GPUS_ON_NODE={num_allocated}, but PyTorch sees no "
                "GPU; fix the installation, or set training.device=cpu"
            )
    name = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"GPU {getattr(properties, 'uuid', device.index)} of {socket.gethostname()}"
    names = processes.gather(name)
    with processes.raising_together():
        if len(set(map(bool, names))) > 1:
            raise ConfigError(
                f"process {names.index('')} of {len(names)} has no GPU, others have; request one "
                "GPU for each process"
            )
        if name and names.count(name) > 1:
            raise ConfigError(
                f"{names.count(name)} processes share {name}; launch as many processes as GPUs"
            )


def check_same(settings: Mapping[str, Any], processes: Processes) -> None:
    """Check that all processes have the settings of the first: config files on disks that are not
    shared may differ between machines."""
    first_settings = processes.gather(settings if processes.is_first else None)[0]
    with processes.raising_together():
        changed = differences(first_settings, settings)
        if changed:
            raise ConfigError(f"config of the first process: {changed[0]}; give all the same file")


def check_room(
    run_folder: Path, kept: CheckpointConfig, num_parameters: int, step: int, num_steps: int
) -> None:
    """Raise UserError unless the disk has room for the checkpoints that the run will keep, and for
    one that is being written. `step`: the step from which the run goes on."""
    # 0 is `auto`, which may save after any step; None saves once, at the end.
    interval = 1 if kept.interval_steps == 0 else kept.interval_steps or num_steps
    # A run saves at multiples of the interval, and at its last step.
    num_left = 0
    if step < num_steps:
        num_left = num_steps // interval - step // interval + (num_steps % interval > 0)
    existing = sum(not kept.stays(step_of(path)) for path in list_checkpoints(run_folder))
    # One more than is kept: the oldest is deleted after the new one is complete.
    num_new = max(min(kept.keep + 1 - existing, num_left), 0)
    num_staying = kept.num_staying(step, num_steps)
    needed = max(num_new + num_staying, 1) * num_parameters * BYTES_PER_PARAMETER
    free = shutil.disk_usage(run_folder).free
    if free < needed and num_left > 0:
        fewer = "lower checkpoint.keep"
        if kept.keep_every_steps:
            fewer = "pass --checkpoint.keep_every_steps=null or a larger number"
        raise UserError(
            f"run_folder={run_folder}: its disk has {free / 2**30:.2f} GiB free, checkpoints need "
            f"{needed / 2**30:.2f} (checkpoint.keep={kept.keep}, {num_staying} to stay forever); "
            f"free space, or {fewer}"
        )


def check_shared(run_folder: Path, processes: Processes, patience_s: float = 10) -> None:
    """Raise UserError unless all processes see the files that the first one writes."""
    if processes.world_size == 1:
        return
    # A new name for each start, which all processes know.
    mark = run_folder / f".seen-by-all-{processes.gather(uuid.uuid4().hex)[0]}"
    with processes.raising_together():
        if processes.is_first:
            mark.touch()
    try:
        with processes.raising_together():
            deadline = time.monotonic() + patience_s
            while not mark.exists():  # a network disk may take a moment
                if time.monotonic() > deadline:
                    raise UserError(
                        f"run_folder={run_folder} is not on a disk that {socket.gethostname()} "
                        "shares with the first process; choose a folder on a disk that all "
                        "machines share"
                    )
                time.sleep(0.1)
    finally:
        if processes.is_first:
            mark.unlink()
