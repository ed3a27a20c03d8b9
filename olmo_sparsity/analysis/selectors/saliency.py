"""Read from inside the model how much a prediction uses distant tokens: by gradients and attention.

    head_attention       attention weights of each head
    embedding_saliency   gradient × embedding of the distant tokens, on the long window
    gate_gradients       gradient of gates that nearly mask each distant token; `add_one_screened`
                         ranks candidates by it

Each takes a context and targets, and returns an array of targets × distant tokens. They take far
fewer forwards than `add_one`, which needs one for each distant unit.

What a gate is: attention weights are exp(score) / Σ exp(score). A gate g of a distant token
multiplies its exp(score), in all layers and heads, which adds ln g to the score:

    distant tokens      d0      d1      d2    local window
    gates                g       g       1      1   1   1        here d2 is opened
    added to scores   ln g    ln g       0      0   0   0        g = 0.1 nearly masks d0 and d1

The gradient of the loss with respect to ln g of d0 predicts the effect of opening d0. One backward
pass computes it for all distant tokens of all targets in the batch.

Dimension key: B rows, L tokens of a row, D width, T targets, F distant tokens, N targets' tokens or
opened gates of a batch, H heads of all layers, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.analysis.scoring.rows import Context, Row
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.scoring.tensors import as_tensors
from olmo_sparsity.base.devices import release_freed_memory
from olmo_sparsity.models.attention import fast_kernels
from olmo_sparsity.models.distant_states import DistantStates, to_device
from olmo_sparsity.models.identity.use import in_this_thread, in_use
from olmo_sparsity.text.units import NO_INDICES, Spans


def head_attention(scorer: Scorer, context: Context, spans: Spans) -> np.ndarray:
    """Return attention_THF: the attention of each head from the tokens that predict the target to
    the distant tokens, summed over the tokens of the target."""
    block = context.block
    states = context.states
    if states is None:
        # Attention is that of the long window, also where distant tokens are shown alone.
        states = scorer.states(block.tokens[: block.num_prefix + block.num_distant])
    attention = []
    for first, end in spans:
        by_token = [
            _attention_of_token(scorer, context, states, target) for target in range(first, end)
        ]
        attention.append(sum(by_token))
    return np.stack(attention)


def _attention_of_token(
    scorer: Scorer, context: Context, states: DistantStates, target: int
) -> np.ndarray:
    """Return attention_HF from the token that predicts `target` to the distant tokens. `target`:
    index of the token among the targets of the block."""
    block = context.block
    local_window = Row(context, block.positions_of_local(target + 1), num_targets=1)
    tokens_BL, positions_BL = as_tensors([local_window], scorer.device)
    scorer.token_forwards += tokens_BL.numel()
    with in_use(scorer.model), fast_kernels(scorer.device):
        weights_BHK = scorer.model.last_attention(tokens_BL, positions_BL, states)
    distant = slice(block.num_prefix, block.num_prefix + block.num_distant)
    return weights_BHK[0, :, distant].float().cpu().numpy()


Objective = Callable[[Tensor, Tensor], Tensor]
"""A function of logits_NV and labels_N that returns a sum over N tokens of targets, such as their
loss."""


def loss(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Return the sum of the losses of all targets."""
    return torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="sum")


def _sum_objective(
    scorer: Scorer, hidden_BLD: Tensor, context: Context, spans: Spans, objective: Objective
) -> Tensor:
    """Return the objective, summed over rows. Row i of `hidden_BLD` is evaluated at the target
    `spans[i]`. All rows end with the input that predicts the last token of all targets.

    For the targets (0, 2) and (4, 5) there are two rows and three tokens: tokens 0 and 1 of row 0,
    and token 4 of row 1. The last input predicts token 4, so they are at the indices −5, −4 and −1.
    """
    last_end = max(end for _, end in spans)
    row_of_token = np.repeat(np.arange(len(spans)), [end - first for first, end in spans])
    tokens = np.concatenate([np.arange(first, end) for first, end in spans])
    index_N = tokens - last_end
    labels = context.block.targets_W[tokens]
    rows_N, indices_N, labels_N = to_device((row_of_token, index_N, labels), hidden_BLD.device)
    logits_NV = scorer.model.unembed(hidden_BLD[rows_N, indices_N]).float()
    return objective(logits_NV, labels_N)


def embedding_saliency(
    scorer: Scorer, context: Context, spans: Spans, objective: Objective
) -> np.ndarray:
    """Return saliency_TF: −gradient · embedding of each distant token, with the long window. The
    gradient is that of the objective at a target."""
    saliency_of_batch = partial(_saliency_of_batch, scorer, context, objective)
    return np.concatenate(scorer.in_batches(spans, len(context.block.tokens), saliency_of_batch))


FORWARD_AND_BACKWARD = 3
"""The cost of a forward and a backward pass, in forward passes: a backward pass costs two. A model
that recomputes its activations takes one more."""


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
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


