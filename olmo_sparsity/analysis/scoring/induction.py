"""Run the induction check: find out whether a model copies text that it has just read.

A passage and its repetition are read as one text. A model that copies has a lower loss on the
repetition:

    "The bridge opened in 1921. The bridge opened in 1921."
     mean loss 4.1               mean loss 0.6                → drop 3.5 nats: it copies

Most of what distant tokens give to a model of text is copying, so the recovery of a model that does
not copy says little. `repetition_drop` runs the whole check; `losses_of_repetition` is its forward
pass, which `explain` also times.

Dimension key: B rows of a batch (passages), L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.analysis.results.doubts import INDUCTION_SHARE
from olmo_sparsity.analysis.results.meta import InductionCheck
from olmo_sparsity.analysis.scoring.replaced import ReplacingScorer
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.models.identity.use import with_model_in_use
from olmo_sparsity.models.losses import repetition_losses, token_losses
from olmo_sparsity.text.documents import Document

MAX_PASSAGES = 64
"""The largest number of passages."""

MAX_TOKENS = 32768
"""Fewer passages are read if they and their repetitions have more tokens than this. It is enough
for an exact mean; with long windows more would take minutes."""

MIN_PASSAGES = 4
"""So many passages are read even if they have more than `MAX_TOKENS`."""


def repetition_drop(
    scorer: Scorer, documents: Sequence[Document], length: int, max_passages: int = MAX_PASSAGES
) -> InductionCheck:
    """Measure by how much the mean loss on passages falls when they are repeated, and judge whether
    the model copies.

    Args:
        scorer: A scorer of any kind.
        documents: Documents whose beginnings are the passages.
        length: Tokens of a passage.
        max_passages: The largest number of passages.
    """
    passages = passages_of(documents, length, max_passages)
    losses = losses_of_repetition(scorer, passages)
    # Without a passage the losses are 0, and num_passages is 0: JSON has no NaN.
    loss_first = 0.0
    loss_repeated = 0.0
    if len(losses):
        loss_first, loss_repeated = losses.mean(0).tolist()
    drop = loss_first - loss_repeated
    return {
        "loss_first": loss_first,
        "loss_repeated": loss_repeated,
        "drop": drop,
        "has_induction": loss_first > 0 and drop >= INDUCTION_SHARE * loss_first,
        "num_passages": len(passages),
        "passage_length": length,
    }


def passages_of(
    documents: Sequence[Document], length: int, max_passages: int = MAX_PASSAGES
) -> list[np.ndarray]:
    """Return the first `length` tokens of the first documents that have as many. There are at most
    `max_passages`, and fewer if passages are long: 64 of 128 tokens, 16 of 1,024."""
    num_affordable = max(MIN_PASSAGES, MAX_TOKENS // (2 * length))
    passages = [
        document.tokens[:length] for document in documents if len(document.tokens) >= length
    ]
    return passages[: min(max_passages, num_affordable)]


@with_model_in_use
def losses_of_repetition(scorer: Scorer, passages: Sequence[np.ndarray]) -> Tensor:
    """Return nll_B2, in nats: the mean loss on each passage, and on its repetition directly after
    it. All passages must have one length."""
    if not passages:
        return torch.empty(0, 2)
    if isinstance(scorer, ReplacingScorer):
        return torch.from_numpy(scorer.repetition(passages))
    num_tokens = 2 * len(passages[0])  # of a passage and its repetition
    scorer.token_forwards += num_tokens * len(passages)

    def losses_of(batch: Sequence[np.ndarray]) -> Tensor:
        tokens_BL = torch.from_numpy(np.stack(batch).astype(np.int64)).to(scorer.device)
        return repetition_losses(lambda *inputs: token_losses(scorer.model, *inputs), tokens_BL)

    return torch.cat(scorer.in_batches(passages, num_tokens, losses_of))
