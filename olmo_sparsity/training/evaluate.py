"""Evaluate a model in training on held-out text.

- `losses`: the loss by position, in ranges within the training length and beyond it;
- `losses_by_place`: the loss at early and late places of the same long documents;
- `induction_drop`: how far the loss falls when a passage is read twice.

Processes share the rows of each batch, and add up their sums. Results are rows of metrics.jsonl.

Dimension key: B batch, L length, D documents, R ranges of positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.sections import EvaluationConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.data.heldout import heldout_batches, heldout_sequences
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.models.losses import place_edges, repetition_losses
from olmo_sparsity.text.runs import spread_evenly
from olmo_sparsity.text.vocabulary import IGNORED
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.engine import Engine

NUM_PASSAGES = 64
"""The number of passages of the induction drop."""

MIN_DOCUMENTS = 8
"""The smallest number of documents for `losses_by_place`. A standard error of fewer says little."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluates a model on the held-out text of a run."""

    heldout: TokenShards
    settings: EvaluationConfig
    trained_length: int
    """The number of tokens of the longest training sequences."""

    reached_length: int
    """One more than the largest position ID of a training sequence: larger with PoSE."""

    mask_documents: bool
    per_document: bool
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each of several corpora in the mean loss, by name."""

    @cached_property
    def corpora(self) -> dict[str, Evaluation]:
        """Return the evaluation of each of several corpora, by name; empty for a single one."""
        return {
            name: replace(self, heldout=heldout, weights={})
            for name, heldout in self.heldout.corpora.items()
        }

    @property
    def length(self) -> int:
        """Return the number of tokens of an evaluated sequence."""
        return self.settings.length or 2 * self.reached_length

    @property
    def passage_length(self) -> int:
        """Return the number of tokens of a passage, of which a training sequence holds two."""
        return max(2, self.trained_length // 2)

    @property
    def document_length(self) -> int:
        """Return the number of tokens that are evaluated of each document."""
        return self.settings.document_length or self.reached_length

    def check(self) -> None:
        """Raise DataError if the held-out text is too short. Called before the first step, as the
        first evaluation may be the last."""
        for corpus in self.corpora.values():
            heldout_sequences(corpus.heldout, max(self.length, self.passage_length))
        heldout_sequences(self.heldout, max(self.length, self.passage_length))
        if self.settings.documents:
            self.documents  # noqa: B018 (raises where too few are long enough)

    @cached_property
    def documents(self) -> np.ndarray:
        """Return tokens_DL: the first tokens of held-out documents that are long enough. They are
        chosen as `open_documents` does, so that `olmo-sparsity losses` reads the same ones."""
        length = self.document_length
        every = range(len(self.heldout))
        long = [number for number in every if len(self.heldout.document(number)) >= length]
        if len(long) < MIN_DOCUMENTS:
            raise DataError(
                f"{len(long)} held-out documents have {length:,} tokens, evaluation.documents "
                f"needs {MIN_DOCUMENTS}; lower evaluation.document_length, or prepare more text"
            )
        chosen = spread_evenly(long, self.settings.documents)
        texts = [self.heldout.document(number)[:length] for number in chosen]
        return np.stack(texts).astype(np.int64)

    def losses(self, engine: Engine) -> list[dict]:
        """Return rows of "from", "to", "loss", "bits_per_byte", "num_tokens" and "num_documents",
        one for each range of the target's position: within the training length, up to the PoSE
        target, and beyond. `num_documents` counts the sequences that have tokens in the range. With
        positions.per_document, positions begin at 0 in each document, and it counts documents."""
        edges = sorted({0, self.trained_length, self.reached_length, self.length})
        ranges = [*pairwise(edge for edge in edges if edge <= self.length)]
        sums = _PositionSums(self.length, ranges)
        for batch in heldout_batches(
            self.heldout,
            length=self.length,
            num_sequences=self.settings.num_sequences,
            batch_size=self.settings.batch_size * engine.processes.world_size,
            mask_documents=self.mask_documents,
            per_document=self.per_document,
        ):
            own_batch, num_own = own_rows(batch, engine)
            # The loss at index i is that of the token after position i, which is the target. The
            # last token of a row has none.
            nll_BL = engine.token_losses(own_batch)[:num_own, :-1].double().cpu()
            targets_BL = own_batch.positions_BL[:num_own, :-1] + 1
            texts_BL = None
            if self.per_document and own_batch.documents_BL is not None:
                texts_BL = own_batch.documents_BL[:num_own, :-1]
            sums.add(nll_BL, targets_BL, texts_BL)
        sums.add_up(engine.processes)
        return sums.rows(self.heldout.bytes_per_token)

    def losses_by_corpus(self, engine: Engine) -> dict[str, list[dict]]:
        """Return the rows of `losses` for each of several corpora, by name."""
        return {name: corpus.losses(engine) for name, corpus in self.corpora.items()}

    def mean_losses(self, by_corpus: Mapping[str, list[dict]]) -> list[dict]:
        """Return a row for each range with the means over corpora, weighted by their weights in
        data.corpus, and the sums of their counts."""
        # A corpus of weight 0 is evaluated, and not part of the mean.
        rows_of_range: dict[tuple[int, int], list[tuple[float, dict]]] = {}
        for name, rows in by_corpus.items():
            if self.weights[name] == 0:
                continue
            for row in rows:
                weighted_rows = rows_of_range.setdefault((row["from"], row["to"]), [])
                weighted_rows.append((self.weights[name], row))

        means = []
        for (first, end), weighted_rows in sorted(rows_of_range.items()):
            mean: dict[str, float] = {"from": first, "to": end}
            # Of the corpora that have the range: one of short documents may not (per_document).
            total_weight = sum(weight for weight, _ in weighted_rows)
            for key in ("loss", "bits_per_byte"):
                mean[key] = sum(weight * row[key] for weight, row in weighted_rows) / total_weight
            for key in ("num_tokens", "num_documents"):
                mean[key] = sum(row[key] for _, row in weighted_rows)
            means.append(mean)
        return means

    def losses_by_place(self, engine: Engine) -> list[dict]:
        """Return rows of "from", "to", "loss", "standard_error", "num_tokens" and "num_documents",
        for four ranges of places, the farthest first. Every range has tokens of the same documents,
        whose spread gives the standard error. `olmo-sparsity losses` computes the same numbers from
        checkpoints."""
        tokens_DL = torch.from_numpy(self.documents)
        num_documents, length = tokens_DL.shape
        edges = place_edges(length)
        # The token at place 0 has no loss, so the first range begins at 1.
        ranges = [(max(first, 1), end) for first, end in pairwise(edges)]

        sums_DR = torch.zeros(num_documents, len(ranges), dtype=torch.float64)
        batch_size = self.settings.batch_size * engine.processes.world_size
        for start in range(0, num_documents, batch_size):
            batch = _contiguous_batch(tokens_DL[start : start + batch_size])
            own_batch, num_own = own_rows(batch, engine)
            nll_BL = engine.token_losses(own_batch)[:num_own, :-1].double().cpu()
            # The documents of this process, which `own_rows` has taken out of the batch.
            numbers = range(start, min(start + batch_size, num_documents))
            own_numbers = list(numbers)[engine.processes.rank :: engine.processes.world_size]
            for column, (first, end) in enumerate(ranges):
                # The loss at index i is that of the token at place i + 1.
                sums_DR[own_numbers, column] = nll_BL[:, first - 1 : end - 1].sum(1)
        # Each process has zeros for the documents of others.
        engine.processes.sum_in_place(sums_DR)

        losses = []
        for column, (first, end) in enumerate(ranges):
            means_D = sums_DR[:, column] / (end - first)
            losses.append(
                {
                    "from": edges[column],
                    "to": end,
                    "loss": float(means_D.mean()),
                    "standard_error": float(means_D.std()) / math.sqrt(num_documents),
                    "num_tokens": num_documents * (end - first),
                    "num_documents": num_documents,
                }
            )
        return losses[::-1]

    def induction_drop(self, engine: Engine) -> float:
        """Return how many nats the mean loss on a held-out passage is above that on its repetition.
        Passages are half as long as training sequences. A model that does not copy from its context
        is near 0. With several corpora, the result is their weighted mean."""
        if self.corpora:
            total = sum(self.weights.values())
            drops = {name: corpus.induction_drop(engine) for name, corpus in self.corpora.items()}
            return sum(self.weights[name] / total * drop for name, drop in drops.items())
        # In one tensor, so that processes add them up at once.
        sums = torch.zeros(3, dtype=torch.float64)  # passage, repetition, number of passages
        for passages in heldout_batches(
            self.heldout,
            length=self.passage_length,
            num_sequences=NUM_PASSAGES,
            batch_size=self.settings.batch_size * engine.processes.world_size,
        ):
            own_batch, num_own = own_rows(passages, engine)
            nll_B2 = repetition_losses(
                lambda *inputs: engine.token_losses(Batch(*inputs)), own_batch.tokens_BL
            )
            sums[:2] += nll_B2[:num_own].double().sum(0).cpu()
            sums[2] += num_own
        passage_nats, repetition_nats, num_passages = engine.processes.sum_in_place(sums).tolist()
        return (passage_nats - repetition_nats) / num_passages


class _PositionSums:
    """Adds up losses by the position of the target, and gives their means in ranges of positions.

    Shapes: sum_L and count_L by position, num_texts_R by range.
    """

    def __init__(self, length: int, ranges: list[tuple[int, int]]) -> None:
        """length: One more than the largest position of a target.

        Args:
            ranges: The first and the end position of each range.
        """
        self.ranges = ranges
        self.sum_L = torch.zeros(length, dtype=torch.float64)
        self.count_L = torch.zeros(length, dtype=torch.int64)
        self.num_texts_R = torch.zeros(len(ranges), dtype=torch.int64)

    def add(self, nll_BL: Tensor, targets_BL: Tensor, texts_BL: Tensor | None) -> None:
        """Add the losses of a batch.

        Args:
            nll_BL: The loss of each target.
            targets_BL: Its position.
            texts_BL: The number of its document in the row, if positions begin anew in each; else
                None, and each row is one text.
        """
        targets = targets_BL.flatten()
        self.sum_L.index_add_(0, targets, nll_BL.flatten())
        self.count_L.index_add_(0, targets, torch.ones_like(targets))
        for column, (first, end) in enumerate(self.ranges):
            self.num_texts_R[column] += _count_texts(targets_BL, texts_BL, first, end)

    def add_up(self, processes: Processes) -> None:
        """Add the sums of all processes."""
        processes.sum_in_place(self.sum_L)
        processes.sum_in_place(self.count_L)
        processes.sum_in_place(self.num_texts_R)

    def rows(self, bytes_per_token: float) -> list[dict]:
        """Return the row of each range that has a target."""
        rows = []
        for column, (first, end) in enumerate(self.ranges):
            num_tokens = int(self.count_L[first:end].sum())
            if num_tokens == 0:  # no document is as long (positions.per_document)
                continue
            loss = float(self.sum_L[first:end].sum() / num_tokens)
            rows.append(
                {
                    "from": first,
                    "to": end,
                    "loss": loss,
                    "bits_per_byte": loss / math.log(2) / bytes_per_token,
                    "num_tokens": num_tokens,
                    "num_documents": int(self.num_texts_R[column]),
                }
            )
        return rows


def _count_texts(targets_BL: Tensor, texts_BL: Tensor | None, first: int, end: int) -> int:
    """Return the number of rows that have a target in a range of positions. With `texts_BL`, the
    number of each target's document, return the number of documents."""
    is_inside_BL = (targets_BL >= first) & (targets_BL < end)
    if texts_BL is None:
        return int(is_inside_BL.any(1).sum())
    return sum(
        len(texts[inside].unique()) for texts, inside in zip(texts_BL, is_inside_BL, strict=True)
    )


