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
from olmo_sparsity.model.losses import token_losses
from olmo_sparsity.training.engine import Engine


def evaluate(engine: Engine, heldout: TokenShards, config: RunConfig) -> list[dict]:
    """[{"from", "to", "loss", "num_tokens"}, …], one row a range of positions of the *target*."""
    length = config.evaluation.length or 2 * config.largest_length
    sum_L = torch.zeros(length, dtype=torch.float64)
    count_L = torch.zeros(length, dtype=torch.int64)
    engine.model.eval()
    for batch in heldout_batches(
        heldout,
        length=length,
        num_sequences=config.evaluation.num_sequences,
        batch_size=config.evaluation.batch_size,
    ):
        batch = batch.to(engine.device)
        with engine.autocast():
            nll_BL = token_losses(
                engine.model,
                batch.tokens_BL,
                batch.positions_BL,
                batch.labels_BL,
            )
        # nll_BL[:, i] is the loss of the token at position i + 1.
        sum_L[1:] += nll_BL[:, :-1].double().sum(0).cpu()
        count_L[1:] += len(nll_BL)
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
