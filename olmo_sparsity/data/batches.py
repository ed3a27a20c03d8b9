"""Make the training batches of token shards, in an order that does not depend on the number of
processes.

    shards ─ Sequences ─> sequences of equal length                (sequences.py)
           ─ RunOrder ──> the order in which a run reads them      (mixture.py)
           ─ TrainingBatches.of_step(step) ─> Batch: tokens, position IDs, labels, documents

A global batch is the next B sequences of the order. With B = 4 and two processes:

    step 1     sequences 0 1 2 3 of the order     process 0 takes 0 and 2, process 1 takes 1 and 3
    step 2     sequences 4 5 6 7                  process 0 takes 4 and 6, process 1 takes 5 and 7

So the sequences of a batch are the same for any number of processes. In a stage of shorter
sequences each of these is cut into pieces: text and order stay the same.

Sequences and their order are those of OLMo's `MemMapDataset` and `IterableDataset`, as a test
confirms: each shard is cut into sequences, and all sequences are shuffled once per epoch.

Dimension key: B rows of this process, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.data.mixture import Weights, find_order
from olmo_sparsity.data.order import Order
from olmo_sparsity.data.positions import draw_positions
from olmo_sparsity.data.sequences import Sequences
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.data.transform import Changed, Transform, apply
from olmo_sparsity.text.vocabulary import IGNORED


@dataclass
class Batch:
    """The sequences of a process in one step, or those of a micro-batch. One sequence of the tokens
    17 18 EOS 19, for example:

        tokens       17  18  EOS  19
        positions     0   1    2   3
        labels       18 EOS   19   –        the next token; the last one has none
        documents     0   0    0   1
    """

    tokens_BL: Tensor
    positions_BL: Tensor
    labels_BL: Tensor
    """The next token of the text, or IGNORED."""

    documents_BL: Tensor | None = None
    """The number of each token's document, to which attention is restricted; None if it sees the
    whole sequence. It stays on the host, which must know the documents' lengths."""

    num_labels: int | None = None
    """The number of labels of the whole step, on all processes. None if these must add it up."""

    def to(self, device: torch.device) -> Batch:
        """Return a copy on the device, except for `documents_BL`."""
        moved = self._with_each(lambda tensor: tensor.to(device, non_blocking=True))
        moved.documents_BL = self.documents_BL
        return moved

    def pinned(self) -> Batch:
        """Return a copy in pinned memory, from which copies to a GPU are asynchronous."""
        return self._with_each(Tensor.pin_memory)

    def rows(self, rows: slice) -> Batch:
        """Return the sequences of a slice, as views."""
        return self._with_each(lambda tensor: tensor[rows])

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch whose tensors are changed by a function."""
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


@dataclass(frozen=True)
class Piece:
    """A row of a batch: a sequence, or a piece of one in a stage of shorter sequences. Its random
    draws (position IDs, transform) are seeded by the run's seed, `epoch` and `index`."""

    epoch: int
    index: int
    """The index of the piece in the text, if all of the text is cut into pieces of this length."""

    tokens_L: np.ndarray


@dataclass(frozen=True)
class BatchPlan:
    """The settings that, with the shards, determine the batches of a run, on any number of
    processes."""

    positions: PositionsConfig
    """How position IDs are drawn."""

    length: int
    """The number of tokens of the longest sequences, into which the shards are cut."""

    batch_size: int
    """The number of longest sequences in a global batch, on all processes together."""

    seed: int

    length_at: Callable[[int], int] | None = None
    """Returns the number of tokens of a sequence in a step (1 is the first), into which the longest
    are cut. None: `length` in all steps."""

    positions_at: Callable[[int], PositionsConfig] | None = None
    """Returns how position IDs are drawn in a step. None: as `positions` says in all steps."""

    transform: Transform | None = None
    """A function of the user that changes sequences (`data.transform`)."""

    mask_documents: bool = False
    """Whether attention is restricted to a token's document."""

    order: Order = "stored"
    """How the order of an epoch is found (`data.order`)."""

    weights: Sequence[Weights] = ()
    """The weights of several corpora in each stretch of batches; empty for a single corpus."""

    def stage_of(self, step: int) -> Stage:
        """Return the stage of a step (1 is the first)."""
        length = self.length if self.length_at is None else self.length_at(step)
        positions = self.positions if self.positions_at is None else self.positions_at(step)
        return Stage(length, positions)


class Stage(NamedTuple):
    """What sequences are like in some steps of a run."""

    length: int
    """The number of tokens of a sequence."""

    positions: PositionsConfig
    """How position IDs are drawn."""


