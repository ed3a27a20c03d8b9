"""Compute attention within documents, where a row of a batch holds several (`data.mask_documents`).

    documents_BL         starts (rows one after another)
    0 0 0 1 1            0 3 5 10
    0 0 0 0 0            documents of 3, 2 and 5 tokens

`find_documents` finds the starts once for a batch, and `attend_within` computes the attention of a
layer. Both are functions of tensors, which know no model.

Dimension key: B batch, L length (in a document its own), H heads, G heads of keys and values, K
width of a head, D documents of a batch, N = B·L tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_sparsity.models.attention import CPU_KERNEL, CPU_KERNEL_BACKWARD, attend


class Documents(NamedTuple):
    """Where the documents of a batch begin, if the tokens of its rows are counted on from row to
    row, and at the end the number of all tokens (see the module)."""

    starts_on_host: Tensor
    """int32, (D + 1,). Loops over documents and splits need the numbers on the host."""

    starts: Tensor
    """The same numbers on the device of the model, for kernels that take packed documents."""


def find_documents(documents_BL: Tensor, device: torch.device) -> Documents:
    """Return where the documents of a batch begin.

    documents_BL: The number of each token's document, on the host. A document is a run of equal
        numbers within a row.
    device: That of the model.
    """
    begins_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    begins_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    starts_D = begins_BL.flatten().nonzero()[:, 0]
    starts_D1 = F.pad(starts_D, (0, 1), value=documents_BL.numel()).int()
    documents = Documents(starts_D1, starts_D1.to(device, non_blocking=True))
    for starts in documents:  # so that a compiled model has one graph for any number of documents
        torch._dynamo.maybe_mark_dynamic(starts, 0)
    return documents


def count_keys_of_documents(documents: Documents, num_rows: int, length: int) -> Tensor:
    """Return counts_BL: how many tokens of its own document each token sees, itself included. For a
    row of a document of three tokens and one of two, they are 1 2 3 1 2."""
    starts_D1 = documents.starts
    tokens_N = torch.arange(num_rows * length, device=starts_D1.device, dtype=starts_D1.dtype)
    document_N = torch.searchsorted(starts_D1, tokens_N, right=True) - 1
    counts_N = tokens_N - starts_D1[document_N] + 1
    return counts_N.view(num_rows, length)


def attend_within(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return causal attention of each document to itself, in the shape of q.

    bias: Added to scores, with ALiBi or windows. It must hide later tokens already. None: causal.

    No kernel sees two documents, so time and memory are those of the single documents, without a
    mask of L·L numbers. There are three ways: flash attention takes packed documents on a GPU; on
    CPU one operation loops over documents; and a loop over calls of `attend` computes what the two
    do not take."""
    starts_on_host = documents.starts_on_host
    q = q.to(v.dtype)
    k = k.to(v.dtype)
    if bias is None and dropout_p == 0:
        if packs(q.device, q.dtype, q.shape[-1]):
            return _attend_packed(q, k, v, documents.starts)
        if q.device.type == "cpu":
            mixed, _ = _attend_by_document(q, k, v, starts_on_host)
            return mixed
    return _attend_one_by_one(q, k, v, starts_on_host, bias, dropout_p)


# --- on a GPU: packed documents -------------------------------------------------------------------

