"""Verify token files once, and notice when one changes later.

A terabyte takes half an hour to hash, so a start hashes only files that no earlier start has
verified:

    first start    hashes train-00000.tokens.uint16, and remembers its size, its time of
                   modification and a hash of a sample, in verified-00000-of-00001.json
    later start    size, time and sample are the same: the file is not hashed again
    each read      in training, `TokenFile.read` compares size and time with those of the start

`shards.py` decides which files are hashed, sequences.py reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from olmo_sparsity.base.errors import DataError, UnreadableNowError, UserError
from olmo_sparsity.base.files import read_bounded, write_json
from olmo_sparsity.base.json_text import parse_json
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.retry import may_pass, retry
from olmo_sparsity.base.share import Share

SAMPLED_BLOCKS = 8
"""The number of blocks in the sample of a file."""

BLOCK_BYTES = 4096
"""The size of such a block."""

YOUNG_NS = 2 * 10**9
"""The age below which a file is not remembered as verified: it may change again without another
time of modification, as the clocks of disks are coarse."""


@dataclass(frozen=True)
class FileState:
    """The size of a file, and the time of its last modification."""

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
    """A file whose SHA-256 was that of the manifest, and its state at that time."""

    size: int
    modified_ns: int
    sha256: str
    sample: str
    """Hash of some of its blocks (`sample_of`)."""


@dataclass(frozen=True)
class _Record:
    """The content of a record on disk: the verified files, by their names."""

    files: dict[str, Verified]


def read_verified(folder: Path) -> dict[str, Verified]:
    """Return the files that earlier starts have verified, by name. A damaged record is ignored, so
    that its files are hashed again."""
    verified: dict[str, Verified] = {}
    for path in sorted(folder.glob("verified-*.json")):
        with contextlib.suppress(OSError, ValueError):
            verified |= parse_json(read_bounded(path, 2**30), _Record).files
    return verified


def is_verified(path: Path, state: FileState, sha256: str, verified: Verified | None) -> bool:
    """Return whether a file is unchanged since it was verified, judged by its size, its time of
    modification and a sample of its content.

    Args:
        state: Size and time of the file now.
        sha256: What the manifest says of the file.
        verified: The record of the file; None if there is none.
    """
    if verified is None:
        return False
    remembered = FileState(verified.size, verified.modified_ns)
    if remembered != state or verified.sha256 != sha256:
        return False
    return sample_of(path, state.size) == verified.sample


class HashedFile(NamedTuple):
    """A file that was hashed just now."""

    state: FileState
    """Its state before it was hashed, so that a change meanwhile is noticed."""

    sha256: str


def remember(
    folder: Path,
    share: Share,
    hashed: Mapping[str, HashedFile],
    verified: Mapping[str, Verified],
) -> None:
    """Add files that were verified just now to the record of this process. If the folder cannot be
    written, nothing is remembered, and the next start hashes again.

    Args:
        share: Which of the processes this is.
        hashed: The files that were verified just now, by name.
        verified: The files that earlier starts have verified, by name.
    """
    now_ns = time.time_ns()
    records: dict[str, Verified] = {}
    for name, file in hashed.items():
        if now_ns - file.state.modified_ns > YOUNG_NS:
            sample = sample_of(folder / name, file.state.size)
            records[name] = Verified(**asdict(file.state), sha256=file.sha256, sample=sample)
    if not records:
        return
    # Each process writes a file of its own, as no lock holds on all disks of a cluster. The record
    # keeps what earlier starts knew, also those of another number of processes.
    path = folder / f"verified-{share.index:05d}-of-{share.count:05d}.json"
    with contextlib.suppress(OSError, UserError):
        write_json(path, asdict(_Record({**verified, **records})))


def sample_of(path: Path, size: int) -> str:
    """Return a hash of some blocks of a file, evenly spaced from its first to its last block."""
    digest = hashlib.blake2b(digest_size=16)
    last_start = max(0, size - BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        for block_index in range(SAMPLED_BLOCKS):
            file.seek(last_start * block_index // (SAMPLED_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


class TokenFile:
    """An open file of tokens, which must stay as it was at the start of the run.

    Reads are system calls, not memory maps: if a mapped file is cut short, the process ends with
    SIGBUS and no message. A read that a network disk refuses is tried again."""

    def __init__(self, path: Path, dtype: np.dtype, state: FileState) -> None:
        self.path = path
        self.dtype = dtype
        self.state = state
        self._descriptor: int | None = None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, until the next read."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self, first: int, count: int) -> np.ndarray:
        """Return `count` tokens from the `first` on, as 64-bit integers."""
        token_size = self.dtype.itemsize
        num_bytes = count * token_size

        def read_once() -> _BytesOfFile:
            return self._read_bytes(num_bytes, first * token_size)

        def report(line: str) -> None:
            say(f"{self.path}: {line}")
            # A network disk that came back may no longer know the handle: the next try opens again.
            self.close()

        try:
            content, state = retry(read_once, may_pass, report)
        except OSError as error:
            if may_pass(error):
                raise UnreadableNowError(self.path, error.strerror) from None
            raise DataError(f"{self.path} cannot be read: {error.strerror}; restore it") from None
        if state != self.state or len(content) != num_bytes:
            raise DataError(
                f"{self.path} changed after this run started (it had {self.state.size:,} bytes and "
                f"has {state.size:,}); restore it, or prepare again, and go on from the last "
                "checkpoint"
            )
        return np.frombuffer(content, self.dtype).astype(np.int64)

    def _read_bytes(self, count: int, first: int) -> _BytesOfFile:
        """Return `count` bytes from the `first` on, or fewer if the file ends before. Raise OSError
        if the disk refuses to read."""
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        content = os.pread(self._descriptor, count, first)
        # After the read: what is written between a check before it and the read would be trained
        # on.
        return _BytesOfFile(content, FileState.of_status(os.fstat(self._descriptor)))


class _BytesOfFile(NamedTuple):
    """Bytes of a file, and the state of the file after they were read."""

    content: bytes
    state: FileState


def states_of(folder: Path, names: Iterable[str]) -> dict[str, FileState]:
    """Return size and time of modification of each file."""
    return {name: FileState.of(folder / name) for name in names}
