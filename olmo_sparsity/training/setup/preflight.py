"""Check GPUs, settings and disks before training, so that a job that must fail does so in its first
minute.

    check_devices    two processes share a GPU, or the allocated GPUs are not visible
    check_same       the config file of one node is older than that of another, or its code or
                     PyTorch has another version; uncommitted changes count, too
    check_shared     the run folder is on a disk of one node alone
    check_room       the checkpoints of the run would fill the disk; a run that has begun needs room
                     for the next one alone, as it did while it ran

Each raises the error on all processes. start.py calls the first three, restore.py the last, which
needs the step of the checkpoint.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from olmo_sparsity.base.differences import differences
from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.base.provenance import code_hash, code_version, versions_of_numbers
from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.models.checkpoint_files import list_checkpoints, step_of
from olmo_sparsity.training.checkpoints.expendable import find_expendable, size_of
from olmo_sparsity.training.checkpoints.writer import EXIT_DISK
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.run_folder.environment import has_started

BYTES_PER_PARAMETER = 12
"""Size of a checkpoint: weight and Adam's two moments in fp32, for any engine."""


def check_devices(requested: str, device: torch.device, processes: Processes) -> None:
    """Raise ConfigError unless the requested GPUs are visible, and no two processes share one.

    Args:
        requested: `training.device`.
        device: The device of this process.
    """
    num_allocated = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    with processes.raising_together():
        # Otherwise a run on eight GPUs would silently train on CPUs.
        if requested == "auto" and device.type == "cpu" and num_allocated not in ("", "0"):
            raise ConfigError(
                f"training.device=auto: SLURM_GPUS_ON_NODE={num_allocated}, but PyTorch sees no "
                "GPU; fix the installation, or set training.device=cpu"
            )

    own_gpu = _name_of_gpu(device)
    gpus = processes.gather(own_gpu)
    with processes.raising_together():
        if any(gpus) and not all(gpus):
            raise ConfigError(
                f"process {gpus.index('')} of {len(gpus)} has no GPU, others have; request one "
                "GPU for each process"
            )
        if own_gpu and gpus.count(own_gpu) > 1:
            raise ConfigError(
                f"{gpus.count(own_gpu)} processes share {own_gpu}; launch as many processes as GPUs"
            )


