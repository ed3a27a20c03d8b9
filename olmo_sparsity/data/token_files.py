"""Verify token files once, and notice when one changes later.

Place in the flow: below `shards`, which lists the files, and `batches`, which reads them.

A terabyte takes half an hour to hash, so a start hashes only files that no earlier start has
verified. What was verified is remembered in the prepared folder by size, time of modification and
a sample of the content. In training each read compares size and time with those of the start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from olmo_sparsity.base.conform import parse_json
from olmo_sparsity.base.errors import DataError, UserError
from olmo_sparsity.base.files import read_bounded, write_json

SAMPLED_BLOCKS = 8
BLOCK = 4096

YOUNG_NS = 2 * 10**9
"""A file that was changed so shortly before it is verified may change again without another time
of modification, as clocks of disks are coarse. It is not remembered."""


@dataclass(frozen=True)
class FileState:
    """Size and time of modification of a file."""

    size: int
    modified_ns: int

    @staticmethod
    def of(path: Path) -> FileState:
        return FileState.of_status(path.stat())

    @staticmethod
    def of_status(status: os.stat_result) -> FileState:
        return FileState(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Verified:
    """What a start found of a file whose SHA-256 it compared with the manifest."""

    size: int
    modified_ns: int
    sha256: str
    sample: str


@dataclass(frozen=True)
class _Record:
    files: dict[str, Verified]


def read_verified(folder: Path) -> dict[str, Verified]:
    """Return what earlier starts have verified. A damaged record counts as none: its files are
    hashed again."""
    verified: dict[str, Verified] = {}
    for path in sorted(folder.glob("verified-*.json")):
        with contextlib.suppress(OSError, ValueError):
            verified |= parse_json(read_bounded(path, 2**30), _Record).files
    return verified


def is_verified(path: Path, state: FileState, sha256: str, verified: Verified | None) -> bool:
    """Return whether the file is the one that was verified, as far as size, time and a sample of
    the content tell."""
    if verified is None:
        return False
    remembered = FileState(verified.size, verified.modified_ns)
    if remembered != state or verified.sha256 != sha256:
        return False
    return sample_of(path, state.size) == verified.sample


def remember(
    folder: Path,
    share: tuple[int, int],
    states: Mapping[str, FileState],
    hashes: Mapping[str, str],
    verified: Mapping[str, Verified],
) -> None:
    """Add files that were verified just now to the record of this process. In a folder that cannot
    be written nothing is remembered, so that the next start hashes again."""
    now = time.time_ns()
    records = {
        name: Verified(
            size=state.size,
            modified_ns=state.modified_ns,
            sha256=hashes[name],
            sample=sample_of(folder / name, state.size),
        )
        for name, state in states.items()
        if now - state.modified_ns > YOUNG_NS
    }
    if not records:
        return
    index, count = share
    # Each process writes a file of its own, as no lock holds on all disks of a cluster. The record
    # keeps what earlier starts knew, also those of another number of processes.
    path = folder / f"verified-{index:05d}-of-{count:05d}.json"
    with contextlib.suppress(OSError, UserError):
        write_json(path, asdict(_Record({**verified, **records})))


def sample_of(path: Path, size: int) -> str:
    """Return a hash of some blocks, evenly spaced from the first to the last."""
    digest = hashlib.blake2b(digest_size=16)
    last = max(0, size - BLOCK)
    with path.open("rb", buffering=0) as file:
        for number in range(SAMPLED_BLOCKS):
            file.seek(last * number // (SAMPLED_BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


class TokenFile:
    """A file of tokens, open, that must stay as it was at the start.

    Reads are calls, not memory maps: a map of a file that is cut short ends the process with SIGBUS
    and no message."""

    def __init__(self, path: Path, dtype: np.dtype, state: FileState) -> None:
        self.path = path
        self.dtype = dtype
        self.state = state
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; restore it") from None

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self, first: int, count: int) -> np.ndarray:
        """Return `count` tokens from the `first` on, as 64-bit integers."""
        size = self.dtype.itemsize
        content = os.pread(self._descriptor, count * size, first * size)
        # After the read, or what is written in between would be trained on.
        state = FileState.of_status(os.fstat(self._descriptor))
        if state != self.state or len(content) != count * size:
            raise DataError(
                f"{self.path} changed after this run started (it had {self.state.size:,} bytes and "
                f"has {state.size:,}); restore it, or prepare again, and go on from the last "
                "checkpoint"
            )
        return np.frombuffer(content, self.dtype).astype(np.int64)


def states_of(folder: Path, names: Iterable[str]) -> dict[str, FileState]:
    """Return size and time of modification of each file."""
    return {name: FileState.of(folder / name) for name in names}
