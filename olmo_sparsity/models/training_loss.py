"""Compute the loss of a training step and its gradients, without the logits of a whole batch, which
are by far the largest tensor of a small model.

    hidden_ND ─ C tokens at a time ─> logits_CV ─> nll_C, added to the loss
                                              └──> grad_CV ─> grad_hidden_ND[chunk]
                                                         └──> added to grad_weight_VD, grad_bias_V

Why this saves memory: autograd would keep the logits of all chunks until the backward pass. But a
loss is where the backward pass begins, so nothing is missing for the gradients of a chunk once its
logits are there. `_ChunkedLoss` computes them in the forward pass, and drops the logits. Its
backward pass only scales them.

For a label y, with logits z = scale · (W h + b):

    nll = log Σ_v exp(z_v) − z_y           ∂nll / ∂z = softmax(z) − onehot(y)

`mean_loss` is the entry. Losses for evaluation are in losses.py.

Dimension key: B batch, L length, N = B·L tokens, C tokens of a chunk, D width, V vocabulary. A
suffix 1 is a dimension of size 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_sparsity.models.document_attention import DocumentStarts
from olmo_sparsity.models.language_model import LanguageModel
from olmo_sparsity.models.losses import rows_per_chunk
from olmo_sparsity.text.vocabulary import IGNORED


class ChunkFunction(Protocol):
    """Computes the losses of a chunk of tokens, and their gradient by the logits."""

    def __call__(
        self,
        hidden_CD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_C: Tensor,
        logit_scale: float,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        """Return nll_C in nats, and grad_CV: the gradient, by the scaled logits, of the sum of
        nll_C and of the z-loss. Both are 0 where the label is IGNORED.

        Args:
            weight_VD, bias_V: The last linear map, in the dtype of hidden_CD.
            logit_scale: Factor of the logits.
            z_loss: Factor of the squared logarithm of the sum of exponentials.
        """


@dataclass(frozen=True)
class LossSum:
    """How losses are computed from logits and added up."""

    factor: float
    """Factor of the sum over all tokens: 1 / the number of labels of the optimizer step."""

    logit_scale: float = 1.0
    z_loss: float = 0.0

    compiled: ChunkFunction | None = None
    """Computes a chunk; None means `eager_chunk_losses`."""


def mean_loss(
    model: LanguageModel,
    tokens_BL: Tensor,
    positions_BL: Tensor,
    labels_BL: Tensor,
    num_labels: int,
    documents: DocumentStarts | None = None,
    compiled: ChunkFunction | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Return Σ nll / num_labels of a batch, which is differentiable.

    Args:
        num_labels: The number of labels of the optimizer step, so that the sum over its
            micro-batches and processes is the mean.
        compiled: What `compile_losses` returns, if the model is compiled.
        z_loss: The gradient is that of Σ (nll + z_loss · logsumexp(logits)²) / num_labels. The
            result stays the mean nll, so that runs with and without z-loss can be compared.
    """
    hidden_ND = model.hidden(tokens_BL, positions_BL, documents=documents).flatten(0, 1)
    weight_VD, bias_V = model.unembedding
    loss_sum = LossSum(1.0 / num_labels, model.logit_scale, z_loss, compiled)
    return _ChunkedLoss.apply(hidden_ND, weight_VD, bias_V, labels_BL.flatten(), loss_sum)


