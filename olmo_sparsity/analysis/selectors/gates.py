"""Rank distant tokens by the gradient of gates: which would lower the loss if it were attended to?

    local window + nearly masked distant tokens → forward, backward → gradient_TF

`gate_gradients` is the entry point. `add_one_screened`, `add_one_nested` and `pairs` find their
candidates by it, as one backward pass serves all distant tokens of all targets in a batch.

Attention weights are exp(score) / Σ exp(score). A gate g of a distant token multiplies its
exp(score), in all layers and heads. So it adds ln g to the score, and is a bias of attention:

    distant tokens      d0      d1      d2    local window
    gates                g       g       1      1   1   1        here d2 is opened
    added to scores   ln g    ln g       0      0   0   0        g = 0.1 nearly masks d0 and d1

With all gates at g the loss is about L_short. The gradient of the loss with respect to ln g of d0
predicts how the loss changes if d0 is opened: −∂loss/∂(ln g) > 0 means that d0 would lower it.

Dimension key: B rows of a batch, L tokens of a row, S keys that a row attends to, F distant tokens,
T targets, D width, N items of a list (opened gates).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from olmo_sparsity.analysis.scoring.rows import Context, Row
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.scoring.tensors import as_tensors
from olmo_sparsity.analysis.selectors.backward import FORWARD_AND_BACKWARD, frozen, sum_losses
from olmo_sparsity.base.devices import release_freed_memory
from olmo_sparsity.models.attention import fast_kernels
from olmo_sparsity.models.distant_states import DistantStates, to_device
from olmo_sparsity.text.units import NO_INDICES, Spans

GATE = 0.1
"""How far the gate of a distant token is open, from 0 (masked) to 1. It is not 0, as ln 0 has no
gradient."""

SCORES_PER_TOKEN = 2**13
"""How many attention scores of key-value heads, kept for the backward pass of the gates, count as
one token of a batch. With the copies of keys and values that are kept, too, a batch on a CPU takes
2 GiB at most, if its context has up to 8,192 tokens and the model is as large as SmolLM2-135M."""

MANY_SCORES = 2**24
"""With this many scores, returning their memory to the system takes far less time than computing
them."""


class _GatedTarget(NamedTuple):
    """A target, and the distant tokens whose gates are open for it."""

    span: tuple[int, int]
    opened: np.ndarray
    """Their distant indices."""


def gate_gradients(
    scorer: Scorer,
    context: Context,
    spans: Spans,
    gate: float = GATE,
    opened: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """Return gradient_TF, in nats: how much the loss of a target would fall, to first order, if the
    gate of a distant token were opened.

    Only the tokens of the local window are computed; they attend to the states of the distant
    tokens. So there are scores of window × context, not of all pairs of tokens.

    Args:
        spans: The targets. A target may be there several times, with other open gates.
        gate: How far all gates are open, except those that are opened.
        opened: The distant indices whose gates are open, for each target. Default: none.
    """
    states = context.states
    if states is None:
        states = _isolated_states(scorer, context)
    opened_of_spans = [NO_INDICES] * len(spans) if opened is None else opened
    gated_targets = [
        _GatedTarget(span, indices) for span, indices in zip(spans, opened_of_spans, strict=True)
    ]

    # `in_batches` limits a batch by its tokens. Here attention scores take nearly all memory, so
    # they are converted to as many tokens as would take the same memory.
    num_local = len(context.block.positions_of_local())
    num_keys = states.num_tokens + num_local
    num_scores = num_local * num_keys * states.num_heads * len(states.layers)
    num_tokens = max(1, num_scores // SCORES_PER_TOKEN)
    gradients_of_batch = partial(_gate_gradients_of_batch, scorer, context, states, gate)
    gradient_TF = np.concatenate(scorer.in_batches(gated_targets, num_tokens, gradients_of_batch))

    if num_scores > MANY_SCORES and scorer.device.type == "cpu":
        # Each document has another length, so that the freed memory would fit no later request.
        release_freed_memory()
    return gradient_TF


def _isolated_states(scorer: Scorer, context: Context) -> DistantStates:
    """Return the states of the prefix, and those of each distant token alone: after the prefix,
    without the distant tokens before it."""
    block = context.block
    rows = [
        Row(context, block.positions_of_distant(np.array([index])), num_targets=0)
        for index in range(block.num_distant)
    ]

    def states_of_batch(batch: Sequence[Row]) -> DistantStates:
        tokens_BL, positions_BL = as_tensors(batch, scorer.device)
        scorer.token_forwards += tokens_BL.numel()
        return scorer.model.distant_states(tokens_BL, positions_BL)

    batches = scorer.in_batches(rows, block.num_prefix + 1, states_of_batch)
    return DistantStates.after_prefix(batches, block.num_prefix)


def _gate_gradients_of_batch(
    scorer: Scorer,
    context: Context,
    states: DistantStates,
    gate: float,
    targets: Sequence[_GatedTarget],
) -> np.ndarray:
    """Return gradient_TF of a batch of targets, each in a row of its own."""
    block = context.block
    device = scorer.device
    spans = [target.span for target in targets]
    last_end = max(end for _, end in spans)
    local_window = Row(context, block.positions_of_local(last_end), num_targets=0)
    tokens_BL, positions_BL = as_tensors([local_window] * len(spans), device)
    num_keys = states.num_tokens + tokens_BL.shape[1]
    num_passes = FORWARD_AND_BACKWARD + scorer.model.recomputes(tokens_BL.numel(), num_keys)
    scorer.token_forwards += num_passes * tokens_BL.numel()

    kernels = fast_kernels(device, differentiate_bias=True)
    with frozen(scorer.model), torch.enable_grad(), kernels:
        log_gate_BF = _log_gates(targets, block.num_distant, gate, device)
        # The prefix has no gate: its scores stay as they are.
        bias_BS = torch.nn.functional.pad(log_gate_BF, (block.num_prefix, 0))
        distant = states.expand(len(spans), bias_BS)
        hidden_BLD = scorer.model.hidden(tokens_BL, positions_BL, distant=distant)
        total = sum_losses(scorer, hidden_BLD, context, spans)
        (gradient_BF,) = torch.autograd.grad(total, log_gate_BF)
    # A loss that falls has a negative gradient.
    return (-gradient_BF).float().cpu().numpy()


def _log_gates(
    targets: Sequence[_GatedTarget], num_distant: int, gate: float, device: torch.device
) -> torch.Tensor:
    """Return log_gate_BF, a tensor with a gradient: 0 for open gates, ln `gate` for all others."""
    shape = (len(targets), num_distant)
    log_gate_BF = torch.full(shape, float(np.log(gate)), dtype=torch.float, device=device)
    # One call opens the gates of all rows. It counts the gates of the batch, row after row.
    opened = [row * num_distant + target.opened for row, target in enumerate(targets)]
    (opened_N,) = to_device([np.concatenate(opened)], device)
    log_gate_BF.view(-1).index_fill_(0, opened_N, 0.0)
    return log_gate_BF.requires_grad_()