# `varlen_attn` of PyTorch 2.10 has neither windows nor grouped heads.
_HAS_PACKING = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def packs(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Return whether flash attention takes packed documents, whose lengths differ, on this device
    and for this dtype and width of a head."""
    return (
        device.type == "cuda"
        and _HAS_PACKING
        and dtype in (torch.bfloat16, torch.float16)
        and head_width % 8 == 0
        and head_width <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Return attention of each document by flash attention, which takes all tokens of a batch in
    one row, and where documents start in it."""
    from torch.nn.attention.varlen import varlen_attn

    length = q.shape[2]
    mixed_NHK: Any = varlen_attn(
        _tokens_of_rows(q),
        _tokens_of_rows(k),
        _tokens_of_rows(v),
        starts,  # of the queries
        starts,  # of the keys
        length,  # no document is longer than a row
        length,
        window_size=(-1, 0),  # causal: all keys before a query, and none after it
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return mixed_NHK.unflatten(0, (-1, length)).transpose(1, 2)


def _tokens_of_rows(x_BHLK: Tensor) -> Tensor:
    """Return x_NHK: the tokens of all rows, one row after another."""
    return x_BHLK.transpose(1, 2).flatten(0, 1)


# --- a call of `attend` for each document ---------------------------------------------------------


def _attend_one_by_one(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, bias: Tensor | None, dropout_p: float
) -> Tensor:
    """Return attention of each document by a call of `attend`. The other two ways do not take fp32
    on a GPU, ALiBi, windows and dropout."""
    num_rows, _, length, _ = q.shape
    sizes = starts.diff().tolist()
    # Split once, as the gradient of a slice is as large as the whole.
    documents_q = _tokens_of_rows(q).split(sizes)
    documents_k = _tokens_of_rows(k).split(sizes)
    documents_v = _tokens_of_rows(v).split(sizes)
    indices = _indices_of_documents(starts, length)

    mixed = []
    for index, q_LHK, k_LGK, v_LGK in zip(
        indices, documents_q, documents_k, documents_v, strict=True
    ):
        bias_of_document = None
        if bias is not None:
            # A bias of one row holds for all rows.
            rows = index.row if len(bias) > 1 else slice(1)
            bias_of_document = bias[rows][..., index.tokens, index.tokens]
        mixed_1HLK = attend(
            _as_batch_of_one(q_LHK),
            _as_batch_of_one(k_LGK),
            _as_batch_of_one(v_LGK),
            bias_of_document,
            is_causal=bias_of_document is None,
            dropout_p=dropout_p,
            grouped=q.shape[1] != k.shape[1],
        )
        mixed.append(mixed_1HLK[0].transpose(0, 1))
    return torch.cat(mixed).unflatten(0, (num_rows, length)).transpose(1, 2)


def _as_batch_of_one(x_LHK: Tensor) -> Tensor:
    """Return the tokens of a document as x_1HLK, a batch of one row."""
    return x_LHK.transpose(0, 1)[None]


def keep_out_of_graphs() -> None:
    """Keep `_attend_one_by_one` out of compiled graphs, as each set of lengths would get its own
    graph. Call it before compiling. (As a decorator, `disable` would import the compiler, which is
    half of the time that the tool takes to start.)"""
    global _attend_one_by_one
    _attend_one_by_one = torch.compiler.disable(_attend_one_by_one)


class _DocumentIndex(NamedTuple):
    """The index of a document in a tensor (B, H, L, …): `x[index]` are its tokens."""

    row: slice
    heads: slice
    tokens: slice


def _indices_of_documents(starts: Tensor, length: int) -> list[_DocumentIndex]:
    """Return the index of each document. No document crosses two rows."""
    indices = []
    for start, end in pairwise(starts.tolist()):
        row, first = divmod(start, length)
        tokens = slice(first, first + end - start)
        indices.append(_DocumentIndex(slice(row, row + 1), slice(None), tokens))
    return indices


# --- on CPU: one operation that loops over documents ----------------------------------------------


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return keys or values repeated for each head of the queries, as the kernel of older versions
    of PyTorch takes no grouped heads."""
    if x.shape[1] == num_heads:
        return x
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


# A custom operation: the compiler calls it as it is, and compiles no graph for each set of lengths.
@torch.library.custom_op(
    "olmo_sparsity::attend_by_document",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor starts) -> (Tensor, Tensor)",
)
def _attend_by_document(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention of each document to itself on CPU, and the log-sum-exp of each query's
    scores, which the backward pass needs."""
    mixed, sums_BHL = _empty_of_documents(q, k, v, starts)
    num_heads = q.shape[1]
    for index in _indices_of_documents(starts, q.shape[2]):
        document_k = _repeat_heads(k[index], num_heads)
        document_v = _repeat_heads(v[index], num_heads)
        mixed[index], sums_BHL[index] = CPU_KERNEL(
            q[index], document_k, document_v, dropout_p=0.0, is_causal=True
        )
    return mixed, sums_BHL


@_attend_by_document.register_fake
def _empty_of_documents(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    sums_BHL = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float))
    return torch.empty_like(q), sums_BHL


@torch.library.custom_op(
    "olmo_sparsity::attend_by_document_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor mixed, Tensor sums, Tensor starts)"
    " -> (Tensor, Tensor, Tensor)",
)
def _backward_by_document(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, sums_BHL: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    sums_BHL: The log-sum-exp of each query's scores in the forward pass.
    """
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    num_heads = q.shape[1]
    # The kernel takes coordinates for neighbours in memory, and does not check it.
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    for index in _indices_of_documents(starts, q.shape[2]):
        document_grads = CPU_KERNEL_BACKWARD(
            grad[index],
            q[index],
            _repeat_heads(k[index], num_heads),
            _repeat_heads(v[index], num_heads),
            mixed[index],
            sums_BHL[index],
            dropout_p=0.0,
            is_causal=True,
        )
        for grad_of_all, grad_of_document in zip(grads, document_grads, strict=True):
            num_sharing = grad_of_document.shape[1] // grad_of_all.shape[1]
            # Query heads that read the same keys and values each give them a gradient.
            if num_sharing > 1:
                grad_of_document = grad_of_document.unflatten(1, (-1, num_sharing)).sum(2)
            grad_of_all[index] = grad_of_document
    return grads


@_backward_by_document.register_fake
def _empty_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts = inputs
    mixed, sums_BHL = output
    ctx.save_for_backward(q, k, v, mixed, sums_BHL, starts)
    ctx.mark_non_differentiable(sums_BHL)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_backward_by_document(grad, *ctx.saved_tensors), None


_attend_by_document.register_autograd(_gradients, setup_context=_keep_for_backward)
