"""List the checkpoints of training runs, whose losses are to be read.

    list_checkpoints("runs/pose")  → CheckpointToRead("runs/pose", 1000, …/step001000),
                                     CheckpointToRead("runs/pose", 2000, …/step002000)
    list_checkpoints("gpt2")       → CheckpointToRead("gpt2", NO_STEP, "gpt2")
    list_checkpoints(model)        → CheckpointToRead("model", NO_STEP, model)

losses_by_place.py calls `list_checkpoints`, and loads one after the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.analysis.results.losses_by_place import NO_STEP
from olmo_sparsity.text.runs import run_loaders


@dataclass(frozen=True)
class CheckpointToRead:
    """A model whose losses are to be read: one step of a run, or a model without steps."""

    name: str
    """The name of its run, or of the model itself."""

    step: int
    """NO_STEP for a model without steps."""

    model: Any
    """The folder or hub name of the model, or the model in memory."""

    @property
    def files(self) -> str:
        """Return names, sizes and times of the checkpoint's files, as a text that differs when they
        do. A checkpoint may be one file."""
        path = Path(self.model)
        files = [path] if path.is_file() else sorted(path.glob("*"))
        signs = []
        for file in files:
            status = file.stat()
            # A copy may keep the time of modification of its original (`cp -p`), but not that of
            # the last change of its entry.
            signs.append((file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        return repr(signs)


def list_checkpoints(model: Any) -> list[CheckpointToRead]:
    """Return the checkpoints of a run, in the order of their steps, or the model itself if it is
    not a run.

    Args:
        model: A run, ours or of transformers' `Trainer`; the name of another model; or a model in
            memory.
    """
    if not isinstance(model, str | Path):
        return [CheckpointToRead("model", NO_STEP, model)]
    path = Path(model)
    name = str(model)
    # Runs of this project's training package are recognized by its loader, which this package finds
    # by an entry point, as it must not import training.
    folders: list[Path] = []
    for loader in run_loaders():
        folders += loader.checkpoints(path)
    if not folders:
        folders += path.glob("checkpoint-*")  # of transformers' `Trainer`
    if not folders:
        return [CheckpointToRead(name, _step_of(path), model)]
    steps_and_folders = sorted((_step_of(folder), folder) for folder in folders)
    return [CheckpointToRead(name, step, folder) for step, folder in steps_and_folders]


def _step_of(folder: Path) -> int:
    """Return the step that a folder is named after, such as 2000 for `step002000` of ours and for
    `checkpoint-2000` of transformers' `Trainer`; else NO_STEP."""
    number = re.search(r"(?:step|checkpoint-)(\d+)$", folder.name)
    return int(number[1]) if number else NO_STEP
