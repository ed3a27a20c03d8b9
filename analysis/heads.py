"""Fit a weight for each attention head, so that attention predicts exact influences.

Place in the flow: losses → **weights of heads** → the selector `attention_learned`. As AT2
(Cohen-Wang et al. 2025), which fits to random ablations instead.

Dimension key: H heads of all layers, F far places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.influence import Question, add_one
from analysis.saliency import head_attention
from analysis.scoring import Scorer
from analysis.windows import Units, Windows

RIDGE = 1e-3
"""Relative to the mean squared attention of a head."""


@dataclass(frozen=True)
class HeadWeights:
    weights: list[float]
    """In nats for all of a head's attention, for the heads of all layers."""

    num_targets: int
    token_forwards: int
    """Those of the fit."""


def fit_head_weights(
    scorer: Scorer, windows: Windows, targets: Sequence[tuple[np.ndarray, int]]
) -> HeadWeights:
    """By least squares, so that attention gives the influences of `add_one` on the targets, each
    the tokens of a document and a place in it."""
    before = scorer.token_forwards
    products, with_influence = [], []
    for tokens, place in targets:
        start = int(windows.start_of(place))
        block = windows.block(tokens, start, place + 1)
        units, spans = Units.of_tokens(block.num_far), [(place - start, place - start + 1)]
        question = Question(scorer.context(block), units, spans, 1, np.random.default_rng(0))
        (attention_HF,) = head_attention(scorer, question.context, spans)
        (influence_F,) = add_one(scorer, question).score_TU
        attention_HF = attention_HF - attention_HF.mean(1, keepdims=True)
        products.append(attention_HF @ attention_HF.T)
        with_influence.append(attention_HF @ influence_F)
    product_HH = sum(products)
    ridge_H = np.full(len(product_HH), RIDGE * np.trace(product_HH) / len(product_HH))
    weights_H = np.linalg.solve(product_HH + np.diag(ridge_H), sum(with_influence))
    return HeadWeights(weights_H.tolist(), len(targets), scorer.token_forwards - before)