def _saliency_of_batch(
    scorer: Scorer, context: Context, objective: Objective, spans: Spans
) -> np.ndarray:
    """Return saliency_TF of a batch of targets, each in a row of its own."""
    model: Any = scorer.model
    row = context.dense_row(max(end for _, end in spans))
    tokens_BL, positions_BL = as_tensors([row] * len(spans), scorer.device)
    num_passes = FORWARD_AND_BACKWARD + model.recomputes(tokens_BL.numel())
    scorer.token_forwards += num_passes * tokens_BL.numel()
    embeddings: list[Tensor] = []

    # The hook replaces the embeddings of the forward by a copy that has a gradient.
    def keep_embedding(module: Any, inputs: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0]

    hook = model.embedding.register_forward_hook(in_this_thread(keep_embedding))
    try:
        with _frozen(model), torch.enable_grad(), fast_kernels(scorer.device):
            hidden_BLD = model.hidden(tokens_BL, positions_BL)
            total = _sum_objective(scorer, hidden_BLD, context, spans, objective)
            (gradient_BLD,) = torch.autograd.grad(total, embeddings)
    finally:
        hook.remove()
    # First-order rise of the loss if an embedding were 0: −gradient · embedding.
    saliency_BL = -(gradient_BLD * embeddings[0]).sum(-1)
    first = context.block.num_prefix
    return saliency_BL[:, first : first + context.block.num_distant].detach().float().cpu().numpy()


GATE = 0.1
"""How far the gate of a distant token is open, from 0 (masked) to 1."""

SCORES_PER_TOKEN = 2**13
"""How many attention scores of key-value heads, kept for the backward pass of the gates, count as
one token of a batch. With the copies of keys and values that are kept, too, a batch on a CPU takes
2 GiB at most, if its context has up to 8,192 tokens and the model is as large as SmolLM2-135M."""

MANY_SCORES = 2**24
"""With this many scores, returning their memory to the system takes far less time than computing
them."""


def gate_gradients(
    scorer: Scorer,
    context: Context,
    spans: Spans,
    gate: float = GATE,
    opened: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """Return gradient_TF: how much the loss of a target would fall, to first order, if the gate of
    a distant token were opened.

    Only the tokens of the local window are computed; they attend to the states of the distant
    tokens. So there are scores of window × context, not of all pairs of tokens.

    Args:
        spans: The targets. A target may be there several times, with other open gates.
        gate: How far all gates are open, but those that are opened.
        opened: The distant indices whose gates are open, for each target. Default: none.
    """
    block = context.block
    states = context.states
    if states is None:
        states = _states_alone(scorer, context)
    # The memory of a batch is that of its attention scores, so these stand for its tokens.
    num_keys = states.num_tokens + len(block.positions_of_local())
    num_scores = len(block.positions_of_local()) * num_keys * states.num_heads * len(states.layers)
    num_tokens = max(1, num_scores // SCORES_PER_TOKEN)
    if opened is None:
        opened = [NO_INDICES] * len(spans)
    gated_targets = [
        _GatedTarget(span, indices) for span, indices in zip(spans, opened, strict=True)
    ]
    gradients_of_batch = partial(_gate_gradients_of_batch, scorer, context, states, gate)
    gradient_TF = np.concatenate(scorer.in_batches(gated_targets, num_tokens, gradients_of_batch))
    if num_scores > MANY_SCORES and scorer.device.type == "cpu":
        # Each document has another length, so that the freed memory would fit no later request.
        release_freed_memory()
    return gradient_TF


def _states_alone(scorer: Scorer, context: Context) -> DistantStates:
    """Return the states of the prefix, and those of each distant token alone: after the prefix,
    without the distant tokens before it."""
    block = context.block
    rows = [
        Row(context, block.positions_of_distant(np.array([index])), 0)
        for index in range(block.num_distant)
    ]

    def states_of_batch(batch: Sequence[Row]) -> DistantStates:
        tokens_BL, positions_BL = as_tensors(batch, scorer.device)
        scorer.token_forwards += tokens_BL.numel()
        return scorer.model.distant_states(tokens_BL, positions_BL)

    batches = scorer.in_batches(rows, block.num_prefix + 1, states_of_batch)
    return DistantStates.after_prefix(batches, block.num_prefix)


class _GatedTarget(NamedTuple):
    """A target, and the distant tokens whose gates are open for it."""

    span: tuple[int, int]
    opened: np.ndarray


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
    # Indices into all gates of the batch, row after row.
    opened = [row * block.num_distant + target.opened for row, target in enumerate(targets)]
    last_end = max(end for _, end in spans)
    local_window = Row(context, block.positions_of_local(last_end), num_targets=0)
    tokens_BL, positions_BL = as_tensors([local_window] * len(spans), device)
    num_keys = states.num_tokens + tokens_BL.shape[1]
    num_passes = FORWARD_AND_BACKWARD + scorer.model.recomputes(tokens_BL.numel(), num_keys)
    scorer.token_forwards += num_passes * tokens_BL.numel()
    kernels = fast_kernels(device, differentiate_bias=True)
    with _frozen(scorer.model), torch.enable_grad(), kernels:
        shape = (len(spans), block.num_distant)
        # In logarithms, as a bias that is added to attention scores: an open gate is 0.
        gate_BF = torch.full(shape, float(np.log(gate)), dtype=torch.float, device=device)
        (opened_N,) = to_device([np.concatenate(opened)], device)
        gate_BF.view(-1).index_fill_(0, opened_N, 0.0)
        gate_BF.requires_grad_()
        # The prefix has no gate.
        earlier_BK = torch.nn.functional.pad(gate_BF, (block.num_prefix, 0))
        distant = states.expand(len(spans), earlier_BK)
        hidden_BLD = scorer.model.hidden(tokens_BL, positions_BL, distant=distant)
        total = _sum_objective(scorer, hidden_BLD, context, spans, loss)
        (gradient_BF,) = torch.autograd.grad(total, gate_BF)
    # A loss that falls has a negative gradient.
    return (-gradient_BF).float().cpu().numpy()
