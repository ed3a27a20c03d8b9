"""Read from the model how much a prediction uses distant tokens: by embeddings and attention.

    head_attention       attention weights of each head, from the local window to distant tokens
    embedding_saliency   −gradient · embedding of each distant token, with the long window

Both take a context and targets, each as a span of the block's target tokens, and return a number
for each target and distant token (`head_attention` for each head, too). For the targets "Paris" and
"." after four distant tokens:

                  The    capital    of   France
    saliency_TF   0.0      0.9     0.1     2.4        "Paris"
                  0.0      0.1     0.0     0.0        "."

They need one forward, or a forward and a backward pass, for all distant tokens. `add_one` needs a
forward for each distant unit. The selectors `attention` and `gradient` (influence.py) use them.
gates.py has a third way, the gradient of gates.

Dimension key: B rows of a batch, L tokens of a row, S keys that a row attends to, F distant tokens,
T targets, D width, H heads (of all layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.analysis.scoring.rows import Context, Row
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.scoring.tensors import as_tensors
from olmo_sparsity.analysis.selectors.backward import FORWARD_AND_BACKWARD, frozen, sum_losses
from olmo_sparsity.analysis.selectors.gates import gate_gradients
from olmo_sparsity.models.attention import fast_kernels
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.identity.use import in_this_thread, in_use
from olmo_sparsity.text.units import Spans

# Users import `gate_gradients` from here.
__all__ = ["embedding_saliency", "gate_gradients", "head_attention"]


def head_attention(scorer: Scorer, context: Context, spans: Spans) -> np.ndarray:
    """Return attention_THF: the attention of each head from the tokens that predict the target to
    the distant tokens, summed over the tokens of the target."""
    block = context.block
    states = context.states
    if states is None:
        # Attention is that of the long window, also where distant tokens are shown alone.
        states = scorer.states(block.tokens[: block.num_prefix + block.num_distant])
    attention_by_target = []
    for first, end in spans:
        attention_by_token = [
            _attention_of_token(scorer, context, states, token) for token in range(first, end)
        ]
        attention_by_target.append(sum(attention_by_token))
    return np.stack(attention_by_target)


def _attention_of_token(
    scorer: Scorer, context: Context, states: DistantStates, token: int
) -> np.ndarray:
    """Return attention_HF from the input that predicts a token to the distant tokens.

    Args:
        states: The states of the prefix and all distant tokens.
        token: The index of the predicted token among the targets of the block.
    """
    block = context.block
    # The row ends with the input before the token, as only attention from that input is returned.
    local_row = Row(context, block.positions_of_local(token + 1), num_targets=1)
    tokens_BL, positions_BL = as_tensors([local_row], scorer.device)
    scorer.token_forwards += tokens_BL.numel()
    with in_use(scorer.model), fast_kernels(scorer.device):
        weights_BHS = scorer.model.last_attention(tokens_BL, positions_BL, states)

    # Keys are the prefix, the distant tokens, and then the local window.
    distant = slice(block.num_prefix, block.num_prefix + block.num_distant)
    return weights_BHS[0, :, distant].float().cpu().numpy()


def embedding_saliency(scorer: Scorer, context: Context, spans: Spans) -> np.ndarray:
    """Return saliency_TF, in nats: −gradient · embedding of each distant token, with the long
    window. To first order, the loss of a target rises by so much if the embedding is set to 0."""
    saliency_of_batch = partial(_saliency_of_batch, scorer, context)
    return np.concatenate(scorer.in_batches(spans, len(context.block.tokens), saliency_of_batch))


def _saliency_of_batch(
    scorer: Scorer, context: Context, spans: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Return saliency_TF of a batch of targets, each in a row of its own."""
    model: Any = scorer.model
    row = context.dense_row(max(end for _, end in spans))
    tokens_BL, positions_BL = as_tensors([row] * len(spans), scorer.device)
    num_passes = FORWARD_AND_BACKWARD + model.recomputes(tokens_BL.numel(), num_keys=0)
    scorer.token_forwards += num_passes * tokens_BL.numel()

    # A hook replaces the output of the embedding by a copy that has a gradient. So no model needs
    # an interface that takes embeddings in place of tokens.
    embeddings: list[Tensor] = []

    def replace_output(module: Any, inputs: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0]

    # Other threads may use the same model at the same time, and must not find the hook.
    hook = model.embedding.register_forward_hook(in_this_thread(replace_output))
    try:
        with frozen(model), torch.enable_grad(), fast_kernels(scorer.device):
            hidden_BLD = model.hidden(tokens_BL, positions_BL)
            total = sum_losses(scorer, hidden_BLD, context, list(spans))
            (gradient_BLD,) = torch.autograd.grad(total, embeddings)
    finally:
        hook.remove()

    saliency_BL = -(gradient_BLD * embeddings[0]).sum(-1)
    block = context.block
    saliency_TF = saliency_BL[:, block.num_prefix : block.num_prefix + block.num_distant]
    return saliency_TF.detach().float().cpu().numpy()
