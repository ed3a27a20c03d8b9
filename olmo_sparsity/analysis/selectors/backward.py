"""Run a backward pass from the losses of several targets: what both kinds of gradients share.

    with frozen(model), torch.enable_grad():
        hidden_BLD = model.hidden(tokens_BL, positions_BL)      # row i is for the target spans[i]
        total = sum_losses(scorer, hidden_BLD, context, spans)  # nats, one number
        gradient = torch.autograd.grad(total, …)

The loss of a target depends on its own row alone. So the gradient of the sum with respect to an
input of row i is the gradient of the loss of target i, and one backward pass serves all targets.

Dimension key: B rows of a batch, L tokens of a row, W targets of a row or block, D width, N items
of a list (the targets of all rows), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.analysis.scoring.rows import Context
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.models.distant_states import to_device
from olmo_sparsity.text.units import Spans

FORWARD_AND_BACKWARD = 3
"""The cost of a forward and a backward pass, in forward passes: a backward pass costs two. A model
that recomputes its activations takes one more."""


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Switch the gradients of all weights off, and on again at the end. Otherwise layers would keep
    all their inputs for the backward pass."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in trainable:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in trainable:
            weight.requires_grad_()


def sum_losses(scorer: Scorer, hidden_BLD: Tensor, context: Context, spans: Spans) -> Tensor:
    """Return the sum of the losses of all targets, in nats.

    For the targets (0, 2) and (4, 5) there are two rows and three tokens: tokens 0 and 1 of row 0,
    and token 4 of row 1. The last input predicts token 4, so they are at the indices −5, −4 and −1.

    Args:
        hidden_BLD: The hidden states of a row for each target. All rows end with the input that
            predicts the last token of all targets.
        spans: The targets, as indices into the block: from the first token to one past the last.
    """
    last_end = max(end for _, end in spans)
    num_tokens_of_target = [end - first for first, end in spans]
    row_N = np.arange(len(spans)).repeat(num_tokens_of_target)
    token_N = np.concatenate([np.arange(first, end) for first, end in spans])
    index_in_row_N = token_N - last_end  # negative, as rows are aligned at their ends
    label_N = context.block.targets_W[token_N]

    rows, indices, labels = to_device((row_N, index_in_row_N, label_N), hidden_BLD.device)
    logits_NV = scorer.model.unembed(hidden_BLD[rows, indices]).float()
    return torch.nn.functional.cross_entropy(logits_NV, labels, reduction="sum")
