"""The induction check: whether a model copies text that it has just read.

Place in the flow: below measurements and checks, which give its result next to their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.analysis.inputs.documents import Document
from olmo_sparsity.analysis.kernels.losses import repetition_losses, token_losses
from olmo_sparsity.analysis.models.use import with_model_in_use
from olmo_sparsity.analysis.results.statistics import INDUCTION_SHARE
from olmo_sparsity.analysis.scoring.scorer import Scorer


@with_model_in_use
def repetition_drop(
    scorer: Scorer, documents: Sequence[Document], length: int, max_passages: int = 64
) -> dict[str, float | bool | int]:
    """The induction check: mean loss on passages of `length` tokens and on their repetition in the
    same context. Copying is most of what far tokens give to models of text: one that copies little
    has few nats to show."""
    passages = [d.tokens[:length] for d in documents if len(d.tokens) >= length][:max_passages]

    def losses_of(batch: Sequence[np.ndarray]) -> Tensor:
        return repetition_losses(
            lambda *inputs: token_losses(scorer.model, *inputs),
            torch.from_numpy(np.stack(batch).astype(np.int64)).to(scorer.device),
        )

    losses = scorer.in_batches(passages, 2 * length, losses_of)
    first, repeated = torch.cat(losses).mean(0).tolist() if losses else (0.0, 0.0)
    drop = first - repeated
    return {
        "loss_first": first,
        "loss_repeated": repeated,
        "drop": drop,
        "has_induction": drop >= INDUCTION_SHARE * first > 0,
        "num_passages": len(passages),
        "passage_length": length,
    }
