"""Held-out loss by position: inside the training length, up to the PoSE target, and beyond.

Place in the flow: model → per-token losses → the training log.

Dimension key: B batch, L length.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from olmo_sparsity.config import RunConfig
from olmo_sparsity.data.batches import heldout_batches
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.training.engine import Engine


def evaluate(engine: Engine, heldout: TokenShards, config: RunConfig) -> list[dict]:
    """[{"from", "to", "loss", "num_tokens"}, …], one row a range of positions of the *target*."""
    length = config.evaluation.length or 2 * config.largest_length
    rank, world_size = engine.processes.rank, engine.processes.world_size
    sum_L = torch.zeros(length, dtype=torch.float64)
    count_L = torch.zeros(length, dtype=torch.int64)
    for batch in heldout_batches(
        heldout,
        length=length,
        num_sequences=config.evaluation.num_sequences,
        batch_size=config.evaluation.batch_size * world_size,
    ):
        # Every process runs every forward (ZeRO-3 fetches weights from all of them), so one that
        # has no row left computes the first once more and does not count it.
        own = batch.rows(slice(rank, None, world_size))
        num_own = len(own.tokens_BL)
        nll_BL = engine.token_losses(own if num_own else batch.rows(slice(1)))
        # nll_BL[:, i] is the loss of the token at position i + 1.
        sum_L[1:] += nll_BL[:num_own, :-1].double().sum(0).cpu()
        count_L[1:] += num_own
    engine.processes.add_up(sum_L)
    engine.processes.add_up(count_L)
    edges = sorted({0, config.training.length, config.largest_length, length})
    return [
        {
            "from": first,
            "to": last,
            "loss": float(sum_L[first:last].sum() / count_L[first:last].sum()),
            "num_tokens": int(count_L[first:last].sum()),
        }
        for first, last in pairwise(edge for edge in edges if edge <= length)
    ]


def format_losses(rows: list[dict]) -> str:
    return " · ".join(f"[{row['from']}, {row['to']}) {row['loss']:.4f}" for row in rows)