def _name_of_gpu(device: torch.device) -> str:
    """Return a name that no other GPU of the cluster has; empty for a CPU."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    # By its UUID: processes may see one GPU under different indices (CUDA_VISIBLE_DEVICES).
    return f"GPU {getattr(properties, 'uuid', device.index)} of {socket.gethostname()}"


class _Installed(NamedTuple):
    """What a process tells the others about its node."""

    host: str
    versions: Mapping[str, str]
    """Versions that all nodes must share, by what they are of. One that is not known is left
    out."""


def check_same(settings: Mapping[str, Any], processes: Processes) -> None:
    """Raise ConfigError unless all processes have the settings, the code and the PyTorch of the
    first: files on disks that are not shared may differ between machines."""
    with processes.raising_together():
        installed = _Installed(socket.gethostname(), _own_versions(processes))
    gathered = processes.gather((settings if processes.is_first else None, installed))
    first_settings = gathered[0][0]
    with processes.raising_together():
        changed = differences(first_settings, settings)
        if changed:
            raise ConfigError(f"config of the first process: {changed[0]}; give all the same file")
        _check_same_versions([installed for _, installed in gathered])


def _own_versions(processes: Processes) -> dict[str, str]:
    """Return the versions of this node; none on all of its processes but one, as git would look
    through the clone in each of them."""
    if processes.world_size == 1 or processes.local_rank > 0:
        return {}
    # Without `-dirty`: whether uncommitted changes are the same ones, the hash tells. It is of the
    # package alone, while a page or a script of a shared clone may be edited meanwhile.
    commit = (code_version() or "").removesuffix("-dirty")
    packages = versions_of_numbers()
    versions = {
        "commit": commit,
        "olmo-sparsity": packages["olmo-sparsity"],
        "PyTorch": packages["torch"],
        "Python files with the hash": code_hash(),
    }
    return {name: version for name, version in versions.items() if version}


def _check_same_versions(installed: Sequence[_Installed]) -> None:
    """Raise ConfigError if two nodes have different versions. `installed`: by rank."""
    first_rank_with: dict[str, int] = {}
    for rank, (host, versions) in enumerate(installed):
        for name, version in versions.items():
            first_rank = first_rank_with.setdefault(name, rank)
            first_host, first_versions = installed[first_rank]
            if version != first_versions[name]:
                raise ConfigError(
                    f"process {first_rank} on {first_host} has {name} {first_versions[name]}, "
                    f"process {rank} on {host} has {version}; give all nodes the same code and "
                    "packages: one clone with its .venv on a shared disk, or one container"
                )


def check_room(
    run_folder: Path, settings: CheckpointConfig, num_parameters: int, step: int, num_steps: int
) -> str:
    """Raise UserError if the disk has no room for checkpoints. Return a line if it has room for the
    next one, and not for all; otherwise an empty text.

    The first start of a run needs room for all checkpoints that the run will keep, and for one that
    is being written. A later start needs room for the next one alone: a run that was preempted must
    not stay down where it would have gone on. Its error has the exit code with which a job is
    requeued, as others who share the disk may have freed space by then; unless the whole disk is
    smaller than a checkpoint.

    Args:
        settings: The section `checkpoint`, which says which checkpoints stay.
        step: The step from which the run goes on.
    """
    num_saves_left = _count_saves_left(settings, step, num_steps)
    if num_saves_left == 0:
        return ""
    existing = list_checkpoints(run_folder)
    num_existing = sum(not settings.stays(step_of(path)) for path in existing)
    # One more than is kept: the oldest is deleted after the new one is complete.
    num_new = max(min(settings.keep + 1 - num_existing, num_saves_left), 0)
    num_staying = settings.num_staying(step, num_steps)
    checkpoint_bytes = num_parameters * BYTES_PER_PARAMETER
    # One at least: where all exist already, the next one is written before the oldest is deleted.
    needed_bytes = max(num_new + num_staying, 1) * checkpoint_bytes
    disk = shutil.disk_usage(run_folder)
    free_bytes = disk.free
    if free_bytes >= needed_bytes:
        return ""

    has = f"its disk has {free_bytes / 2**30:.2f} GiB free"
    if not existing and not has_started(run_folder):
        fewer = "lower checkpoint.keep"
        if settings.keep_every_steps:
            fewer = "pass --checkpoint.keep_every_steps=null or a larger number"
        raise UserError(
            f"run_folder={run_folder}: {has}, checkpoints need {needed_bytes / 2**30:.2f} "
            f"(checkpoint.keep={settings.keep}, {num_staying} to stay forever); free space, or "
            f"{fewer}"
        )

    # A save deletes one where the disk is full.
    expendable = find_expendable(run_folder, settings, step)
    expendable_bytes = size_of(expendable) if expendable is not None else 0
    if free_bytes + expendable_bytes < checkpoint_bytes:
        if disk.total < checkpoint_bytes:
            raise UserError(
                f"run_folder={run_folder}: its disk has {disk.total / 2**30:.2f} GiB in all, a "
                f"checkpoint needs {checkpoint_bytes / 2**30:.2f}; move the folder to a larger disk"
            )
        error = UserError(
            f"run_folder={run_folder}: {has}, the next checkpoint needs "
            f"{checkpoint_bytes / 2**30:.2f}; free space, then start again"
        )
        error.exit_code = EXIT_DISK
        raise error
    return (
        f"{run_folder}: {has}, which is enough for the next checkpoint; all that are still to come "
        f"need {needed_bytes / 2**30:.2f}: free space while the run goes on"
    )


def _count_saves_left(settings: CheckpointConfig, step: int, num_steps: int) -> int:
    """Return how often a run that goes on from a step will save at its interval and at its end."""
    if step >= num_steps:
        return 0
    interval = settings.interval_steps
    if interval is None:  # once, at the end
        return 1
    if interval == 0:  # `auto`, which may save after any step
        interval = 1
    saves_at_end_alone = num_steps % interval > 0
    return num_steps // interval - step // interval + saves_at_end_alone


def check_shared(run_folder: Path, processes: Processes, patience_s: float = 10) -> None:
    """Raise UserError unless all processes see the files that the first one writes."""
    if processes.world_size == 1:
        return
    # A new name for each start, which all processes know. The mark of an earlier start might be
    # seen where this one's is not.
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