class TrainingBatches:
    """An endless stream of global batches. A batch depends only on the settings and the step, so a
    checkpoint needs no other position in the text than its step.

    Steps count from 1, as everywhere in training. Batches, and sequences in their order, count from
    0: without skipped batches, step n takes batch n − 1."""

    def __init__(
        self, shards: TokenShards, plan: BatchPlan, rank: int = 0, world_size: int = 1
    ) -> None:
        """Open the stream of one of `world_size` processes."""
        self.plan = plan
        self.rank = rank
        self.world_size = world_size
        self.eos_id = shards.eos_id
        self.skipped: Sequence[int] = ()
        """The numbers of batches that are left out, such as one with a loss of NaN. Each later step
        takes the batch after."""

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
        """Return the number of full batches in the text. With several corpora, each counts once."""
        return len(self.sequences) // self.plan.batch_size

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield this process's sequences of the batches of `step` and all later steps."""
        return map(self.of_step, count(step))

    def of_step(self, step: int) -> Batch:
        """Return this process's sequences of the batch of a step."""
        stage = self.plan.stage_of(step)
        pieces = self._read_pieces(batch_of_step(step, self.skipped), stage.length)
        return self._collate(pieces, stage)

    def _read_pieces(self, batch_number: int, length: int) -> list[Piece]:
        """Return this process's sequences of a batch, cut into pieces of `length` tokens: the first
        piece of each sequence, then the second of each, and so on."""
        first_index = batch_number * self.plan.batch_size
        indices_in_run = range(first_index, first_index + self.plan.batch_size)
        own_indices = indices_in_run[self.rank :: self.world_size]
        places = [self.order.find(index) for index in own_indices]
        sequences = [self.sequences[place.index_in_text] for place in places]

        num_pieces = self.plan.length // length
        pieces = []
        for piece_index in range(num_pieces):
            start = piece_index * length
            for place, tokens in zip(places, sequences, strict=True):
                index_in_text = place.index_in_text * num_pieces + piece_index
                pieces.append(Piece(place.epoch, index_in_text, tokens[start : start + length]))
        return pieces

    def _collate(self, pieces: Sequence[Piece], stage: Stage) -> Batch:
        """Return the batch whose rows are these pieces of text."""
        length = stage.length
        # Tokens: those of the text, or what the user's function makes of them.
        changed_rows = self._transform(pieces)
        tokens_BL = np.empty((len(pieces), length), np.int64)
        for row, piece in enumerate(pieces):
            changed = changed_rows.get(row)
            tokens_BL[row] = piece.tokens_L if changed is None else changed.tokens_L

        # Labels and documents follow from the tokens, unless the user's function says otherwise.
        labels_BL = next_tokens(tokens_BL)
        documents_BL = number_documents(tokens_BL, self.eos_id)
        for row, changed in changed_rows.items():
            documents_BL[row] = 0  # a changed sequence is one document
            if changed.labels_L is not None:
                labels_BL[row] = changed.labels_L

        positions_BL = self._draw_positions(pieces, stage, documents_BL)

        # Without a transform every row has as many labels, so that processes need not add them up.
        num_labels = None
        if self.plan.transform is None:
            num_labels = self.plan.batch_size * (self.plan.length // length) * (length - 1)
        return Batch(
            tokens_BL=torch.from_numpy(tokens_BL),
            positions_BL=torch.from_numpy(positions_BL),
            labels_BL=torch.from_numpy(labels_BL),
            documents_BL=torch.from_numpy(documents_BL) if self.plan.mask_documents else None,
            num_labels=num_labels,
        )

    def _draw_positions(
        self, pieces: Sequence[Piece], stage: Stage, documents_BL: np.ndarray
    ) -> np.ndarray:
        """Return positions_BL, the position IDs of each piece. They are drawn for a piece of the
        text, not for a row of this process, so that a piece gets the same ones on any number of
        processes."""
        positions_BL = np.empty((len(pieces), stage.length), np.int64)
        for row, piece in enumerate(pieces):
            positions_BL[row] = draw_positions(
                stage.positions,
                stage.length,
                seed=self.plan.seed,
                epoch=piece.epoch,
                index=piece.index,
                documents_L=documents_BL[row] if stage.positions.per_document else None,
            )
        return positions_BL

    def _transform(self, pieces: Sequence[Piece]) -> dict[int, Changed]:
        """Return the rows that `data.transform` changes, by their number. Rows that it leaves as
        they are do not occur in the result."""
        changed_rows: dict[int, Changed] = {}
        if self.plan.transform is None:
            return changed_rows
        for row, piece in enumerate(pieces):
            seeds = [self.plan.seed, piece.epoch, piece.index]
            changed = apply(self.plan.transform, piece.tokens_L, seeds, self.vocab_size)
            if changed is not None:
                changed_rows[row] = changed
        return changed_rows


def batch_of_step(step: int, skipped: Sequence[int]) -> int:
    """Return the number of the batch that a step takes. Steps count from 1, batches from 0. With
    batch 1 skipped, steps 1, 2 and 3 take batches 0, 2 and 3."""
    batch_number = step - 1
    for skipped_number in sorted(skipped):
        if skipped_number <= batch_number:
            batch_number += 1
    return batch_number


def number_documents(tokens_BL: np.ndarray, eos_id: int) -> np.ndarray:
    """Return documents_BL: the number of each token's document, from 0 in each row. An EOS belongs
    to the document that it ends: tokens 5 EOS 7 8 are of documents 0 0 1 1."""
    ends_BL = tokens_BL == eos_id
    return ends_BL.cumsum(-1) - ends_BL


def next_tokens(tokens_BL: np.ndarray) -> np.ndarray:
    """Return labels_BL: the token after each token of a row. The last one has no label, as the next
    token is in another sequence: tokens 5 7 8 get the labels 7 8 IGNORED."""
    labels_BL = np.full_like(tokens_BL, IGNORED)
    labels_BL[:, :-1] = tokens_BL[:, 1:]
    return labels_BL
