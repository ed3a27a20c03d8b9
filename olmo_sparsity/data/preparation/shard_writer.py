"""Write the files of one split of one token shard, all of them or none.

Two documents, of the tokens 17 18 and 19, of two groups (0 is the end-of-text token):

    writer = ShardWriter(folder, "train", index=0, dtype="uint16", eos_id=0)
    writer.write([TokenPiece([17, 18], group=8823), TokenPiece([19], group=1406)])
    writer.publish()

    train-00000.tokens.uint16    17 18 0 19 0
    train-00000.ends.uint64      3 5
    train-00000.groups.uint64    8823 1406

document_batches.py decides where a shard ends, encode_shards.py adds its files to the manifest, and
shards.py reads them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.data.shard_manifest import ShardEntry


class TokenPiece(NamedTuple):
    """The token IDs of a document, or of a piece of one."""

    ids: list[int]
    group: int | None
    """The hash of the document's group if the document ends here, else None."""


class ShardWriter:
    """A writer of one split of one shard. Its files end in .tmp until `publish` renames them. A
    split without text leaves none, as an empty file cannot be mapped."""

    def __init__(self, folder: Path, split: str, index: int, dtype: str, eos_id: int) -> None:
        self.split = split
        self.eos_id = eos_id
        # Little-endian, so that the files have the same bytes on any machine.
        self.dtype = np.dtype(dtype).newbyteorder("<")
        name = f"{split}-{index:05d}"
        self._tokens = _GrowingFile(folder / f"{name}.tokens.{dtype}")
        self._ends = _GrowingFile(folder / f"{name}.ends.uint64")
        self._groups = _GrowingFile(folder / f"{name}.groups.uint64")
        self.num_tokens = 0
        self.num_documents = 0

    @property
    def _files(self) -> tuple[_GrowingFile, ...]:
        return (self._tokens, self._ends, self._groups)

    def write(self, pieces: Iterable[TokenPiece]) -> None:
        """Append pieces of documents, in order, and an EOS after the last piece of each."""
        ids: list[int] = []
        ends: list[int] = []
        groups: list[int] = []
        for piece, group in pieces:
            ids += piece
            if group is not None:  # the document ends here
                ids.append(self.eos_id)
                ends.append(self.num_tokens + len(ids))
                groups.append(group)
        if not ids:
            return

        tokens = np.array(ids, dtype=self.dtype)
        # Documents are separated by EOS, so no text may contain it.
        if np.count_nonzero(tokens == self.eos_id) != len(ends):
            raise DataError(
                f"the tokenizer makes its end-of-text token (ID {self.eos_id}) of ordinary text; "
                "declare it as special in its tokenizer.json"
            )
        self.num_tokens += len(ids)
        self.num_documents += len(ends)
        self._tokens.append(tokens)
        self._ends.append(np.array(ends, dtype="<u8"))
        self._groups.append(np.array(groups, dtype="<u8"))

    @staticmethod
    def close_all(writers: Iterable[ShardWriter]) -> None:
        """Close the files of all writers. Unfinished ones keep their names that end in .tmp."""
        for writer in writers:
            for file in writer._files:
                file.close()

    def publish(self) -> list[ShardEntry]:
        """Flush the files to disk and give them their names. Return a list with their entry for the
        manifest; it is empty for a split without text."""
        if not self.num_tokens:
            return []
        # All are on the disk before the first has its name.
        for file in self._files:
            file.flush_to_disk()
        for file in self._files:
            file.give_name()
        entry = ShardEntry(
            split=self.split,
            tokens=self._tokens.name,
            ends=self._ends.name,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            tokens_sha256=self._tokens.sha256,
            ends_sha256=self._ends.sha256,
            groups=self._groups.name,
            groups_sha256=self._groups.sha256,
        )
        return [entry]


class _GrowingFile:
    """A file to which arrays are appended. It is created, with a name that ends in .tmp, by the
    first of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary_path = path.with_name(f"{path.name}.tmp")
        self._file: BinaryIO | None = None
        # Hashed as it is written, as reading a terabyte again takes half an hour.
        self._digest = hashlib.sha256()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of what was written so far."""
        return self._digest.hexdigest()

    def append(self, array: np.ndarray) -> None:
        """Write the bytes of an array."""
        if self._file is None:
            self._file = self._temporary_path.open("wb")
        self._file.write(array.data)
        self._digest.update(array.data)

    def flush_to_disk(self) -> None:
        """Close the file, such that a power cut loses nothing of it."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def give_name(self) -> None:
        """Rename the file to its final name."""
        os.replace(self._temporary_path, self.path)

    def close(self) -> None:
        """Close the file, if it was created."""
        if self._file is not None:
            self._file.close()
