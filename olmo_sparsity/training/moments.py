"""Adam's moments on disk: named pieces of flat parameters, one file a process.

Place in the flow: what engines put into a checkpoint beside the weights.

Every engine holds a part of the moments of each parameter laid flat: all of it in one process, a
stretch of it under ZeRO. A file says which stretches it holds, so whoever needs a stretch finds it,
under whatever engine and number of processes it was written: nothing is ever gathered, and Adam,
which treats every element alone, goes on exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from olmo_sparsity.errors import DataError
from olmo_sparsity.files import follow_umask, sync

KEYS = ("exp_avg", "exp_avg_sq")


@dataclass
class Piece:
    """Elements `start`, `start + 1`, … of a parameter laid flat, and their moments: views into the
    optimizer's own state, to read from or to fill."""

    parameter: str
    start: int
    moments: dict[str, Tensor]

    @property
    def length(self) -> int:
        return len(self.moments[KEYS[0]])


def copy_moments(
    pieces: Iterable[Piece], rank: int = 0, world_size: int = 1
) -> Callable[[Path], None]:
    """Copies them into main memory. The function that comes back writes the copy into a folder."""
    stretches: dict[str, tuple[int, int]] = {}
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        stretches[piece.parameter] = (piece.start, piece.length)
        for key, moment in piece.moments.items():
            tensors[f"{key}/{piece.parameter}"] = moment.detach().to("cpu", copy=True)

    def write(folder: Path) -> None:
        path = folder / f"moments-{rank:05d}-of-{world_size:05d}.safetensors"
        save_file(tensors, str(path), metadata={"stretches": json.dumps(stretches)})
        follow_umask(path)
        sync(path)

    return write


class SavedMoments:
    """The files of one checkpoint, opened as they are needed."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        found = sorted(folder.glob("moments-*-of-*.safetensors"))
        counts = {int(path.stem.rsplit("-", 1)[1]) for path in found}
        if not found or counts != {len(found)}:
            raise DataError(
                f"{folder} holds {len(found)} files of optimizer state (moments-*.safetensors), "
                f"{' and '.join(map(str, sorted(counts))) or 'some'} were written; delete the "
                "checkpoint to resume from the one before, or set init_from to it in another run "
                "to take its weights alone"
            )
        # The same number of processes as before: what is needed lies in this process's own file.
        self.paths = found[rank:] + found[:rank]
        self.open_files: list[tuple[Any, dict[str, tuple[int, int]]]] = []

    @torch.no_grad()
    def fill(self, piece: Piece) -> None:
        filled = 0
        for index, path in enumerate(self.paths):
            if filled == piece.length:
                break
            file, stretches = self._file(index, path)
            first, length = stretches.get(piece.parameter, (0, 0))
            begin = max(first, piece.start)
            end = min(first + length, piece.start + piece.length)
            if begin >= end:
                continue
            for key, moment in piece.moments.items():
                saved = file.get_slice(f"{key}/{piece.parameter}")[begin - first : end - first]
                moment[begin - piece.start : end - piece.start].copy_(saved)
            filled += end - begin
        if filled != piece.length:
            raise DataError(
                f"{self.folder} lacks moments of {piece.parameter} ({filled} of {piece.length} "
                "numbers found): it was written by another model; start another run_folder"
            )

    def _file(self, index: int, path: Path) -> tuple[Any, dict[str, tuple[int, int]]]:
        if index == len(self.open_files):
            try:
                file = safe_open(path, framework="pt")
                self.open_files.append((file, json.loads(file.metadata()["stretches"])))
            except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"{path} is no optimizer state of this project ({error}); delete the "
                    "checkpoint to resume from the one before"
                ) from None
        return self.open_files[index]
