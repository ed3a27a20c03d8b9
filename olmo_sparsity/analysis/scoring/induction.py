"""The induction check: whether a model copies text that it has just read.

Dimension key: P passages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.analysis.results.statistics import INDUCTION_SHARE
from olmo_sparsity.analysis.scoring.replaced import ReplacingScorer
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.models.losses import repetition_losses, token_losses
from olmo_sparsity.models.use import with_model_in_use
from olmo_sparsity.text.documents import Document

MOST = 64
"""How many passages are read, at most: fewer if they and their repetitions have more than `TOKENS`
tokens, but not fewer than `LEAST`."""

LEAST = 4

TOKENS = 32768
"""Thousands of tokens make a mean exact enough, and long windows would take minutes."""


def passages_of(documents: Sequence[Document], length: int, most: int = MOST) -> list[np.ndarray]:
    """Return the first `length` tokens of the first documents that have as many."""
    num = min(most, max(LEAST, TOKENS // (2 * length)))
    passages = []
    for document in documents:
        if len(document.tokens) >= length:
            passages.append(document.tokens[:length])
    return passages[:num]


@with_model_in_use
def losses_of_repetition(scorer: Scorer, passages: Sequence[np.ndarray]) -> Tensor:
    """Return nll_P2: the mean loss on each passage, and on its repetition in the same context. All
    passages have one length."""
    if not passages:
        return torch.empty(0, 2)
    if isinstance(scorer, ReplacingScorer):
        return torch.from_numpy(scorer.repetition(passages))
    length = len(passages[0])
    scorer.token_forwards += 2 * length * len(passages)

    def losses_of(batch: Sequence[np.ndarray]) -> Tensor:
        return repetition_losses(
            lambda *inputs: token_losses(scorer.model, *inputs),
            torch.from_numpy(np.stack(batch).astype(np.int64)).to(scorer.device),
        )

    return torch.cat(scorer.in_batches(passages, 2 * length, losses_of))


def repetition_drop(
    scorer: Scorer, documents: Sequence[Document], length: int, most: int = MOST
) -> dict[str, float | bool | int]:
    """Measure the mean loss on passages of `length` tokens, and on their repetition in the same
    context. Copying is most of what distant tokens give to models of text: one that copies little
    has few nats to show."""
    passages = passages_of(documents, length, most)
    losses = losses_of_repetition(scorer, passages)
    first = 0.0
    repeated = 0.0
    if len(losses):
        first, repeated = losses.mean(0).tolist()
    drop = first - repeated
    return {
        "loss_first": first,
        "loss_repeated": repeated,
        "drop": drop,
        "has_induction": drop >= INDUCTION_SHARE * first > 0,
        "num_passages": len(passages),
        "passage_length": length,
    }
