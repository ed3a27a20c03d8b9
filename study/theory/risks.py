"""Estimate the risk of a hypothesis at a length, with a 95% interval.

The loss is 1 − h(X)_Y, the probability of the wrong label. Strings are sampled; the attention over
all subsets of a string is exact. Dimension key: R replicas, B batch, L length, Y labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from study.theory.planted import Planted
from study.theory.sparse_attention import (
    Layout,
    SparseAttention,
    batches_that_fit,
    build_layout,
)


@dataclass(frozen=True)
class Risk:
    """Risk per replica, with the 95% interval of the sampling."""

    mean_R: np.ndarray
    low_R: np.ndarray
    high_R: np.ndarray


def sampled_risk(
    model: SparseAttention, planted: Planted, length: int, num_strings: int, seeds: list[int]
) -> Risk:
    layout = build_layout(planted.ids(length), model.shape)
    drawn = [
        planted.sample(length, num_strings, np.random.default_rng([seed, length])) for seed in seeds
    ]
    tokens_RBL = torch.from_numpy(np.stack([sample.in_id_order() for sample in drawn]))
    labels_RB = torch.from_numpy(np.stack([sample.labels_B for sample in drawn]))
    wrong_RB = _wrong(model, tokens_RBL, labels_RB, layout)
    mean_R = wrong_RB.mean(axis=1)
    half_R = 1.96 * wrong_RB.std(axis=1, ddof=1) / math.sqrt(num_strings)
    return Risk(mean_R, np.maximum(mean_R - half_R, 0), mean_R + half_R)


@torch.no_grad()
def _wrong(
    model: SparseAttention, tokens_RBL: torch.Tensor, labels_RB: torch.Tensor, layout: Layout
) -> np.ndarray:
    parts = []
    for part in batches_that_fit(tokens_RBL.shape[1], model.num_replicas, layout):
        probs_RBY = model(tokens_RBL[:, part], layout)
        parts.append(1 - probs_RBY.gather(2, labels_RB[:, part, None])[..., 0])
    return torch.cat(parts, dim=1).double().numpy()
