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

MAX_PASSAGES = 64
"""How many passages are read, at most: fewer if they and their repetitions have more than
`MAX_TOKENS` tokens, but not fewer than `MIN_PASSAGES`."""

MIN_PASSAGES = 4

MAX_TOKENS = 32768
"""Enough for an exact mean; with long windows more would take minutes."""


def passages_of(
    documents: Sequence[Document], length: int, most: int = MAX_PASSAGES
) -> list[np.ndarray]:
    """Return the first `length` tokens of the first documents that have as many: of `most` at most,
    and of fewer if they are long."""
    num = min(most, max(MIN_PASSAGES, MAX_TOKENS // (2 * length)))
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
    scorer: Scorer, documents: Sequence[Document], length: int, most: int = MAX_PASSAGES
) -> dict[str, float | bool | int]:
    """Measure the mean loss on passages of `length` tokens, and on their repetition in the same
    context. Most of what distant tokens give to a model of text is copying: a model that copies
    little gains little from them, so its recovery says little."""
    passages = passages_of(documents, length, most)
    losses = losses_of_repetition(scorer, passages)
    # Without a passage the losses are 0, and num_passages is 0: JSON has no NaN.
    first = 0.0
    repeated = 0.0
    if len(losses):
        first, repeated = losses.mean(0).tolist()
    drop = first - repeated
    return {
        "loss_first": first,
        "loss_repeated": repeated,
        "drop": drop,
        "has_induction": first > 0 and drop >= INDUCTION_SHARE * first,
        "num_passages": len(passages),
        "passage_length": length,
    }