class _ChunkedLoss(torch.autograd.Function):
    """factor · Σ nll over all tokens, with the gradients computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        loss_sum: LossSum,
    ) -> Tensor:
        compute_chunk = loss_sum.compiled or eager_chunk_losses
        is_compiled = loss_sum.compiled is not None
        chunk_size = rows_per_chunk(len(weight_VD), hidden_ND.device, is_compiled)
        loss = torch.zeros((), device=hidden_ND.device)
        gradients = _GradientSum(hidden_ND, weight_VD, bias_V)

        # Cast by hand, weights once and not for each chunk. So autocast is off inside.
        dtype = _dtype_of_products(hidden_ND)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            inputs_ND = hidden_ND.to(dtype)
            cast_weight_VD = weight_VD.to(dtype)
            cast_bias_V = None if bias_V is None else bias_V.to(dtype)
            for start in range(0, len(labels_N), chunk_size):
                chunk = slice(start, start + chunk_size)
                nll_C, grad_CV = compute_chunk(
                    inputs_ND[chunk],
                    cast_weight_VD,
                    cast_bias_V,
                    labels_N[chunk],
                    loss_sum.logit_scale,
                    loss_sum.z_loss,
                )
                loss += nll_C.sum() * loss_sum.factor
                # ∂(factor · nll) / ∂(W h + b) = factor · logit_scale · ∂nll / ∂z
                scale = loss_sum.factor * loss_sum.logit_scale
                gradients.add_chunk(chunk, inputs_ND[chunk], cast_weight_VD, grad_CV, scale)

        ctx.save_for_backward(*gradients.in_dtypes_of(weight_VD, bias_V))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient of what is computed from the loss: 1, unless the caller scales the loss.
        (grad_loss,) = grads
        grad_hidden_ND, grad_weight_VD, grad_bias_V = ctx.saved_tensors
        return (
            grad_hidden_ND * grad_loss,
            grad_weight_VD * grad_loss,
            None if grad_bias_V is None else grad_bias_V * grad_loss,
            None,  # of labels_N
            None,  # of loss_sum
        )


def _dtype_of_products(hidden_ND: Tensor) -> torch.dtype:
    """Return the dtype in which autocast would compute a linear map of these hidden states."""
    device_type = hidden_ND.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden_ND.dtype


class _GradientSum:
    """The gradients of a loss by hidden states, weight and bias, to which each chunk of tokens adds
    its own."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> None:
        # Each row belongs to one chunk, which fills it.
        self.hidden_ND = torch.empty_like(hidden_ND)
        # Sums over chunks are in fp32, also of bf16 weights: each of many chunks would be rounded
        # as the sum is.
        self.weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        self.bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)

    def add_chunk(
        self, chunk: slice, hidden_CD: Tensor, weight_VD: Tensor, grad_CV: Tensor, scale: float
    ) -> None:
        """Add the gradients of one chunk.

        Args:
            chunk: Which rows of hidden_ND it is.
            hidden_CD, weight_VD: The factors of its logits, in the dtype of products.
            grad_CV: What the chunk function has returned.
            scale: Factor of grad_CV. It multiplies the products of grad_CV, which are smaller.
        """
        cast_grad_CV = grad_CV.to(hidden_CD.dtype)
        self.hidden_ND[chunk] = (cast_grad_CV @ weight_VD) * scale
        if hidden_CD.dtype == self.weight_VD.dtype:
            # Product and sum in one kernel, without a temporary tensor of V × D.
            self.weight_VD.addmm_(cast_grad_CV.T, hidden_CD, alpha=scale)
        else:  # `addmm_` takes one dtype only
            self.weight_VD.add_(cast_grad_CV.T @ hidden_CD, alpha=scale)
        if self.bias_V is not None:
            self.bias_V.add_(grad_CV.sum(0, dtype=torch.float32), alpha=scale)

    def in_dtypes_of(
        self, weight_VD: Tensor, bias_V: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of hidden states, weight and bias, in the dtypes that these have."""
        grad_weight_VD = self.weight_VD.to(weight_VD.dtype)
        if bias_V is None or self.bias_V is None:
            return self.hidden_ND, grad_weight_VD, None
        return self.hidden_ND, grad_weight_VD, self.bias_V.to(bias_V.dtype)


# --- the losses of a chunk ------------------------------------------------------------------------


def eager_chunk_losses(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_C: Tensor,
    logit_scale: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Return what `ChunkFunction` describes, with the gradient in fp32.

    Written for PyTorch without a compiler, where each operation reads and writes all logits: few
    operations, in place where it can be."""
    is_ignored_C = labels_C == IGNORED
    # IGNORED is negative, and an index must not be. Any label will do, as its loss becomes 0.
    labels_C1 = labels_C.clamp(min=0)[:, None]
    logits_CV = F.linear(hidden_CD, weight_VD, bias_V).float()
    if logit_scale != 1.0:
        logits_CV *= logit_scale

    # The fused softmax is one pass over the logits, and gives log Σ exp(z) as well: of the largest
    # logit m, softmax(m) = exp(m) / Σ exp(z). As it is at least 1 / V, its logarithm is safe.
    softmax_CV = logits_CV.softmax(-1)
    log_sum_C = logits_CV.amax(-1) - softmax_CV.amax(-1).log()
    nll_C = log_sum_C - logits_CV.gather(1, labels_C1)[:, 0]
    nll_C = nll_C.masked_fill(is_ignored_C, 0.0)

    # softmax(z) − onehot(y), in the memory of the softmax.
    grad_CV = softmax_CV
    if z_loss:
        grad_CV *= _softmax_factor(log_sum_C, z_loss)[:, None]
    grad_CV.scatter_add_(1, labels_C1, torch.full_like(labels_C1, -1.0).float())
    grad_CV.masked_fill_(is_ignored_C[:, None], 0.0)
    return nll_C, grad_CV


def compile_losses() -> ChunkFunction:
    """Return `compilable_chunk_losses` as one compiled graph for any number of tokens, as the last
    chunk has fewer."""
    compiled = torch.compile(compilable_chunk_losses, dynamic=False)

    def compiled_chunk_losses(
        hidden_CD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_C: Tensor,
        logit_scale: float,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        # Only the number of tokens varies; all other sizes are constants of the graph.
        for tensor in (hidden_CD, labels_C):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(hidden_CD, weight_VD, bias_V, labels_C, logit_scale, z_loss)

    return compiled_chunk_losses


def compilable_chunk_losses(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_C: Tensor,
    logit_scale: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Return what `ChunkFunction` describes, with the gradient in the dtype of hidden_CD.

    Written for the compiler, which makes one kernel of it: nothing is in place, and its time is the
    number of instructions for a logit. Powers of 2 are one instruction of a GPU, so exponentials
    are written as exp(x) = 2^(x / ln 2); and a label that is scattered afterwards is not compared
    with each column. That makes 22 instructions a logit, with log_softmax 54."""
    is_used_C1 = (labels_C != IGNORED)[:, None]
    # IGNORED is negative, and an index must not be. Any label will do, as its loss becomes 0.
    labels_C1 = labels_C.clamp(min=0)[:, None]
    logits_CV = F.linear(hidden_CD, weight_VD, bias_V)

    # In powers of 2: u = (logit − largest logit) · scale / ln 2, so that 2^u = exp(z − max z).
    largest_C1 = logits_CV.amax(-1, keepdim=True).float()
    to_log2 = logit_scale / math.log(2)
    log2_sum_C1 = ((logits_CV.float() - largest_C1) * to_log2).exp2().sum(-1, keepdim=True).log2()
    label_C1 = (logits_CV.gather(1, labels_C1).float() - largest_C1) * to_log2
    nll_C1 = (log2_sum_C1 - label_C1) * math.log(2) * is_used_C1

    # Less infinity, so that the power is 0 where the label is ignored.
    shift_C1 = torch.where(is_used_C1, log2_sum_C1, float("inf"))
    softmax_CV = ((logits_CV.float() - largest_C1) * to_log2 - shift_C1).exp2()
    softmax_of_label_C1 = (label_C1 - shift_C1).exp2()
    if z_loss:
        log_sum_C1 = log2_sum_C1 * math.log(2) + largest_C1 * logit_scale
        factor_C1 = _softmax_factor(log_sum_C1, z_loss)
        softmax_CV = softmax_CV * factor_C1
        softmax_of_label_C1 = softmax_of_label_C1 * factor_C1

    # softmax(z) − onehot(y): the label's entry is computed apart, and put over that of the softmax.
    grad_CV = softmax_CV.to(hidden_CD.dtype)
    grad_of_label_C1 = softmax_of_label_C1 - is_used_C1.float()
    return nll_C1[:, 0], grad_CV.scatter(1, labels_C1, grad_of_label_C1.to(hidden_CD.dtype))


def _softmax_factor(log_sum: Tensor, z_loss: float) -> Tensor:
    """Return the factor of softmax in the gradient. The z-loss, z_loss · log_sum², has the gradient
    2 · z_loss · log_sum · softmax, which is added to the softmax of the cross-entropy."""
    return 1 + 2 * z_loss * log_sum
