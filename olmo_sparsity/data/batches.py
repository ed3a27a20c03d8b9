"""Make batches of token shards and positions, in an order that does not depend on the world size.

Sequences and their order are those of OLMo's `MemMapDataset` and `IterableDataset`, as a test
confirms: each shard is cut into sequences of equal length, and all sequences are shuffled once per
epoch. A global batch is the next B sequences of that order. Each process takes every world-size-th
of them, so the sequences of a batch are the same for any number of processes. In steps of shorter
sequences the longest ones are cut: text and order stay the same.

Dimension key: B batch, L length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.data.mixture import Weights, find_order
from olmo_sparsity.data.order import Order
from olmo_sparsity.data.positions import draw_positions, restart
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.data.token_files import FileState, TokenFile
from olmo_sparsity.data.transform import Changed, Transform, apply
from olmo_sparsity.text.vocabulary import IGNORED

MAX_OPEN_FILES = 128
"""Token files that a process keeps open; a limit of 1,024 files a process is common."""


@dataclass
class Batch:
    """The sequences of a process in one step, or those of a micro-batch."""

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
        """Return a copy on the device, except for `documents_BL`."""
        moved = self._each(lambda tensor: tensor.to(device, non_blocking=True))
        moved.documents_BL = self.documents_BL
        return moved

    def pinned(self) -> Batch:
        """Return a copy in pinned memory, from which copies to a GPU are asynchronous."""
        return self._each(Tensor.pin_memory)

    def rows(self, rows: slice) -> Batch:
        """Return some of the sequences."""
        return self._each(lambda tensor: tensor[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            tokens_BL=change(self.tokens_BL),
            positions_BL=change(self.positions_BL),
            labels_BL=change(self.labels_BL),
            documents_BL=None if self.documents_BL is None else change(self.documents_BL),
            num_labels=self.num_labels,
        )

    def split(self, size: int) -> Iterator[Batch]:
        """Yield micro-batches of `size` sequences, in order; the last one may be smaller."""
        for start in range(0, len(self.tokens_BL), size):
            yield self.rows(slice(start, start + size))


class Sequences:
    """The shards cut into sequences of `length` tokens; the rest of a shard is unused."""

    def __init__(self, shards: TokenShards, length: int) -> None:
        self.length = length
        self.paths = shards.paths
        self.dtype = shards.dtype
        self.vocab_size = shards.vocab_size
        self.states = [shards.states.get(path) or FileState.of(path) for path in shards.paths]
        num_sequences = [state.size // self.dtype.itemsize // length for state in self.states]
        self.first_of_shard = np.cumsum([0, *num_sequences])
        self._open_files: OrderedDict[int, TokenFile] = OrderedDict()

    def __len__(self) -> int:
        return int(self.first_of_shard[-1])

    def __getitem__(self, index: int) -> np.ndarray:
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
        """Return a shard, open. A terabyte has more shards than a process may have files open, so
        those that were read last stay open."""
        file = self._open_files.pop(shard, None)
        if file is None:
            file = TokenFile(self.paths[shard], self.dtype, self.states[shard])
            if len(self._open_files) >= MAX_OPEN_FILES:
                self._open_files.popitem(last=False)
        self._open_files[shard] = file
        return file


@dataclass(frozen=True)
class Drawn:
    """A sequence of the longest length, and the numbers that its random draws are seeded by."""

    epoch: int
    index: int
    text: np.ndarray


@dataclass(frozen=True)
class Piece:
    """A row of a batch: a drawn sequence, or a part of one in steps of shorter sequences."""

    epoch: int
    index: int
    """Number of the piece in all text, if all of it is cut into pieces of this length."""

    text_L: np.ndarray


@dataclass(frozen=True)
class BatchPlan:
    """What determines the batches of a run on its shards, on any number of processes."""

    positions: PositionsConfig
    """How position IDs are drawn."""

    length: int
    """Tokens of the longest sequences, into which the shards are cut."""

    batch_size: int
    """Of these, on all processes together."""

    seed: int

    length_at: Callable[[int], int] | None = None
    """Returns the tokens of a sequence in a step (1 is the first), into which the longest are cut.
    None: `length` in all steps."""

    positions_at: Callable[[int], PositionsConfig] | None = None
    """Returns how position IDs are drawn in a step. None: `positions` in all steps."""

    transform: Transform | None = None

    mask_documents: bool = False

    order: Order = "stored"

    weights: Sequence[Weights] = ()
    """Weights of several corpora, in each stretch of batches."""

    def stage_of(self, step: int) -> tuple[int, PositionsConfig]:
        """Return the tokens of a sequence in a step (1 is the first), and its position IDs."""
        length = self.length if self.length_at is None else self.length_at(step)
        positions = self.positions if self.positions_at is None else self.positions_at(step)
        return length, positions


class TrainingBatches:
    """An endless stream of global batches. A batch depends only on the settings and the step, so
    the step number is the data cursor of a checkpoint. Steps count from 1, as everywhere in
    training; batches, and sequences in their order, count from 0."""

    def __init__(
        self, shards: TokenShards, plan: BatchPlan, rank: int = 0, world_size: int = 1
    ) -> None:
        """Open the stream of one of `world_size` processes."""
        self.plan = plan
        self.rank = rank
        self.world_size = world_size
        self.eos_id = shards.eos_id
        self.skipped: Sequence[int] = ()
        """Numbers of batches that are left out. Each later step takes the batch after."""
        self.vocab_size = shards.vocab_size
        self.sequences = Sequences(shards, plan.length)
        self.order = find_order(
            shards,
            length=plan.length,
            batch_size=plan.batch_size,
            seed=plan.seed,
            order=plan.order,
            weights=plan.weights,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Return the full batches of the text; of several corpora, as if each was read once."""
        return len(self.sequences) // self.plan.batch_size

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield this process's share of the batches of `step` and all later steps."""
        return map(self.of_step, count(step))

    def of_step(self, step: int) -> Batch:
        """Return this process's share of the batch of a step."""
        batch_number = batch_of_step(step, self.skipped)
        first = batch_number * self.plan.batch_size
        numbers = range(first, first + self.plan.batch_size)
        numbers_of_process = numbers[self.rank :: self.world_size]
        drawn = [self._draw(number) for number in numbers_of_process]
        length, positions = self.plan.stage_of(step)
        return self._collate(drawn, length, positions)

    def _draw(self, number: int) -> Drawn:
        """Return the sequence of a number, counted from 0 over all epochs."""
        place = self.order.find(number)
        return Drawn(place.epoch, place.index_in_text, self.sequences[place.index_in_text])

    def _collate(self, drawn: Sequence[Drawn], length: int, positions: PositionsConfig) -> Batch:
        """Return the batch of these sequences, cut into pieces of `length` tokens."""
        pieces = self._cut(drawn, length)
        changed_rows = self._transform(pieces)
        tokens_BL = np.empty((len(pieces), length), np.int64)
        for row, piece in enumerate(pieces):
            changed = changed_rows.get(row)
            tokens_BL[row] = piece.text_L if changed is None else changed.tokens_L

        # The last token of a row has no label: the next one is in another sequence.
        labels_BL = np.full_like(tokens_BL, IGNORED)
        labels_BL[:, :-1] = tokens_BL[:, 1:]
        documents_BL = number_documents(tokens_BL, self.eos_id)
        for row, changed in changed_rows.items():
            documents_BL[row] = 0  # a changed sequence is one document
            if changed.labels_L is not None:
                labels_BL[row] = changed.labels_L

        positions_BL = np.empty_like(tokens_BL)
        for row, piece in enumerate(pieces):
            positions_BL[row] = draw_positions(
                positions,
                length,
                seed=self.plan.seed,
                epoch=piece.epoch,
                index=piece.index,
                documents_L=documents_BL[row] if positions.per_document else None,
            )
        num_labels = None
        if self.plan.transform is None:  # every row has as many labels
            num_labels = self.plan.batch_size * (self.plan.length // length) * (length - 1)
        return Batch(
            tokens_BL=torch.from_numpy(tokens_BL),
            positions_BL=torch.from_numpy(positions_BL),
            labels_BL=torch.from_numpy(labels_BL),
            documents_BL=torch.from_numpy(documents_BL) if self.plan.mask_documents else None,
            num_labels=num_labels,
        )

    def _transform(self, pieces: Sequence[Piece]) -> dict[int, Changed]:
        """Return what `data.transform` makes of these rows, by row, without those that it leaves as
        they are."""
        changed_rows: dict[int, Changed] = {}
        if self.plan.transform is None:
            return changed_rows
        for row, piece in enumerate(pieces):
            seeds = [self.plan.seed, piece.epoch, piece.index]
            changed = apply(self.plan.transform, piece.text_L, seeds, self.vocab_size)
            if changed is not None:
                changed_rows[row] = changed
        return changed_rows

    def _cut(self, drawn: Sequence[Drawn], length: int) -> list[Piece]:
        """Cut sequences into pieces of `length` tokens: the first piece of each, then the second of
        each, and so on."""
        num_pieces = self.plan.length // length
        pieces = []
        for number in range(num_pieces):
            start = number * length
            for sequence in drawn:
                index = sequence.index * num_pieces + number
                text_L = sequence.text[start : start + length]
                pieces.append(Piece(sequence.epoch, index, text_L))
        return pieces


def batch_of_step(step: int, skipped: Sequence[int]) -> int:
    """Return the number of a step's batch, where those of the numbers in `skipped` are left out.
    Steps count from 1, batches from 0."""
    batch_number = step - 1
    for skipped_number in sorted(skipped):
        if skipped_number <= batch_number:
            batch_number += 1
    return batch_number


def number_documents(tokens_BL: np.ndarray, eos_id: int) -> np.ndarray:
    """Return documents_BL: the number of each token's document, from 0 in each row. EOS belongs to
    the document that it ends."""
    ends_BL = tokens_BL == eos_id
    return ends_BL.cumsum(-1) - ends_BL


def heldout_sequences(shards: TokenShards, length: int) -> Sequences:
    """Cut held-out text into sequences, and raise DataError if it is too short for one."""
    sequences = Sequences(shards, length)
    if len(sequences) == 0:
        raise DataError(
            f"{shards.paths[0].parent}: no held-out file holds {length:,} tokens, one evaluation "
            "sequence; prepare more text, or lower evaluation.length or training.length"
        )
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
    """Yield held-out text from its start, cut into sequences of `length`. Position IDs are
    contiguous; with `mask_documents` and `per_document` they begin at 0 in each document."""
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
