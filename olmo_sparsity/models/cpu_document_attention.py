"""Compute attention within documents on CPU, by one operation that loops over documents.

    rows     0 0 0 1 1     starts     0 3 5 10
             0 0 0 0 0     calls of PyTorch's kernel: row 0 [0:3], row 0 [3:5], row 1 [0:5]

document_attention.py calls `attend_by_document`. A plain Python loop gives the same numbers, but a
compiled model would compile a graph for each set of lengths. So the loop is a custom operation,
which the compiler calls as it is. PyTorch needs four functions of such an operation:

    _attend_with_logsumexp ─ forward pass ──> mixed, and the logsumexp that the backward pass needs
    _backward              ─ backward pass ─> gradients of q, k and v
    _empty_outputs, _empty_gradients          the shapes of both, for the compiler

Dimension key: B batch, L length of a row, H heads, G heads of keys and values, K width of a head.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmo_sparsity.models.attention import CPU_KERNEL, CPU_KERNEL_BACKWARD


def attend_by_document(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Return causal attention of each document to itself, in the shape of q. `starts`: where
    documents start, counted from row to row, and at the end the number of all tokens; on the
    host."""
    mixed, _ = _attend_with_logsumexp(q, k, v, starts)
    return mixed


class DocumentIndex(NamedTuple):
    """The index of a document in a tensor (B, H, L, …): `x[index]` are its tokens."""

    row: slice
    heads: slice
    tokens: slice


def indices_of_documents(starts: Tensor, length: int) -> list[DocumentIndex]:
    """Return the index of each document. `length`: that of a row. No document crosses two rows."""
    indices = []
    for start, end in pairwise(starts.tolist()):
        row, first_token = divmod(start, length)
        tokens = slice(first_token, first_token + end - start)
        # A slice of one row, not a number, because the kernels take four dimensions.
        indices.append(DocumentIndex(slice(row, row + 1), slice(None), tokens))
    return indices


# --- forward pass ---------------------------------------------------------------------------------


@torch.library.custom_op(
    "olmo_sparsity::attend_by_document",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor starts) -> (Tensor, Tensor)",
)
def _attend_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return attention of each document to itself, and logsumexp_BHL: the log-sum-exp of each
    query's scores."""
    mixed, logsumexp_BHL = _empty_outputs(q, k, v, starts)
    num_heads = q.shape[1]
    for index in indices_of_documents(starts, q.shape[2]):
        document_k = _repeat_heads(k[index], num_heads)
        document_v = _repeat_heads(v[index], num_heads)
        mixed[index], logsumexp_BHL[index] = CPU_KERNEL(
            q[index], document_k, document_v, dropout_p=0.0, is_causal=True
        )
    return mixed, logsumexp_BHL


@_attend_with_logsumexp.register_fake
def _empty_outputs(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes and dtypes of the outputs, without their numbers."""
    # The kernel returns it in fp32 for queries of 16 bits, too.
    logsumexp_BHL = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float))
    return torch.empty_like(q), logsumexp_BHL


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return keys or values repeated for each head of the queries, as the kernel of older versions
    of PyTorch takes no grouped heads."""
    if x.shape[1] == num_heads:
        return x
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


# --- backward pass --------------------------------------------------------------------------------


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep the inputs and outputs of the forward pass."""
    q, k, v, starts = inputs
    mixed, logsumexp_BHL = output
    ctx.save_for_backward(q, k, v, mixed, logsumexp_BHL, starts)
    ctx.mark_non_differentiable(logsumexp_BHL)


def _gradients_of_inputs(ctx: Any, grad_mixed: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """Return the gradient of each input of the forward pass."""
    grad_q, grad_k, grad_v = _backward(grad_mixed, *ctx.saved_tensors)
    grad_starts = None  # integers
    return grad_q, grad_k, grad_v, grad_starts


@torch.library.custom_op(
    "olmo_sparsity::attend_by_document_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor mixed, Tensor logsumexp,"
    " Tensor starts) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    logsumexp_BHL: Tensor,
    starts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        grad: The gradient of `mixed`.
        mixed, logsumexp_BHL: The outputs of the forward pass.
    """
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    num_heads = q.shape[1]
    # The kernel takes coordinates for neighbours in memory, and does not check it.
    if grad.stride(-1) != 1:
        grad = grad.contiguous()

    for index in indices_of_documents(starts, q.shape[2]):
        document_grads = CPU_KERNEL_BACKWARD(
            grad[index],
            q[index],
            _repeat_heads(k[index], num_heads),
            _repeat_heads(v[index], num_heads),
            mixed[index],
            logsumexp_BHL[index],
            dropout_p=0.0,
            is_causal=True,
        )
        for grad_of_all, grad_of_document in zip(grads, document_grads, strict=True):
            # Query heads that read the same keys and values each give them a gradient.
            group_size = grad_of_document.shape[1] // grad_of_all.shape[1]
            if group_size > 1:
                grad_of_document = grad_of_document.unflatten(1, (-1, group_size)).sum(2)
            grad_of_all[index] = grad_of_document
    return grads


@_backward.register_fake
def _empty_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_attend_with_logsumexp.register_autograd(_gradients_of_inputs, setup_context=_keep_for_backward)
