"""Read token shards as sequences of equal length.

With sequences of 4 tokens, and shards of 10 and 9 tokens:

    shard 0    [0 1 2 3] [4 5 6 7] 8 9      sequences 0 and 1; what is left is unused
    shard 1    [0 1 2 3] [4 5 6 7] 8        sequences 2 and 3

    Sequences(shards, length=4)[2]          # tokens 0 to 3 of shard 1

Place in the flow: shards.py → **`Sequences`** → batches.py and heldout.py.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.data.token_files import FileState, TokenFile

MAX_OPEN_FILES = 128
"""The number of token files that a process keeps open. Many systems allow 1,024 files a process."""


class Sequences:
    """The shards, cut into sequences of `length` tokens. `sequences[i]` reads the i-th as an array.
    What is left at the end of a shard is unused."""

    def __init__(self, shards: TokenShards, length: int) -> None:
        self.length = length
        self.paths = shards.paths
        self.dtype = shards.dtype
        self.vocab_size = shards.vocab_size
        # A file that was verified has the state of then, so that a later change is noticed.
        self.states = [shards.states.get(path) or FileState.of(path) for path in shards.paths]
        num_sequences = [state.size // self.dtype.itemsize // length for state in self.states]
        # The index of the first sequence of each shard, and at the end the number of sequences.
        self.first_of_shard = np.cumsum([0, *num_sequences])
        self._open_files: OrderedDict[int, TokenFile] = OrderedDict()

    def __len__(self) -> int:
        return int(self.first_of_shard[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        # The last shard that begins at or before this sequence. Of shards without sequences, which
        # begin where the next one does, it is the last.
        shard = int(np.searchsorted(self.first_of_shard, index, side="right")) - 1
        start = (index - int(self.first_of_shard[shard])) * self.length
        tokens = self._file(shard).read(start, self.length)
        # A GPU would fail in the embedding, with an assertion that names no file.
        if tokens.max() >= self.vocab_size:
            raise DataError(
                f"{self.paths[shard]} holds token {tokens.max()} near place {start:,}, but its "
                f"tokenizer has {self.vocab_size}: the file is damaged; `olmo-sparsity prepare` "
                "checks all files"
            )
        return tokens

    def _file(self, shard: int) -> TokenFile:
        """Return the open file of a shard. A terabyte has more shards than a process may have files
        open, so those that were read last stay open."""
        file = self._open_files.pop(shard, None)
        if file is None:
            file = TokenFile(self.paths[shard], self.dtype, self.states[shard])
            if len(self._open_files) >= MAX_OPEN_FILES:
                self._open_files.popitem(last=False)
        self._open_files[shard] = file
        return file
