"""Train a hypothesis of the attention class on strings of lengths L/2 … L, for all seeds at once.

There are two objectives. Eq. (3) is the mixture: the mean risk over the lengths. The minimax
objective of the answer to the reviewers is the largest risk, approximated by weighting the lengths
with a softmax of their running risks. (With risks of single batches, noise would choose the length;
accumulated weights oscillated.)

Dimension key: R replicas (seeds), B batch, L length, G training lengths, Y labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch

from study.theory.planted import Planted
from study.theory.settings import LearningConfig
from study.theory.sparse_attention import PAD, KeyShape, SparseAttention, build_layout

_SHARPNESS, _MEMORY = 20.0, 0.9
"""Minimax weights of the lengths are softmax(sharpness · risk / mean risk), of risks that decay by
the memory each step."""


def training_lengths(longest: int) -> list[int]:
    """L/2 … L, both ends included (Eq. 3)."""
    return list(range((longest + 1) // 2, longest + 1))


def learn(
    planted: Planted,
    shape: KeyShape,
    longest: int,
    objective: Literal["mixture", "minimax"],
    config: LearningConfig,
    seeds: list[int],
    report: Callable[[int, float], None] = lambda step, risk: None,
) -> SparseAttention:
    """A replica depends only on its own seed."""
    lengths = training_lengths(longest)
    layout = build_layout(planted.ids(longest), shape)
    model = SparseAttention(shape, len(planted.background_V), planted.num_labels, len(seeds))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=config.num_steps)
    rngs = [np.random.default_rng([seed, 0]) for seed in seeds]
    weights_RG = torch.full((len(seeds), len(lengths)), 1 / len(lengths))
    running_RG = torch.zeros_like(weights_RG)
    batches = _draw_batches(planted, lengths, config, rngs)
    for step, (tokens_RBL, labels_RB) in enumerate(batches):
        probs_RBY = model(tokens_RBL, layout)
        wrong_RB = 1 - probs_RBY.gather(2, labels_RB[..., None])[..., 0]
        risk_RG = wrong_RB.view(len(seeds), len(lengths), -1).mean(dim=-1)
        # Replicas share no parameters, so the sum of their losses trains each independently.
        loss = (weights_RG * risk_RG).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        if objective == "minimax":
            running_RG = _MEMORY * running_RG + (1 - _MEMORY) * risk_RG.detach()
            mean_R1 = running_RG.mean(dim=1, keepdim=True).clamp(min=1e-12)
            weights_RG = (_SHARPNESS * running_RG / mean_R1).softmax(dim=1)
        report(step + 1, float(risk_RG.detach().mean()))
    return model


_DRAWN_AT_ONCE = 50  # steps: drawing many strings in one call is cheap


def _draw_batches(
    planted: Planted, lengths: list[int], config: LearningConfig, rngs: list[np.random.Generator]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Equally many strings of each length, in order of length, padded to the longest."""
    for first in range(0, config.num_steps, _DRAWN_AT_ONCE):
        steps = min(_DRAWN_AT_ONCE, config.num_steps - first)
        shape = (steps, len(rngs), len(lengths), config.batch_per_length)
        tokens = np.full((*shape, lengths[-1]), PAD)
        labels = np.zeros(shape, dtype=int)
        for replica, rng in enumerate(rngs):
            for index, length in enumerate(lengths):
                sample = planted.sample(length, steps * config.batch_per_length, rng)
                in_order = sample.in_id_order().reshape(steps, -1, length)
                tokens[:, replica, index, :, :length] = in_order
                labels[:, replica, index] = sample.labels_B.reshape(steps, -1)
        for step in range(steps):
            yield (
                torch.from_numpy(tokens[step]).flatten(1, 2),
                torch.from_numpy(labels[step]).flatten(1, 2),
            )
