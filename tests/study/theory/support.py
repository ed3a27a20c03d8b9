"""Planted distributions, and a comparison of seconds."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

from study.theory import planted as P
from study.theory.sparse_attention import KeyShape, SparseAttention, _wrong, build_layout


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


def enumerate_strings(planted: P.Planted, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All possible strings in ID order with each label: tokens_XL, labels_X, mass_X."""
    vocab, k = len(planted.background_V), planted.law.num_places
    strings_XL = np.array(list(product(range(vocab), repeat=length)))
    if planted.coupled:  # In ID order the planted tokens are one group, drawn uniformly.
        groups = np.arange(length // k)
        places_NJ = groups[:, None] * k + np.arange(k)
        mass_N = np.full(len(groups), 1 / len(groups))
    else:
        places_NJ, mass_N = planted.law.table(length)
    background_XL = planted.background_V[strings_XL]
    mass_XY = np.zeros((len(strings_XL), planted.num_labels))
    drawn = list(zip(planted.tokens_ZJ, planted.labels_Z, planted.mass_Z, strict=True))
    for places_J, place_mass in zip(places_NJ, mass_N, strict=True):
        rest_X = np.delete(background_XL, places_J, axis=1).prod(axis=1)
        for tokens_J, label, mass in drawn:
            agrees_X = (strings_XL[:, places_J] == tokens_J).all(axis=1)
            mass_XY[:, label] += place_mass * mass * rest_X * agrees_X
    which_X, labels_X = np.nonzero(mass_XY)
    return strings_XL[which_X], labels_X, mass_XY[which_X, labels_X]


def enumerated_risk(model: SparseAttention, planted: P.Planted, length: int) -> np.ndarray:
    """mean_R over all strings."""
    tokens_XL, labels_X, mass_X = enumerate_strings(planted, length)
    layout = build_layout(planted.ids(length), model.shape)
    tokens_RXL = torch.from_numpy(tokens_XL).expand(model.num_replicas, -1, -1)
    labels_RX = torch.from_numpy(labels_X).expand(model.num_replicas, -1)
    return _wrong(model, tokens_RXL, labels_RX, layout) @ mass_X


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
