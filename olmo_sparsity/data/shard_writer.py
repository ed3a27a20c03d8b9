"""Write token shards: the files of one split, complete or not at all.

Place in the flow: documents as token IDs → **files**. `tokens` says when a shard ends, `shards`
lists its files in the manifest and reads them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.data.shards import ShardFile


class ShardWriter:
    """One split of one shard, in .tmp files until it is published."""

    def __init__(self, folder: Path, split: str, index: int, dtype: str, eos_id: int) -> None:
        self.folder, self.split, self.eos_id = folder, split, eos_id
        self.dtype = np.dtype(dtype).newbyteorder("<")
        kinds = (f"tokens.{dtype}", "ends.uint64", "groups.uint64")
        self.names = [f"{split}-{index:05d}.{kind}" for kind in kinds]
        self.digests = [hashlib.sha256() for _ in kinds]
        self.files: list[BinaryIO] = []
        self.num_tokens = self.num_documents = 0

    def write(self, pieces: Iterable[tuple[list[int], int | None]]) -> None:
        """Append token IDs; with the last of a document comes its group."""
        ids, ends, groups = list[int](), list[int](), list[int]()
        for piece, group in pieces:
            ids += piece
            if group is not None:
                ids.append(self.eos_id)
                ends.append(self.num_tokens + len(ids))
                groups.append(group)
        if not ids:
            return
        tokens = np.array(ids, dtype=self.dtype)
        if np.count_nonzero(tokens == self.eos_id) != len(ends):
            problem = f"the tokenizer makes its end-of-text token ({self.eos_id}) of ordinary text"
            raise DataError(f"{problem}; declare it as special in its tokenizer.json")
        self.num_tokens += len(ids)
        self.num_documents += len(ends)
        for name in self.names[len(self.files) :]:
            self.files.append((self.folder / f"{name}.tmp").open("wb"))
        arrays = (tokens, *(np.array(values, dtype="<u8") for values in (ends, groups)))
        for file, digest, array in zip(self.files, self.digests, arrays, strict=True):
            file.write(array.data)
            digest.update(array.data)

    @staticmethod
    def close_all(writers: Iterable[ShardWriter]) -> None:
        for writer in writers:
            for file in writer.files:
                file.close()

    def publish(self) -> list[ShardFile]:
        if not self.files:
            return []  # An empty file cannot be mapped.
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        for name in self.names:
            os.replace(self.folder / f"{name}.tmp", self.folder / name)
        tokens, ends, groups = self.names
        of_tokens, of_ends, of_groups = (digest.hexdigest() for digest in self.digests)
        counts = (self.num_tokens, self.num_documents)
        return [ShardFile(self.split, tokens, ends, *counts, of_tokens, of_ends, groups, of_groups)]
