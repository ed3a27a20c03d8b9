"""Write the files of one split of one token shard, all of them or none.

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
from olmo_sparsity.data.shard_manifest import ShardFile


class TokenPiece(NamedTuple):
    """The token IDs of a document, or of a piece of one."""

    ids: list[int]
    group: int | None
    """The hash of the document's group if the document ends here, else None."""


class ShardWriter:
    """A writer of one split of one shard. Its files end in .tmp until `publish` renames them."""

    def __init__(self, folder: Path, split: str, index: int, dtype: str, eos_id: int) -> None:
        self.folder = folder
        self.split = split
        self.eos_id = eos_id
        # Little-endian, so that the files have the same bytes on any machine.
        self.dtype = np.dtype(dtype).newbyteorder("<")
        kinds = (f"tokens.{dtype}", "ends.uint64", "groups.uint64")
        self.names = [f"{split}-{index:05d}.{kind}" for kind in kinds]
        # Hashed as they are written, as reading a terabyte again takes half an hour.
        self.digests = [hashlib.sha256() for _ in kinds]
        self.files: list[BinaryIO] = []
        """The files of `names`. They are opened at the first token, so that a split without text
        leaves none."""

        self.num_tokens = 0
        self.num_documents = 0

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
        # Appended one at a time, so that files that were opened before an error are closed, too.
        for name in self.names[len(self.files) :]:
            self.files.append((self.folder / f"{name}.tmp").open("wb"))
        arrays = [tokens, np.array(ends, dtype="<u8"), np.array(groups, dtype="<u8")]
        for file, digest, array in zip(self.files, self.digests, arrays, strict=True):
            file.write(array.data)
            digest.update(array.data)

    @staticmethod
    def close_all(writers: Iterable[ShardWriter]) -> None:
        """Close the files of all writers. Unfinished ones keep their names that end in .tmp."""
        for writer in writers:
            for file in writer.files:
                file.close()

    def publish(self) -> list[ShardFile]:
        """Flush the files to disk and give them their names. Return a list with their entry for the
        manifest. It is empty for a split without text, as an empty file cannot be mapped."""
        if not self.files:
            return []
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        for name in self.names:
            os.replace(self.folder / f"{name}.tmp", self.folder / name)
        tokens, ends, groups = self.names
        tokens_sha256, ends_sha256, groups_sha256 = (d.hexdigest() for d in self.digests)
        shard_file = ShardFile(
            split=self.split,
            tokens=tokens,
            ends=ends,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            tokens_sha256=tokens_sha256,
            ends_sha256=ends_sha256,
            groups=groups,
            groups_sha256=groups_sha256,
        )
        return [shard_file]
