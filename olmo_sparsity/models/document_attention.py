"""Compute attention within documents, where a row of a batch holds several (`data.mask_documents`).

    documents_BL         starts (rows one after another)
    0 0 0 1 1            0 3 5 10
    0 0 0 0 0            documents of 3, 2 and 5 tokens

The first token of every document sees itself alone. Training finds the starts once for a batch
(`find_documents`), and each layer calls `attend_within`, which takes the first of these ways that
applies. No query meets a key of another document, so time and memory are those of the single
documents, without a mask of L·L numbers:

    a bias or dropout: ALiBi, windows     a call of `attend` for each document
    a GPU that takes packed documents     flash attention (`takes_packed_documents`)
    a CPU                                 a loop inside one operation (cpu_document_attention.py)
    all else, such as fp32 on a GPU       a call of `attend` for each document

Dimension key: B batch, L length (in a document its own), H heads, G heads of keys and values, K
width of a head, M documents of a batch, E = M + 1 boundaries of them, N = B·L tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_sparsity.models.attention import attend
from olmo_sparsity.models.cpu_document_attention import attend_by_document, indices_of_documents


class DocumentStarts(NamedTuple):
    """Where the documents of a batch begin, counted from row to row, and at the end the number of
    all tokens: 0 3 5 10 in the module's example. The same numbers are held twice."""

    starts_on_host: Tensor
    """int32, (E,), for loops over documents: reading a number from a GPU would wait for it."""

    starts: Tensor
    """The same on the device of the model, for kernels that take packed documents."""


def find_documents(documents_BL: Tensor, device: torch.device) -> DocumentStarts:
    """Return where the documents of a batch begin.

    Args:
        documents_BL: The number of each token's document, on the host. A document is a run of equal
            numbers within a row.
        device: That of the model.
    """
    begins_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    begins_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    starts_M = begins_BL.flatten().nonzero()[:, 0]
    starts_E = F.pad(starts_M, (0, 1), value=documents_BL.numel()).int()
    documents = DocumentStarts(starts_E, starts_E.to(device, non_blocking=True))

    # A compiled model then has one graph for any number of documents.
    for starts in documents:
        torch._dynamo.maybe_mark_dynamic(starts, 0)
    return documents


def count_keys_of_documents(documents: DocumentStarts, num_rows: int, length: int) -> Tensor:
    """Return counts_BL: how many tokens of its own document each token sees, itself included. For a
    row of a document of three tokens and one of two, they are 1 2 3 1 2."""
    starts_E = documents.starts
    tokens_N = torch.arange(num_rows * length, device=starts_E.device, dtype=starts_E.dtype)
    document_N = torch.searchsorted(starts_E, tokens_N, right=True) - 1
    counts_N = tokens_N - starts_E[document_N] + 1
    return counts_N.view(num_rows, length)


def attend_within(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: DocumentStarts,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return causal attention of each document to itself, in the shape of q.

    Args:
        q: (B, H, L, K). k, v: (B, G, L, K).
        bias: (B or 1, H or 1, L, L), added to scores, for ALiBi or windows. It must hide later
            tokens already. None means causal attention.
    """
    # Under autocast, layers of transformers multiply queries and keys of 16 bits by cosines in
    # fp32, so they come in fp32. Kernels take one dtype.
    q = q.to(v.dtype)
    k = k.to(v.dtype)
    if bias is None and dropout_p == 0:
        if takes_packed_documents(q.device, q.dtype, q.shape[-1]):
            return _attend_packed(q, k, v, documents.starts)
        if q.device.type == "cpu":
            return attend_by_document(q, k, v, documents.starts_on_host)
    return _attend_one_by_one(q, k, v, documents.starts_on_host, bias, dropout_p)


# --- on a GPU: packed documents -------------------------------------------------------------------

# `varlen_attn` of PyTorch 2.10 has neither windows nor grouped heads.
_HAS_PACKING = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def takes_packed_documents(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
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
    """Return x_NHK: the tokens of all rows, one row after another. (N, heads, width) is the layout
    of packed documents, in which one document is one slice."""
    return x_BHLK.transpose(1, 2).flatten(0, 1)


# --- a call of `attend` for each document ---------------------------------------------------------


def _attend_one_by_one(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, bias: Tensor | None, dropout_p: float
) -> Tensor:
    """Return attention of each document by a call of `attend`, for all cases."""
    num_rows, _, length, _ = q.shape
    sizes = starts.diff().tolist()
    # Split once, as the gradient of a slice is as large as the whole.
    documents_q = _tokens_of_rows(q).split(sizes)
    documents_k = _tokens_of_rows(k).split(sizes)
    documents_v = _tokens_of_rows(v).split(sizes)
    indices = indices_of_documents(starts, length)

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
            dropout_p,
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
