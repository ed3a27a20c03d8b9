"""Choose the checkpoint that a run deletes where the disk is full.

    step000020.set_aside    1. first what `training.on_nan=skip` has set aside: its weights may be
                               damaged, and no start goes on from it
    step000030              2. then the oldest checkpoint that need not stay
    step000040                 stays: `checkpoint.keep_every_steps` and others
    step000050                 stays: the newest one, from which the run would resume

writer.py deletes it when a save finds the disk full, and setup/preflight.py counts it as room.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.models.checkpoint_files import list_checkpoints, step_of
from olmo_sparsity.training.run_folder.skipped_batches import list_set_aside


def find_expendable(run_folder: Path, settings: CheckpointConfig, step: int) -> Path | None:
    """Return the checkpoint that may be deleted to make room for another one; None if all must
    stay.

    Args:
        settings: The section `checkpoint`, which says which checkpoints stay.
        step: The last step that is done. Later checkpoints are damaged, and do not count.
    """
    set_aside = list_set_aside(run_folder)
    if set_aside:
        return set_aside[0]
    older = saved_until(run_folder, step)[1:]
    deletable = [folder for folder in older if not settings.stays(step_of(folder))]
    return deletable[-1] if deletable else None


def saved_until(run_folder: Path, step: int) -> list[Path]:
    """Return the checkpoints up to a step, the newest first. Those of later steps are damaged: the
    run was resumed before them."""
    return [path for path in list_checkpoints(run_folder) if step_of(path) <= step]


def size_of(folder: Path) -> int:
    """Return the bytes of the files of a folder."""
    num_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was deleted meanwhile
            num_bytes += path.stat().st_size if path.is_file() else 0
    return num_bytes
