"""Compute per-token losses without the logits of a whole batch, which are by far the largest tensor
of a small model. Tokens are unembedded in chunks, and the gradient of a chunk is computed at once:

    hidden_ND ─ chunk of C rows ─> logits_CV ─> nll_C, added to the loss
                                            └─> grad_CV ─> grad_hidden_ND[chunk], grad_weight_VD

`token_losses` returns the loss of each token for evaluation, `mean_loss` the loss of a training
step. The interface of all models, `LanguageModel`, is here, too.

Dimension key: B batch, L length (K keys), N = B·L tokens, C tokens of a chunk, D width, H heads, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.document_attention import Documents
from olmo_sparsity.text.vocabulary import IGNORED


def rows_per_chunk(vocab_size: int, device: torch.device, compiled: bool = False) -> int:
    """Return how many tokens to unembed at once. On CPU the fp32 logits of a chunk should stay in
    cache (4 MiB was fastest of 2 … 64); a GPU needs larger chunks. With too few tokens, summing the
    gradient of the weights would take most of the time.

    compiled: Whether `compile_losses` computes a chunk, which keeps its logits and gradient only:
        in bf16, 8,192 tokens with a vocabulary of 50,304 take 1.5 GiB.
    """
    if device.type == "cuda" and compiled:
        return 2 ** int(math.log2(max(128, 2**29 // vocab_size)))  # whole tiles of a product
    chunk_bytes = (4 if device.type == "cpu" else 256) * 2**20
    return max(128, chunk_bytes // (4 * vocab_size))


class LanguageModel(Protocol):
    """The interface that PositionedOLMo and HuggingFaceLM have in common."""

    @property
    def vocab_size(self) -> int:
        """Return the width of the logits, including padding."""

    @property
    def device(self) -> torch.device:
        """Return the device of the inputs."""

    @property
    def reach(self) -> int | None:
        """Return the largest distance of position IDs over which some layer sees a token. None: a
        layer sees all earlier tokens."""

    @property
    def embedding(self) -> nn.Embedding: ...
    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        """Return weight_VD and bias_V of the last linear map."""

    @property
    def logit_scale(self) -> float:
        """Return the factor of logits after the last linear map."""

    def hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        attention_bias: Tensor | None = None,
        *,
        documents: Documents | None = None,
        added_BLD: Tensor | None = None,
        distant: DistantStates | None = None,
        num_last: int | None = None,
    ) -> Tensor:
        """Return hidden_BLD after the last norm.

        attention_bias: (B or 1, 1 or H, L, K), added to attention scores in place of the causal
            mask.
        documents: Where documents begin. Tokens attend to their own document only.
        added_BLD: Added to the embeddings of the tokens.
        distant: States of earlier tokens, to which all tokens attend, too.
        num_last: Return the hidden states of the last tokens only, so many of them.
        """

    def unembed(self, hidden: Tensor) -> Tensor:
        """Return logits (…, V) of hidden states (…, D)."""

    def distant_states(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        places_at_once: int | None = None,
        earlier: DistantStates | None = None,
    ) -> DistantStates:
        """Return keys, values and hidden states of all tokens, each of which sees those before it.

        places_at_once: How many tokens are computed together. None: all of them.
        earlier: States of the text before these tokens, which become part of the result.
        """

    def shares_distant(self, num_distant: int, length: int) -> bool:
        """Return whether rows of `length` tokens attend to `num_distant` distant tokens without
        copies of their states."""

    def last_attention(
        self, tokens_BL: Tensor, positions_BL: Tensor, distant: DistantStates
    ) -> Tensor:
        """Return weights_BHK: how much the last token attends to each token of `distant` and of the
        row, in all heads of all layers."""

    def recomputes(self, num_tokens: int, num_keys: int = 0) -> bool:
        """Return whether a backward pass through this many tokens computes activations again.
        `num_keys`: how many keys each token attends to, if attention scores are kept, else 0."""


@torch.no_grad()
def token_losses(
    model: LanguageModel,
    tokens_BL: Tensor,
    positions_BL: Tensor,
    labels_BL: Tensor,
    documents: Documents | None = None,
) -> Tensor:
    """Return nll_BL, the loss of each token's label in nats, fp32. It is 0 where the label is
    IGNORED."""
    hidden_ND = model.hidden(tokens_BL, positions_BL, documents=documents).flatten(0, 1)
    chunk = rows_per_chunk(model.vocab_size, hidden_ND.device)
    # Ignored tokens are computed, too: to leave them out, the host would wait for their number.
    label_chunks = labels_BL.flatten().split(chunk)
    nll = []
    for hidden_CD, labels_C in zip(hidden_ND.split(chunk), label_chunks, strict=True):
        logits_CV = model.unembed(hidden_CD).float()
        nll_C = F.cross_entropy(logits_CV, labels_C, ignore_index=IGNORED, reduction="none")
        nll.append(nll_C)
    return torch.cat(nll).view_as(labels_BL)


def repetition_losses(
    losses: Callable[[Tensor, Tensor, Tensor], Tensor], passages_BL: Tensor
) -> Tensor:
    """Return nll_B2: the mean loss of each passage, and of its repetition directly after it. The
    first token of a passage is left out, as it has no context the first time.

    losses: Function (tokens_BL, positions_BL, labels_BL) that returns nll_BL.
    """
    length = passages_BL.shape[1]
    tokens_BL = passages_BL.repeat(1, 2)
    labels_BL = tokens_BL.roll(-1, 1)
    labels_BL[:, length - 1 :: length] = IGNORED
    positions_BL = torch.arange(2 * length, device=passages_BL.device).expand_as(tokens_BL)
    nll_BL = losses(tokens_BL, positions_BL, labels_BL)
    return nll_BL.unflatten(1, (2, length)).sum(-1) / (length - 1)


def place_edges(length: int) -> list[int]:
    """Return the edges of four ranges of a sequence, by which losses are averaged: 0, 128, 256, 512
    and 1024 for a length of 1,024. A model that uses its context has the smallest loss in the last
    range."""
    return [0, length // 8, length // 4, length // 2, length]


OfChunk = Callable[[Tensor, Tensor, Tensor | None, Tensor, float, float], tuple[Tensor, Tensor]]
"""(hidden_CD, weight_VD, bias_V, labels_C, scale of the logits, z_loss) → (nll_C, grad_CV)."""


def compile_losses() -> OfChunk:
    """Return `_losses_of_chunk` as one compiled graph for any number of tokens, as the last chunk
    has fewer."""
    compiled = torch.compile(_losses_of_chunk, dynamic=False)

    def of_chunk(
        hidden_CD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_C: Tensor,
        scale: float,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        for tensor in (hidden_CD, labels_C):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(hidden_CD, weight_VD, bias_V, labels_C, scale, z_loss)

    return of_chunk


def _losses_of_chunk(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_C: Tensor,
    scale: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Return nll_C, and grad_CV: the gradient, by the scaled logits, of the sum of nll_C and of the
    z-loss. Both are 0 where the label is IGNORED.

    Written for the compiler: nothing is in place, so that it makes one kernel. Powers of 2 are one
    instruction of a GPU, and a label that is scattered afterwards is not compared with each column:
    22 instructions a logit, with log_softmax 54."""
    is_used_C1 = (labels_C != IGNORED)[:, None]
    labels_C1 = labels_C.clamp(min=0)[:, None]
    logits_CV = F.linear(hidden_CD, weight_VD, bias_V)
    largest_C1 = logits_CV.amax(-1, keepdim=True).float()
    to_log2 = scale / math.log(2)
    log2_sum_C1 = ((logits_CV.float() - largest_C1) * to_log2).exp2().sum(-1, keepdim=True).log2()
    label_C1 = (logits_CV.gather(1, labels_C1).float() - largest_C1) * to_log2
    nll_C1 = (log2_sum_C1 - label_C1) * math.log(2) * is_used_C1
    # Less infinity, so that the power is 0 where the label is ignored.
    shift_C1 = torch.where(is_used_C1, log2_sum_C1, float("inf"))
    softmax_CV = ((logits_CV.float() - largest_C1) * to_log2 - shift_C1).exp2()
    softmax_of_label_C1 = (label_C1 - shift_C1).exp2()
    if z_loss:
        log_sum_C1 = log2_sum_C1 * math.log(2) + largest_C1 * scale
        factor_C1 = _factor_of_z_loss(log_sum_C1, z_loss)
        softmax_CV = softmax_CV * factor_C1
        softmax_of_label_C1 = softmax_of_label_C1 * factor_C1
    grad_CV = softmax_CV.to(hidden_CD.dtype)
    grad_of_label_C1 = softmax_of_label_C1 - is_used_C1.float()
    return nll_C1[:, 0], grad_CV.scatter(1, labels_C1, grad_of_label_C1.to(hidden_CD.dtype))


