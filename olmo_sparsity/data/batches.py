"""Make batches of token shards and positions, in an order that does not depend on the world size.

Sequences and their order are those of OLMo's `MemMapDataset` and `IterableDataset`; each process
takes every world-size-th of a global batch. Dimension key: B batch, L length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.data.positions import draw_positions, restart
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.data.transform import Transform, apply
from olmo_sparsity.text.vocabulary import IGNORED


@dataclass
class Batch:
    tokens_BL: Tensor
    positions_BL: Tensor
    labels_BL: Tensor
    """The next token of the text, or IGNORED."""

    documents_BL: Tensor | None = None
    """The number of each token's document, to which attention is restricted. None: it is not. Stays
    on the host, which must know the documents' lengths."""

    num_labels: int | None = None
    """Labels of the whole step, on all processes, where they are known without asking these."""

    def to(self, device: torch.device) -> Batch:
        moved = self._each(lambda tensor: tensor.to(device, non_blocking=True))
        moved.documents_BL = self.documents_BL
        return moved

    def pinned(self) -> Batch:
        """In pinned memory, for asynchronous copies to a GPU."""
        return self._each(Tensor.pin_memory)

    def rows(self, rows: slice) -> Batch:
        return self._each(lambda tensor: tensor[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed = Batch(change(self.tokens_BL), change(self.positions_BL), change(self.labels_BL))
        if self.documents_BL is not None:
            changed.documents_BL = change(self.documents_BL)
        changed.num_labels = self.num_labels
        return changed

    def split(self, size: int) -> Iterator[Batch]:
        """Micro-batches, in order."""
        for start in range(0, len(self.tokens_BL), size):
            yield self.rows(slice(start, start + size))


class Sequences:
    """The shards cut into sequences of `length` tokens; the rest of a shard is unused."""

    def __init__(self, shards: TokenShards, length: int) -> None:
        self.length, self.paths, self.vocab_size = length, shards.paths, shards.vocab_size
        # As plain arrays, as a slice of them takes half the time.
        maps = [np.memmap(path, dtype=shards.dtype, mode="r") for path in shards.paths]
        self.arrays = [np.asarray(array) for array in maps]
        self.first_of_shard = np.cumsum([0] + [len(array) // length for array in self.arrays])

    def __len__(self) -> int:
        return int(self.first_of_shard[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        shard = int(np.searchsorted(self.first_of_shard, index, side="right")) - 1
        start = (index - int(self.first_of_shard[shard])) * self.length
        tokens = self.arrays[shard][start : start + self.length].astype(np.int64)
        if tokens.max() >= self.vocab_size:
            problem = f"holds token {tokens.max()} near place {start:,}, of {self.vocab_size}"
            raise DataError(f"{self.paths[shard]} {problem}; `olmo-sparsity prepare` checks files")
        return tokens


@dataclass(frozen=True)
class Drawn:
    """A sequence of the longest length."""

    epoch: int
    index: int
    text: np.ndarray


class TrainingBatches:
    """An endless stream of global batches. A batch depends only on the settings and the step, so
    the step number is the data cursor of a checkpoint."""

    def __init__(
        self,
        shards: TokenShards,
        positions: PositionsConfig,
        *,
        length: int,
        batch_size: int,
        seed: int,
        length_at: Callable[[int], int] | None = None,
        transform: Transform | None = None,
        mask_documents: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """`length_at`: in the step of a number, from 1, sequences of `length` tokens are cut into
        shorter ones of so many."""
        self.positions, self.length = positions, length
        self.length_at = length_at or (lambda step: length)
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.mask_documents, self.eos_id = mask_documents, shards.eos_id
        self.skipped: Sequence[int] = ()
        """Numbers of batches that are left out, from 0: later steps move up."""
        self.transform, self.vocab_size = transform, shards.vocab_size
        self.sequences = Sequences(shards, length)
        if len(self.sequences) < batch_size:
            found = f"{len(self.sequences)} sequences of {length} tokens, below {batch_size=}"
            remedy = "prepare more text, or lower training.batch_size or training.length"
            raise DataError(f"{shards.paths[0].parent} holds {found}; {remedy}")
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return len(self.sequences) // self.batch_size

    def from_step(self, step: int) -> Iterator[Batch]:
        """This process's share of the batches of steps `step`, `step + 1`, … (0 is the first)."""
        return map(self.__getitem__, count(step))

    def __getitem__(self, step: int) -> Batch:
        batch = batch_of_step(step, self.skipped)
        numbers = range(batch * self.batch_size, (batch + 1) * self.batch_size)
        drawn = map(self._draw, numbers[self.rank :: self.world_size])
        return self._collate(list(drawn), self.length_at(step + 1))

    def _draw(self, number: int) -> Drawn:
        """The n-th sequence. Each epoch has an order of its own, and ends with its last full batch,
        as OLMo's does."""
        epoch, place = divmod(number, self.steps_per_epoch * self.batch_size)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(len(self.sequences), self.seed, epoch)
        index = int(self._order[1][place])
        return Drawn(epoch, index, self.sequences[index])

    def _collate(self, drawn: Sequence[Drawn], length: int) -> Batch:
        pieces = self.length // length
        each = product(range(pieces), drawn)
        cut = [(of, piece, of.index * pieces + piece) for piece, of in each]
        tokens_BL = np.empty((len(cut), length), np.int64)
        labels_of: dict[int, np.ndarray] = {}
        is_one_document_B = np.zeros(len(cut), bool)
        for row, (of, piece, index) in enumerate(cut):
            text = of.text[piece * length :][:length]
            seeds = [self.seed, of.epoch, index]
            tokens_BL[row] = text
            changed = None
            if self.transform is not None:
                changed = apply(self.transform, text, seeds, self.vocab_size)
            if changed is not None:
                tokens_BL[row] = changed.tokens_L
                is_one_document_B[row] = True
                if changed.labels_L is not None:
                    labels_of[row] = changed.labels_L
        labels_BL = np.full_like(tokens_BL, IGNORED)
        labels_BL[:, :-1] = tokens_BL[:, 1:]
        for row, labels in labels_of.items():
            labels_BL[row] = labels
        documents_BL = number_documents(tokens_BL, self.eos_id)
        documents_BL[is_one_document_B] = 0
        positions_BL = np.empty_like(tokens_BL)
        for row, (of, _, index) in enumerate(cut):
            positions_BL[row] = draw_positions(
                self.positions,
                length,
                seed=self.seed,
                epoch=of.epoch,
                index=index,
                documents_L=documents_BL[row] if self.positions.per_document else None,
            )
        batch = Batch(
            torch.from_numpy(tokens_BL),
            torch.from_numpy(positions_BL),
            torch.from_numpy(labels_BL),
        )
        if self.mask_documents:
            batch.documents_BL = torch.from_numpy(documents_BL)
        if self.transform is None:  # every row has as many labels
            batch.num_labels = self.batch_size * pieces * (length - 1)
        return batch


def batch_of_step(step: int, skipped: Sequence[int]) -> int:
    """Return the number of a step's batch, where some are left out; all count from 0."""
    batch = step
    for number in sorted(skipped):
        if number <= batch:
            batch += 1
    return batch


def number_documents(tokens_BL: np.ndarray, eos_id: int) -> np.ndarray:
    """documents_BL, counted from 0 along the last axis; EOS belongs to the document it ends."""
    ends_BL = tokens_BL == eos_id
    return ends_BL.cumsum(-1) - ends_BL


def epoch_order(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    """The same order as OLMo's IterableDataset."""
    order = np.arange(num_sequences, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed=seed + epoch)).shuffle(order)
    return order


def heldout_sequences(shards: TokenShards, length: int) -> Sequences:
    sequences = Sequences(shards, length)
    if len(sequences) == 0:
        folder, remedy = shards.paths[0].parent, "prepare more text, or lower evaluation.length"
        raise DataError(f"{folder}: no held-out file holds {length:,} tokens; {remedy}")
    return sequences


def heldout_batches(
    shards: TokenShards,
    *,
    length: int,
    num_sequences: int,
    batch_size: int,
    mask_documents: bool = False,
    per_document: bool = False,
) -> Iterator[Batch]:
    """Held-out text from its start, cut into sequences of `length`, with contiguous IDs: of the
    sequence, or of each document."""
    sequences = heldout_sequences(shards, length)
    count = min(num_sequences, len(sequences))
    for start in range(0, count, batch_size):
        rows = range(start, min(start + batch_size, count))
        tokens_BL = torch.from_numpy(np.stack([sequences[row] for row in rows]))
        labels_BL = torch.full_like(tokens_BL, IGNORED)
        labels_BL[:, :-1] = tokens_BL[:, 1:]
        positions_BL = torch.arange(length).expand(len(rows), length)
        batch = Batch(tokens_BL, positions_BL, labels_BL)
        if mask_documents:
            documents_BL = number_documents(tokens_BL.numpy(), shards.eos_id)
            batch.documents_BL = torch.from_numpy(documents_BL)
            if per_document:
                batch.positions_BL = torch.from_numpy(restart(documents_BL))
        yield batch
