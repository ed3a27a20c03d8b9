"""Save and load the optimizer's moments, as slices of flat parameters in one file per process.

A file lists its slices, so that a run resumes with another engine or number of processes. Nothing
is gathered. Moments have the shape of their parameter, so training continues exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from olmo_sparsity.base.devices import release_freed_memory
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import write_tensors

KEYS = ("exp_avg", "exp_avg_sq")
"""Adam's."""

MUON_KEYS = ("momentum_buffer",)


@dataclass
class MomentSlice:
    """Moments of the elements `start`, `start + 1`, … of a flat parameter: views into the
    optimizer's state, to read or to fill."""

    parameter: str
    start: int
    moments: dict[str, Tensor]

    @property
    def length(self) -> int:
        return len(next(iter(self.moments.values())))


def copy_moments(
    parts: Iterable[MomentSlice], rank: int = 0, world_size: int = 1
) -> Callable[[Path], Path]:
    """Copy moments into main memory; return a function that writes the copy into a folder."""
    slices: dict[str, tuple[int, int]] = {}
    tensors: dict[str, Tensor] = {}
    for part in parts:
        slices[part.parameter] = (part.start, part.length)
        for key, moment in part.moments.items():
            tensors[f"{key}/{part.parameter}"] = moment
    tensors = to_main_memory(tensors.items())

    def write(folder: Path) -> Path:
        path = folder / f"moments-{rank:05d}-of-{world_size:05d}.safetensors"
        write_tensors(path, tensors, {"stretches": json.dumps(slices)})
        return path

    return write


@torch.no_grad()
def to_main_memory(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy tensors, all at once. Copies of a GPU's are pinned: several times as fast, and PyTorch
    keeps the memory for the next checkpoint, at most twice the size."""
    release_freed_memory()
    copies = {}
    on_gpu = False
    for name, tensor in tensors:
        on_gpu = tensor.device.type == "cuda"
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        copies[name] = copy.copy_(tensor, non_blocking=True)
    if on_gpu:  # the copies are asynchronous
        torch.cuda.synchronize(tensor.device)
    return copies


def share_out(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Give each name to one of `count` parts of about equal size."""
    loads = [0] * count
    part_of = {}
    # The largest first, each to the part that has least so far.
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        part_of[name] = loads.index(min(loads))
        loads[part_of[name]] += sizes[name]
    return part_of


class SavedMoments:
    """The files of one checkpoint, opened on demand."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        paths = sorted(folder.glob("moments-*-of-*.safetensors"))
        counts = {int(path.stem.rsplit("-", 1)[1]) for path in paths}
        if not paths or counts != {len(paths)}:
            written = " and ".join(map(str, sorted(counts))) or "some"
            raise DataError(
                f"{folder} holds {len(paths)} files of optimizer state (moments-*.safetensors), "
                f"{written} were written; delete the checkpoint to resume from the one before"
            )
        # This process's own file first, which has all of its slices if it is resumed on as many
        # processes: the others are then not opened.
        self.paths = paths[rank:] + paths[:rank]
        self.opened = cache(_open)

    @torch.no_grad()
    def fill(self, part: MomentSlice) -> None:
        """Fill a slice from all files that have elements of it."""
        filled = 0
        for path in self.paths:
            if filled == part.length:
                break
            file, slices = self.opened(path)
            first, length = slices.get(part.parameter, (0, 0))
            begin = max(first, part.start)
            end = min(first + length, part.start + part.length)
            if begin >= end:
                continue
            for key, moment in part.moments.items():
                saved = file.get_slice(f"{key}/{part.parameter}")[begin - first : end - first]
                moment[begin - part.start : end - part.start].copy_(saved)
            filled += end - begin
        if filled != part.length:
            raise DataError(
                f"{self.folder} lacks moments of {part.parameter} ({filled} of {part.length} "
                "elements); take a new run_folder"
            )


def _open(path: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return a file, and the slices in it."""
    try:
        file = safe_open(path, framework="pt")
        return file, json.loads(file.metadata()["stretches"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is damaged ({error}); delete the checkpoint to resume from the one before"
        ) from None