def _factor_of_z_loss(log_sum: Tensor, z_loss: float) -> Tensor:
    """Return the factor of softmax in the gradient. The z-loss, z · log_sum², has the gradient
    2 · z · log_sum · softmax, which is added to the softmax of the cross-entropy."""
    return 1 + 2 * z_loss * log_sum


def mean_loss(
    model: LanguageModel,
    tokens_BL: Tensor,
    positions_BL: Tensor,
    labels_BL: Tensor,
    num_labels: int,
    documents: Documents | None = None,
    compiled: OfChunk | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Return Σ nll / num_labels of a batch, which is differentiable.

    num_labels: The number of labels of the optimizer step, so that the sum over its micro-batches
        and processes is the mean.
    compiled: What `compile_losses` returns, if the model is compiled.
    z_loss: The gradient is that of Σ (nll + z_loss · logsumexp(logits)²) / num_labels. The result
        stays the mean nll, so that runs with and without z-loss can be compared.
    """
    hidden_ND = model.hidden(tokens_BL, positions_BL, documents=documents).flatten(0, 1)
    weight_VD, bias_V = model.unembedding
    loss_sum = LossSum(1.0 / num_labels, model.logit_scale, z_loss, compiled)
    return _ChunkedLoss.apply(hidden_ND, weight_VD, bias_V, labels_BL.flatten(), loss_sum)


@dataclass(frozen=True)
class LossSum:
    """How losses are computed from logits and added up."""

    weight: float
    """Factor of the sum over all rows."""

    logit_scale: float = 1.0
    z_loss: float = 0.0

    compiled: OfChunk | None = None
    """Computes a chunk; None: `_losses_of_chunk_eagerly`."""


class _ChunkedLoss(torch.autograd.Function):
    """The sum of weight · nll over tokens. Its gradients are computed in the forward pass, chunk by
    chunk, so that no logits need be kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        loss_sum: LossSum,
    ) -> Tensor:
        device = hidden_ND.device.type
        dtype = hidden_ND.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        loss = torch.zeros((), device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        # In fp32, also of bf16 weights: each of many chunks would be rounded as the sum is.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        is_compiled = loss_sum.compiled is not None
        of_chunk = loss_sum.compiled or _losses_of_chunk_eagerly
        # The weight multiplies the small products instead of the large gradient.
        scale = loss_sum.weight * loss_sum.logit_scale
        chunk = rows_per_chunk(len(weight_VD), hidden_ND.device, is_compiled)
        with torch.autocast(device, enabled=False):
            hidden_ND = hidden_ND.to(dtype)
            cast_VD = weight_VD.to(dtype)
            cast_V = None if bias_V is None else bias_V.to(dtype)
            for start in range(0, len(labels_N), chunk):
                rows = slice(start, start + chunk)
                h_CD = hidden_ND[rows]
                nll_C, grad_CV = of_chunk(
                    h_CD, cast_VD, cast_V, labels_N[rows], loss_sum.logit_scale, loss_sum.z_loss
                )
                loss += nll_C.sum() * loss_sum.weight
                cast_CV = grad_CV.to(dtype)
                grad_hidden_ND[rows] = (cast_CV @ cast_VD) * scale
                if dtype == grad_weight_VD.dtype:
                    grad_weight_VD.addmm_(cast_CV.T, h_CD, alpha=scale)
                else:
                    grad_weight_VD.add_(cast_CV.T @ h_CD, alpha=scale)
                if grad_bias_V is not None:
                    grad_bias_V.add_(grad_CV.sum(0, dtype=torch.float32), alpha=scale)
        grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        if bias_V is not None and grad_bias_V is not None:
            grad_bias_V = grad_bias_V.to(bias_V.dtype)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD, grad_bias_V)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        hidden, weight, bias = ctx.saved_tensors
        bias = None if bias is None else bias * grad
        return hidden * grad, weight * grad, bias, None, None


def _losses_of_chunk_eagerly(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_C: Tensor,
    scale: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Return what `_losses_of_chunk` returns, with the gradient in fp32. Written for PyTorch
    without a compiler: in place where it can be."""
    unused_C = labels_C == IGNORED
    labels_C1 = labels_C.clamp(min=0)[:, None]
    logits_CV = F.linear(hidden_CD, weight_VD, bias_V).float()
    if scale != 1.0:
        logits_CV *= scale
    # d nll / d logits = softmax − one-hot. The fused softmax is one pass; its largest entry, at
    # least 1 / V, gives the log of the sum safely.
    grad_CV = logits_CV.softmax(-1)
    log_sum_C = logits_CV.amax(-1) - grad_CV.amax(-1).log()
    nll_C = log_sum_C - logits_CV.gather(1, labels_C1)[:, 0]
    nll_C = nll_C.masked_fill(unused_C, 0.0)
    if z_loss:
        grad_CV *= _factor_of_z_loss(log_sum_C, z_loss)[:, None]
    grad_CV.scatter_add_(1, labels_C1, torch.full_like(labels_C1, -1.0).float())
    grad_CV.masked_fill_(unused_C[:, None], 0.0)
    return nll_C, grad_CV
