"""Evaluate a model in training: held-out loss by position, and the induction drop.

Place in the flow: model → per-token losses → the training log.

Dimension key: B batch, L length.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from olmo_sparsity.analysis.kernels.losses import repetition_losses
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.data.batches import Batch, heldout_batches, heldout_sequences
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.training.engine import Engine


def evaluation_length(config: RunConfig) -> int:
    return config.evaluation.length or 2 * config.largest_length


def passage_length(config: RunConfig) -> int:
    return max(2, config.training.length // 2)


def check_heldout(heldout: TokenShards, config: RunConfig) -> None:
    """Before the first step, as the first evaluation may be the last."""
    for part in heldout.parts:
        heldout_sequences(part.shards, max(evaluation_length(config), passage_length(config)))


def evaluate(engine: Engine, heldout: TokenShards, config: RunConfig) -> list[dict]:
    """[{"from", "to", "loss", "bits_per_byte", "num_tokens"}, …], one row per range of the target's
    position (positions.per_document: in its document): within the training length, up to the PoSE
    target, and beyond. Of a mixture, these for each "corpus"."""
    rows = []
    for part in heldout.parts:
        name = {"corpus": part.name} if part.name else {}
        rows += [{**name, **row} for row in _evaluate_part(engine, part.shards, config)]
    return rows


def _evaluate_part(engine: Engine, heldout: TokenShards, config: RunConfig) -> list[dict]:
    length = evaluation_length(config)
    sum_L = torch.zeros(length, dtype=torch.float64)
    count_L = torch.zeros(length, dtype=torch.int64)
    for batch in heldout_batches(
        heldout,
        length=length,
        num_sequences=config.evaluation.num_sequences,
        batch_size=config.evaluation.batch_size * engine.processes.world_size,
        mask_documents=config.data.mask_documents,
        per_document=config.positions.per_document,
    ):
        own, num_own = own_rows(batch, engine)
        nll_BL = engine.token_losses(own)[:num_own, :-1].double().cpu()
        # nll_BL[:, i] is the loss of the token after position i.
        after_BL = own.positions_BL[:num_own, :-1] + 1
        sum_L.index_add_(0, after_BL.flatten(), nll_BL.flatten())
        count_L.index_add_(0, after_BL.flatten(), torch.ones_like(after_BL.flatten()))
    engine.processes.add_up(sum_L)
    engine.processes.add_up(count_L)
    edges = sorted({0, config.training.length, config.largest_length, length})
    rows = []
    for first, last in pairwise(edge for edge in edges if edge <= length):
        num_tokens = int(count_L[first:last].sum())
        if num_tokens == 0:  # no document is as long (positions.per_document)
            continue
        loss = float(sum_L[first:last].sum() / num_tokens)
        bits = loss / math.log(2) / heldout.bytes_per_token
        row = {"from": first, "to": last, "loss": loss, "bits_per_byte": bits}
        rows.append(row | {"num_tokens": num_tokens})
    return rows


def induction_drops(engine: Engine, heldout: TokenShards, config: RunConfig) -> dict[str, float]:
    """`induction_drop` of each corpus, by its name."""
    return {part.name: induction_drop(engine, part.shards, config) for part in heldout.parts}


def induction_drop(engine: Engine, heldout: TokenShards, config: RunConfig) -> float:
    """Nats by which the mean loss on held-out passages, half the training length long, falls on
    their repetition; near 0 for a model that does not copy from its context."""
    sums = torch.zeros(3, dtype=torch.float64)  # passage, repetition, number of passages
    for passages in heldout_batches(
        heldout,
        length=passage_length(config),
        num_sequences=64,
        batch_size=config.evaluation.batch_size * engine.processes.world_size,
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
    return " · ".join(
        f"{row.get('corpus', '')}[{row['from']}, {row['to']}) {row['loss']:.4f}" for row in rows
    )
