"""Evaluate a model in training on held-out text.

    evaluation = build_evaluation(heldout, config)    # setup/inputs.py, once
    evaluation.check()                                # is there enough text?
    evaluation.losses(engine)                         # after_step/evaluation.py, each time

A model that is trained on sequences of 512 tokens with PoSE up to position 2,048:

    losses            loss by position: rows of [0, 512), [512, 2048) and [2048, 4096)
    losses_by_place   loss of the same long documents at early and late places: [0, 256),
                      [256, 512), [512, 1024), [1024, 2048)
    induction_drop    by how many nats the loss falls when a passage of 256 tokens is read twice

Processes share the rows of each batch, and add up their sums. Results are rows of metrics.jsonl
(metrics/loss_rows.py).

Dimension key: B batch, L length, D documents, R ranges of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.config.sections import EvaluationConfig
from olmo_sparsity.data.batches import Batch, next_tokens
from olmo_sparsity.data.heldout import heldout_batches, heldout_sequences
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.models.losses import place_edges, repetition_losses
from olmo_sparsity.text.runs import spread_evenly
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.evaluation.position_sums import PositionSums
from olmo_sparsity.training.metrics.loss_rows import LossRow, weighted_mean_rows

Measures = dict[str, Callable[[int, Mapping[str, Tensor]], dict]]
"""Functions that measure something else in each evaluation, such as tasks of lm_eval. Each is
called with a step and a copy of its weights. Keys are the names of their results in the metrics."""

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
    """Whether attention is restricted to a token's document (`data.mask_documents`)."""

    per_document: bool
    """Whether position IDs begin at 0 in each document (`positions.per_document`)."""

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
        """Raise DataError if the held-out text is too short. It is called before the first step, as
        the first evaluation may come after days."""
        longest = max(self.length, self.passage_length)
        for corpus in self.corpora.values():
            heldout_sequences(corpus.heldout, longest)
        heldout_sequences(self.heldout, longest)
        if self.settings.documents:
            _ = self.documents  # raises if too few are long enough

    @cached_property
    def documents(self) -> np.ndarray:
        """Return tokens_DL: the first tokens of held-out documents that are long enough. They are
        chosen as `open_documents` does, so that `olmo-sparsity losses` reads the same ones."""
        length = self.document_length
        numbers = range(len(self.heldout))
        long_ones = [number for number in numbers if len(self.heldout.document(number)) >= length]
        if len(long_ones) < MIN_DOCUMENTS:
            raise DataError(
                f"{len(long_ones)} held-out documents have {length:,} tokens, "
                f"evaluation.documents needs {MIN_DOCUMENTS}; lower evaluation.document_length, or "
                "prepare more text"
            )
        chosen = spread_evenly(long_ones, self.settings.documents)
        beginnings = [self.heldout.document(number)[:length] for number in chosen]
        return np.stack(beginnings).astype(np.int64)

    # --- loss by position -----------------------------------------------------------------------

    def losses(self, engine: Engine) -> list[LossRow]:
        """Return a row for each range of the target's position: within the training length, up to
        the largest position that PoSE trains, and beyond. `num_documents` counts the sequences that
        have tokens in the range. With `positions.per_document`, positions begin at 0 in each
        document, and it counts documents."""
        edges = sorted({0, self.trained_length, self.reached_length, self.length})
        # Sequences may be shorter than those of training.
        ranges = [*pairwise(edge for edge in edges if edge <= self.length)]
        sums = PositionSums(self.length, ranges)
        for batch in heldout_batches(
            self.heldout,
            length=self.length,
            num_sequences=self.settings.num_sequences,
            batch_size=self._batch_size(engine),
            mask_documents=self.mask_documents,
            per_document=self.per_document,
        ):
            own_batch, num_own = own_rows(batch, engine)
            nll_BL = target_losses(engine, own_batch)[:num_own]
            # The loss at index i is that of the token after position i, which is the target.
            targets_BL = own_batch.positions_BL[:num_own, :-1] + 1
            texts_BL = None
            if self.per_document and own_batch.documents_BL is not None:
                texts_BL = own_batch.documents_BL[:num_own, :-1]
            sums.add(nll_BL, targets_BL, texts_BL)
        sums.add_up(engine.processes)
        return sums.rows(self.heldout.bytes_per_token)

    def losses_by_corpus(self, engine: Engine) -> dict[str, list[LossRow]]:
        """Return the rows of `losses` for each of several corpora, by name."""
        return {name: corpus.losses(engine) for name, corpus in self.corpora.items()}

    def mean_losses(self, by_corpus: Mapping[str, list[LossRow]]) -> list[LossRow]:
        """Return a row for each range with the means over corpora, weighted by their weights in
        `data.corpus`, and the sums of their counts."""
        return weighted_mean_rows(by_corpus, self.weights)

    # --- loss by place in long documents --------------------------------------------------------

    def losses_by_place(self, engine: Engine) -> list[LossRow]:
        """Return a row for each of four ranges of places, the farthest first. Every range has
        tokens of the same documents, whose spread gives the standard error. `olmo-sparsity losses`
        computes the same numbers from checkpoints."""
        num_documents, length = self.documents.shape
        edges = place_edges(length)
        # The token at place 0 has no loss, so the first range begins at 1.
        ranges = [(max(first, 1), end) for first, end in pairwise(edges)]
        sums_DR = self._sum_by_place(engine, ranges)

        rows: list[LossRow] = []
        for range_index, (first, end) in enumerate(ranges):
            means_D = sums_DR[:, range_index] / (end - first)
            rows.append(
                {
                    "from": edges[range_index],
                    "to": end,
                    "loss": float(means_D.mean()),
                    "standard_error": float(means_D.std()) / math.sqrt(num_documents),
                    "num_tokens": num_documents * (end - first),
                    "num_documents": num_documents,
                }
            )
        return rows[::-1]

    def _sum_by_place(self, engine: Engine, ranges: list[tuple[int, int]]) -> Tensor:
        """Return sums_DR: the sum of the losses of each document in each range of places, in nats,
        on all processes the same."""
        num_documents = len(self.documents)
        rank = engine.processes.rank
        world_size = engine.processes.world_size
        sums_DR = torch.zeros(num_documents, len(ranges), dtype=torch.float64)
        batch_size = self._batch_size(engine)
        for start in range(0, num_documents, batch_size):
            batch = _contiguous_batch(self.documents[start : start + batch_size])
            own_batch, num_own = own_rows(batch, engine)
            nll_BL = target_losses(engine, own_batch)[:num_own]
            # The documents of this process, which `own_rows` has taken out of the batch.
            documents = range(start, min(start + batch_size, num_documents))
            own_documents = list(documents)[rank::world_size]
            for range_index, (first, end) in enumerate(ranges):
                # The loss at index i is that of the token at place i + 1.
                sums_DR[own_documents, range_index] = nll_BL[:, first - 1 : end - 1].sum(1)
        # Each process has zeros for the documents of others.
        return engine.processes.sum_in_place(sums_DR)

    # --- induction ------------------------------------------------------------------------------

    def induction_drop(self, engine: Engine) -> float:
        """Return how many nats the mean loss on a held-out passage is above that on its repetition:
        2.2 if they are 3.1 and 0.9. Passages are half as long as training sequences. A model that
        does not copy from its context is near 0. With several corpora, the result is their weighted
        mean."""
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
            batch_size=self._batch_size(engine),
        ):
            own_batch, num_own = own_rows(passages, engine)
            nll_B2 = repetition_losses(
                lambda *inputs: engine.token_losses(Batch(*inputs)), own_batch.tokens_BL
            )
            sums[:2] += nll_B2[:num_own].double().sum(0).cpu()
            sums[2] += num_own
        passage_nats, repetition_nats, num_passages = engine.processes.sum_in_place(sums).tolist()
        return (passage_nats - repetition_nats) / num_passages

    def _batch_size(self, engine: Engine) -> int:
        """Return the number of sequences that all processes together evaluate at once."""
        return self.settings.batch_size * engine.processes.world_size


