"""Has the model anything to measure? Its drop in loss on a passage repeated once.

A model that does not use what it has just read verbatim (no induction) cannot show that long-range
dependency is sparse; every measurement says so before it asks anything else.

Dimension key: B passages, L length of a passage and its repeat.
"""

from __future__ import annotations

import numpy as np
import torch

from analysis.scoring import Scorer
from analysis.summary import INDUCTION_NATS
from olmo_sparsity.model.losses import token_losses


def repetition_drop(
    scorer: Scorer, documents: list[np.ndarray], length: int, max_passages: int = 64
) -> dict[str, float | bool | int]:
    """Mean loss on first and second reading of passages of `length` tokens, in one context."""
    passages = [document[:length] for document in documents if len(document) >= length]
    passages = passages[:max_passages]
    first, second, count = 0.0, 0.0, 0
    size = max(1, scorer.batch_tokens // (2 * length))
    for start in range(0, len(passages), size):
        batch = np.stack(passages[start : start + size]).astype(np.int64)
        tokens_BL = torch.from_numpy(np.concatenate([batch, batch], axis=1)).to(scorer.device)
        positions_BL = torch.arange(2 * length, device=scorer.device).expand_as(tokens_BL)
        nll_BL = token_losses(
            scorer.model, tokens_BL[:, :-1], positions_BL[:, :-1], tokens_BL[:, 1:]
        )
        # nll_BL[:, i] is token i + 1: tokens 1 … L−1 and the same tokens L later.
        first += float(nll_BL[:, : length - 1].sum())
        second += float(nll_BL[:, length : 2 * length - 1].sum())
        count += len(batch) * (length - 1)
    count = max(count, 1)
    drop = (first - second) / count
    return {
        "loss_first": first / count,
        "loss_repeated": second / count,
        "drop": drop,
        "has_induction": drop >= INDUCTION_NATS,
        "num_passages": len(passages),
        "passage_length": length,
    }