def _contiguous_batch(tokens_BL: Tensor) -> Batch:
    """Return a batch of these tokens, with position IDs from 0 and the next tokens as labels."""
    labels_BL = torch.full_like(tokens_BL, IGNORED)
    labels_BL[:, :-1] = tokens_BL[:, 1:]
    return Batch(tokens_BL, torch.arange(tokens_BL.shape[1]).expand_as(tokens_BL), labels_BL)


class OwnRows(NamedTuple):
    """The rows of a batch that this process evaluates."""

    batch: Batch
    num_rows: int
    """How many rows of the batch count: all, or none if the process has only a stand-in."""


def own_rows(batch: Batch, engine: Engine) -> OwnRows:
    """Return this process's rows of a batch. A process without rows gets the first row, which does
    not count: all processes must run all forward passes, as ZeRO-3 fetches weights from all of
    them."""
    own_batch = batch.rows(slice(engine.processes.rank, None, engine.processes.world_size))
    num_rows = len(own_batch.tokens_BL)
    if num_rows == 0:
        return OwnRows(batch.rows(slice(1)), num_rows=0)
    return OwnRows(own_batch, num_rows)


def format_losses(rows: list[dict]) -> str:
    """Return the losses of the ranges as one line."""
    return " · ".join(f"[{row['from']}, {row['to']}) {row['loss']:.4f}" for row in rows)