class OwnRows(NamedTuple):
    """The rows of a batch that this process evaluates."""

    batch: Batch
    num_rows: int
    """How many rows of `batch` count: all, or none if there are more processes than rows."""


def own_rows(batch: Batch, engine: Engine) -> OwnRows:
    """Return this process's rows of a batch: with 4 processes, process 1 evaluates the rows 1, 5,
    9, … A process without rows gets the first row, which does not count: all processes must run all
    forward passes, as ZeRO-3 fetches weights from all of them."""
    own_batch = batch.rows(slice(engine.processes.rank, None, engine.processes.world_size))
    num_rows = len(own_batch.tokens_BL)
    if num_rows == 0:
        return OwnRows(batch.rows(slice(1)), num_rows=0)
    return OwnRows(own_batch, num_rows)


def target_losses(engine: Engine, batch: Batch) -> Tensor:
    """Return nll_BL of the targets of a batch in fp64, in main memory. L is one less than the
    length of the rows, whose last token has no target."""
    return engine.token_losses(batch)[:, :-1].double().cpu()


def _contiguous_batch(tokens_BL: np.ndarray) -> Batch:
    """Return a batch of these tokens, with position IDs from 0 and the next tokens as labels."""
    return Batch(
        tokens_BL=torch.from_numpy(tokens_BL),
        positions_BL=torch.arange(tokens_BL.shape[1]).expand(tokens_BL.shape),
        labels_BL=torch.from_numpy(next_tokens(tokens_BL)),
    )
