"""Evaluate a model in training: held-out loss by position, and the induction drop.

Dimension key: B batch, L length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from olmo_sparsity.config.sections import EvaluationConfig
from olmo_sparsity.data.batches import Batch, heldout_batches, heldout_sequences
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.models.losses import repetition_losses
from olmo_sparsity.training.engine import Engine

NUM_PASSAGES = 64


@dataclass(frozen=True)
class Evaluation:
    """Held-out text, and how it is evaluated."""

    heldout: TokenShards
    settings: EvaluationConfig
    trained: int
    """Tokens of a training sequence, the longest."""

    reached: int
    """One more than the largest position ID of a training sequence."""

    mask_documents: bool
    per_document: bool

    @property
    def length(self) -> int:
        return self.settings.length or 2 * self.reached

    @property
    def passage_length(self) -> int:
        return max(2, self.trained // 2)

    def check(self) -> None:
        """Before the first step, as the first evaluation may be the last."""
        heldout_sequences(self.heldout, max(self.length, self.passage_length))

    def losses(self, engine: Engine) -> list[dict]:
        """[{"from", "to", "loss", "bits_per_byte", "num_tokens"}, …], one row per range of the
        target's position (positions.per_document: in its document): within the training length, up
        to the PoSE target, and beyond."""
        rows = []
        sum_L = torch.zeros(self.length, dtype=torch.float64)
        count_L = torch.zeros(self.length, dtype=torch.int64)
        for batch in heldout_batches(
            self.heldout,
            length=self.length,
            num_sequences=self.settings.num_sequences,
            batch_size=self.settings.batch_size * engine.processes.world_size,
            mask_documents=self.mask_documents,
            per_document=self.per_document,
        ):
            own, num_own = own_rows(batch, engine)
            nll_BL = engine.token_losses(own)[:num_own, :-1].double().cpu()
            # nll_BL[:, i] is the loss of the token after position i.
            after_BL = own.positions_BL[:num_own, :-1] + 1
            sum_L.index_add_(0, after_BL.flatten(), nll_BL.flatten())
            count_L.index_add_(0, after_BL.flatten(), torch.ones_like(after_BL.flatten()))
        engine.processes.add_up(sum_L)
        engine.processes.add_up(count_L)
        edges = sorted({0, self.trained, self.reached, self.length})
        for first, last in pairwise(edge for edge in edges if edge <= self.length):
            num_tokens = int(count_L[first:last].sum())
            if num_tokens == 0:  # no document is as long (positions.per_document)
                continue
            loss = float(sum_L[first:last].sum() / num_tokens)
            bits = loss / math.log(2) / self.heldout.bytes_per_token
            row = {"from": first, "to": last, "loss": loss, "bits_per_byte": bits}
            rows.append(row | {"num_tokens": num_tokens})
        return rows

    def induction_drop(self, engine: Engine) -> float:
        """Nats by which the mean loss on held-out passages, half the training length long, falls on
        their repetition; near 0 for a model that does not copy from its context."""
        sums = torch.zeros(3, dtype=torch.float64)  # passage, repetition, number of passages
        for passages in heldout_batches(
            self.heldout,
            length=self.passage_length,
            num_sequences=NUM_PASSAGES,
            batch_size=self.settings.batch_size * engine.processes.world_size,
        ):
            own, num_own = own_rows(passages, engine)
            nll_B2 = repetition_losses(
                lambda *inputs: engine.token_losses(Batch(*inputs)), own.tokens_BL
            )
            sums[:2] += nll_B2[:num_own].double().sum(0).cpu()
            sums[2] += num_own
        first, second, count = engine.processes.add_up(sums).tolist()
        return (first - second) / count


def own_rows(batch: Batch, engine: Engine) -> tuple[Batch, int]:
    """This process's rows of a batch, and how many of them count. All processes must run all
    forwards, as ZeRO-3 fetches weights from all of them, so one without rows computes the first
    row, which does not count."""
    own = batch.rows(slice(engine.processes.rank, None, engine.processes.world_size))
    num_own = len(own.tokens_BL)
    return (own, num_own) if num_own else (batch.rows(slice(1)), 0)


def format_losses(rows: list[dict]) -> str:
    return " · ".join(f"[{row['from']}, {row['to']}) {row['loss']:.4f}" for row in rows)
