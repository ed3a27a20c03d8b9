"""Planted distributions, and a comparison of seconds."""

from __future__ import annotations

import numpy as np
import torch

from olmo_sparsity.theory import planted as P
from olmo_sparsity.theory.sparse_attention import (
    KeyShape,
    SparseAttention,
)


def parity(law: P.PositionLaw, *, rate: float = 0.3, coupled: bool = False) -> P.Planted:
    tokens = P.parity_tokens(law.num_places)
    return P.Planted(law, *tokens, P.marker_background(rate), coupled=coupled)


def explicit_law(tables: dict[int, dict[tuple[int, ...], float]]) -> P.PositionLaw:
    """Any Q^pos as a table: length → {places: probability}."""
    k = len(next(iter(tables[max(tables)])))
    return P.PositionLaw(k, lambda n: (np.array([*tables[n]]), np.array([*tables[n].values()])))


def random_model(shape: KeyShape, *, seed: int = 0, replicas: int = 2) -> SparseAttention:
    generator = torch.Generator().manual_seed(seed)
    model = SparseAttention(shape, vocab_size=3, num_labels=2, num_replicas=replicas).double()
    with torch.no_grad():
        model.log_key_RPC.normal_(0, 2, generator=generator)
        model.value_logits_RCY.normal_(0, 2, generator=generator)
    return model


TINY = """
train_length: 8
test_multiples: [1, 2]
local_span: 2
seeds: [0, 1]
num_strings: 50
learning: {num_steps: 5, batch_per_length: 16}
cases:
  - {setting: local, num_places: 2}
  - {setting: nonlocal, num_places: 2}
  - {setting: coupled, num_places: 2, objective: minimax}
  - {setting: order, num_places: 2, attention_places: 1}
"""
