"""Save and load the optimizer's moments, as slices of flat parameters, in one file for each
process.

Engines divide moments among processes in different ways. Each process saves what it holds, and the
file lists which elements of which parameter these are. So nothing is gathered, and a run resumes
with another engine or number of processes: `SavedMoments.fill` takes the elements of a slice from
all files that have some of them. No number is rounded, so training continues exactly. A parameter
of 10 elements that two processes have saved, and three read:

    saved     moments-00000-of-00002    0 1 2 3 4
              moments-00001-of-00002              5 6 7 8 9
    read by   process 0                 0 1 2 3                 from the first file
              process 1                         4 5 6           from both
              process 2                               7 8 9     from the second
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from olmo_sparsity.base.devices import release_freed_memory
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import write_tensors

KEYS = ("exp_avg", "exp_avg_sq")
"""The names of Adam's moments."""

MUON_KEYS = ("momentum_buffer",)
"""The name of Muon's moment."""


@dataclass
class MomentSlice:
    """The moments of some elements in a row of a flat parameter. They are views into the state of
    the optimizer, to be read or filled."""

    parameter: str
    start: int
    """The first of the elements."""

    moments: dict[str, Tensor]
    """The views, by the name of the moment, such as `exp_avg`."""

    @property
    def length(self) -> int:
        """Return the number of elements."""
        return len(next(iter(self.moments.values())))


class _Elements(NamedTuple):
    """Elements in a row of a flat parameter. Files store both numbers as a list."""

    first: int
    length: int


def copy_moments(
    held: Iterable[MomentSlice], rank: int = 0, world_size: int = 1
) -> Callable[[Path], Path]:
    """Copy moments into main memory. Return a function that writes the copy into a folder, and
    returns its file. The function can run in a thread while training changes the moments."""
    slices: dict[str, _Elements] = {}
    tensors: dict[str, Tensor] = {}
    for moment_slice in held:
        slices[moment_slice.parameter] = _Elements(moment_slice.start, moment_slice.length)
        for key, moment in moment_slice.moments.items():
            tensors[f"{key}/{moment_slice.parameter}"] = moment
    tensors = to_main_memory(tensors.items())

    def write(folder: Path) -> Path:
        path = folder / f"moments-{rank:05d}-of-{world_size:05d}.safetensors"
        write_tensors(path, tensors, {"stretches": json.dumps(slices)})
        return path

    return write


@torch.no_grad()
def to_main_memory(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of tensors in main memory. Those of a GPU's tensors are in pinned memory, which
    is several times as fast. PyTorch keeps this memory for the next checkpoint, of at most twice
    the size."""
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
    """Return the number of a part for each name, such that the `count` parts have about equal
    sizes."""
    part_sizes = [0] * count
    part_of_name = {}
    # The largest first, each to the part that is smallest so far.
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        part = part_sizes.index(min(part_sizes))
        part_of_name[name] = part
        part_sizes[part] += sizes[name]
    return part_of_name


class SavedMoments:
    """The moments in the files of one checkpoint, which are opened when they are needed."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Find the files. That of the process with this rank is read first."""
        self.folder = folder
        paths = sorted(folder.glob("moments-*-of-*.safetensors"))
        counts = {int(path.stem.rsplit("-", 1)[1]) for path in paths}
        if not paths or counts != {len(paths)}:
            written = " and ".join(map(str, sorted(counts))) or "some"
            raise DataError(
                f"{folder} holds {len(paths)} files of optimizer state (moments-*.safetensors), "
                f"{written} were written; delete the checkpoint to resume from the one before"
            )
        # Its own file has all slices of this process, if the run is resumed with the same engine
        # and number of processes. The other files are then not opened.
        self.paths = paths[rank:] + paths[:rank]
        self.opened = cache(_open)

    @torch.no_grad()
    def fill(self, wanted: MomentSlice) -> None:
        """Fill a slice from all files that have elements of it."""
        num_filled = 0
        for path in self.paths:
            if num_filled == wanted.length:
                break
            file, slices = self.opened(path)
            # The elements that the file has and the slice needs: begin … end − 1 of the parameter.
            saved = slices.get(wanted.parameter, _Elements(0, 0))
            begin = max(saved.first, wanted.start)
            end = min(saved.first + saved.length, wanted.start + wanted.length)
            if begin >= end:
                continue
            for key, moment in wanted.moments.items():
                in_file = slice(begin - saved.first, end - saved.first)
                in_slice = slice(begin - wanted.start, end - wanted.start)
                moment[in_slice].copy_(file.get_slice(f"{key}/{wanted.parameter}")[in_file])
            num_filled += end - begin
        if num_filled != wanted.length:
            raise DataError(
                f"{self.folder} lacks moments of {wanted.parameter} ({num_filled} of "
                f"{wanted.length} elements); take a new run_folder"
            )


class _OpenFile(NamedTuple):
    """A file of moments."""

    file: Any
    slices: dict[str, _Elements]
    """The elements that it has of each parameter."""


def _open(path: Path) -> _OpenFile:
    """Open a file of moments."""
    try:
        file = safe_open(path, framework="pt")
        stored = json.loads(file.metadata()["stretches"])
        slices = {name: _Elements(first, length) for name, (first, length) in stored.items()}
        return _OpenFile(file, slices)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is damaged ({error}); delete the checkpoint to resume from the one before"
        ) from None
