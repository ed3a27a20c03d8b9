"""Compute attention for any model: functions of tensors, which import no model.

- `attend` is attention of rows, by the fastest kernel.
- `attend_within` keeps the documents of a row apart (`data.mask_documents`).
- `AttentionWindow` says what sliding and chunked windows hide, by position IDs.

Attention to distant tokens whose states rows share is in distant_attention.py.

Dimension key: B batch, L length, K keys (more than L where earlier places are attended to), H
heads, D documents of a batch, N = B·L places.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

OWN_ATTENTION = "olmo_sparsity"
"""The name of our attention function in the registry of transformers."""

USUAL = {OWN_ATTENTION: "sdpa", "olmo_sparsity_eager": "eager"}
"""Names in the registry of transformers: ours, and the usual attention that each of ours replaces.
No other attention is replaced."""


@dataclass(frozen=True)
class AttentionWindow:
    """The places that the queries of a layer see, by position IDs. A sliding window shows those
    that are less than `size` before the query. A chunked one shows those of the same chunk:
    position IDs are cut at multiples of `size`."""

    size: int
    is_chunked: bool = False

    def hides(self, queries_BL: Tensor, keys_BK: Tensor) -> Tensor:
        """Return hides_BLK: whether the window hides a key from a query, by the position IDs of
        both. Keys after the query are not considered, since causal attention hides them anyway."""
        if self.is_chunked:
            return (queries_BL // self.size)[:, :, None] != (keys_BK // self.size)[:, None]
        return queries_BL[:, :, None] - keys_BK[:, None] >= self.size

    def holds(self, smallest_id: int, largest_id: int) -> bool:
        """Return whether the window hides none of these places from another, so that no mask is
        needed. `smallest_id`, `largest_id`: the smallest and largest of their position IDs."""
        if self.is_chunked:
            # Nothing is hidden within the first chunk, whether position IDs or places are counted.
            return largest_id < self.size
        return largest_id - smallest_id < self.size


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    dropout_p: float = 0.0,
    grouped: bool = False,
) -> Tensor:
    """Return attention of rows, in the shape of q, by the fastest kernel.

    On CPU the fused kernel's backward is slower than that of plain matmuls below about 192 places
    (by a third of a training step at 128). Forward only, the fused kernel is always faster, and by
    another third with blocks of queries and a mask instead of `is_causal`.

    bias        (B or 1, H or 1, L, K), added to the scores. None for causal attention, or for a
                single query that sees all keys.
    grouped     whether k and v have fewer heads than q
    """
    length = q.shape[-2]
    trains = torch.is_grad_enabled()
    if trains and _matmul_is_faster(q.device, length, grouped):
        if bias is None:
            bias = causal_bias(k.shape[2], q.device, length).to(q.dtype)
        return _attend_by_matmul(q, k, v, bias, dropout_p)
    if q.device.type == "cpu" and not trains and is_causal and length >= 96:
        return _attend_by_blocks(q, k, v, dropout_p, grouped)
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p, is_causal, enable_gqa=grouped)


def _matmul_is_faster(device: torch.device, length: int, grouped: bool) -> bool:
    """Return whether plain products train faster than the fused kernel (see `attend`)."""
    return device.type == "cpu" and length <= 192 and not grouped


def _attend_by_blocks(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, grouped: bool, size: int = 64
) -> Tensor:
    """Return causal attention, computed for `size` queries at a time: each block attends only to
    the keys up to its own end, so half of the scores are never computed."""
    length = q.shape[-2]
    lowest = torch.finfo(torch.float).min
    # The bias of the last `size` queries. Its lower right corner is that of every other block.
    bias = torch.full((size, length), lowest, dtype=torch.float, device=q.device)
    bias = bias.triu_(length - size + 1).to(q.dtype)
    blocks = []
    for start in range(0, length, size):
        end = min(start + size, length)
        block = F.scaled_dot_product_attention(
            q[..., start:end, :],
            k[..., :end, :],
            v[..., :end, :],
            bias[start - end :, length - end :],
            dropout_p,
            enable_gqa=grouped,
        )
        blocks.append(block.transpose(1, 2))
    return torch.cat(blocks, dim=1).transpose(1, 2)


def _attend_by_matmul(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout_p: float) -> Tensor:
    """Return attention by two batched products, with all rows and heads in one dimension."""
    bias = bias.expand(*q.shape[:3], k.shape[2]).flatten(0, 1)
    keys = k.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(bias, q.flatten(0, 1), keys, alpha=q.shape[-1] ** -0.5)
    weights = F.dropout(scores.softmax(-1), dropout_p)
    return torch.bmm(weights, v.flatten(0, 1)).view_as(q)


def causal_bias(num_keys: int, device: torch.device, num_queries: int | None = None) -> Tensor:
    """Return bias_11LK of the last `num_queries` of `num_keys` places (default: of all): 0 for
    visible places, the lowest number of fp32 for later ones."""
    if num_queries is None:
        num_queries = num_keys
    lowest = torch.finfo(torch.float).min
    bias_LK = torch.full((num_queries, num_keys), lowest, dtype=torch.float, device=device)
    return bias_LK.triu_(diagonal=1 + num_keys - num_queries)[None, None]


# --- documents kept apart -------------------------------------------------------------------------


class Documents(NamedTuple):
    """The first places of the documents of a batch, whose rows are counted one after another, and
    one more number: the end of the last document. A row begins a new document."""

    starts_on_host: Tensor
    """int32, (D + 1,). Loops over documents and splits need the numbers on the host."""

    starts: Tensor
    """The same numbers on the device of the model, for kernels that take packed documents."""


def find_documents(documents_BL: Tensor, device: torch.device) -> Documents:
    """Return where the documents of a batch begin. `documents_BL`: the number of the document of
    each place, on the host; a document is a run of equal numbers within a row."""
    begins_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    begins_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    starts_D = begins_BL.flatten().nonzero()[:, 0]
    starts_D1 = F.pad(starts_D, (0, 1), value=documents_BL.numel()).int()
    documents = Documents(starts_D1, starts_D1.to(device, non_blocking=True))
    for starts in documents:  # so that a compiled model has one graph for any number of documents
        torch._dynamo.maybe_mark_dynamic(starts, 0)
    return documents


def count_keys_of_documents(documents: Documents, num_rows: int, length: int) -> Tensor:
    """Return counts_BL: how many places of its own document each place sees, with itself."""
    starts_D1 = documents.starts
    places_N = torch.arange(num_rows * length, device=starts_D1.device, dtype=starts_D1.dtype)
    document_N = torch.searchsorted(starts_D1, places_N, right=True) - 1
    counts_N = places_N - starts_D1[document_N] + 1
    return counts_N.view(num_rows, length)


def attend_within(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return causal attention of each document to itself, in the shape of q. No kernel sees two
    documents, so time and memory are those of the single documents, without a mask of L·L places.
    `bias`, which rows have with ALiBi or windows, must hide later places already.

    Three ways compute it: flash attention takes packed documents on a GPU; a loop over documents in
    one operation on CPU; and a loop over calls of `attend` what the two do not take."""
    starts_on_host = documents.starts_on_host
    q = q.to(v.dtype)
    k = k.to(v.dtype)
    if bias is None and dropout_p == 0:
        if packs(q.device, q.dtype, q.shape[-1]):
            from torch.nn.attention.varlen import varlen_attn

            length = q.shape[2]
            grouped = q.shape[1] != k.shape[1]
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            mixed_NHK: Any = varlen_attn(
                q,
                k,
                v,
                documents.starts,
                documents.starts,
                length,
                length,
                window_size=(-1, 0),  # causal
                enable_gqa=grouped,
            )
            return mixed_NHK.unflatten(0, (-1, length)).transpose(1, 2)
        if q.device.type == "cpu":
            mixed, _ = _attend_by_document(q, k, v, starts_on_host)
            return mixed
    return _attend_one_by_one(q, k, v, starts_on_host, bias, dropout_p)


# `varlen_attn` of PyTorch 2.10 has neither windows nor grouped heads.
_HAS_PACKING = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def packs(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Return whether flash attention takes documents of several lengths here."""
    return (
        device.type == "cuda"
        and _HAS_PACKING
        and dtype in (torch.bfloat16, torch.float16)
        and head_width % 8 == 0
        and head_width <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _attend_one_by_one(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, bias: Tensor | None, dropout_p: float
) -> Tensor:
    """Return attention of each document by a call of `attend`, for what the other two ways do not
    take: fp32 on a GPU, ALiBi, windows, dropout."""
    num_rows, _, length, _ = q.shape
    sizes = starts.diff().tolist()
    grouped = q.shape[1] != k.shape[1]
    # Split once, as the gradient of a slice is as large as the whole.
    q_parts, k_parts, v_parts = (x.transpose(1, 2).flatten(0, 1).split(sizes) for x in (q, k, v))
    parts = zip(_indices_of_documents(starts, length), q_parts, k_parts, v_parts, strict=True)
    mixed = []
    for (row, _, places), *parts_of_document in parts:
        bias_of_document = None
        if bias is not None:
            rows = row if len(bias) > 1 else slice(1)
            bias_of_document = bias[rows][..., places, places]
        # (L, H, K) of a document → a batch of one row, (1, H, L, K).
        document_q, document_k, document_v = (x.transpose(0, 1)[None] for x in parts_of_document)
        attended = attend(
            document_q,
            document_k,
            document_v,
            bias_of_document,
            is_causal=bias_of_document is None,
            dropout_p=dropout_p,
            grouped=grouped,
        )
        mixed.append(attended[0].transpose(0, 1))
    return torch.cat(mixed).unflatten(0, (num_rows, length)).transpose(1, 2)


def keep_out_of_graphs() -> None:
    """Keep `_attend_one_by_one` out of compiled graphs, as each set of lengths would get its own
    graph. Call it before compiling. (As a decorator, `disable` would import the compiler, which is
    half of the time that the tool takes to start.)"""
    global _attend_one_by_one
    _attend_one_by_one = torch.compiler.disable(_attend_one_by_one)


def _indices_of_documents(starts: Tensor, length: int) -> list[tuple[slice, slice, slice]]:
    """Return the index (row, all heads, places) of each document in a tensor (B, H, L, …). No
    document crosses two rows."""
    indices = []
    for start, end in pairwise(starts.tolist()):
        row, first = divmod(start, length)
        places = slice(first, first + end - start)
        indices.append((slice(row, row + 1), slice(None), places))
    return indices


# The kernel of scaled_dot_product_attention on CPU, called directly because it also returns the
# log-sum-exp of each query's scores.
CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return keys or values once for each head of the queries: the kernel of older versions of
    PyTorch takes no grouped heads."""
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
    """Return the gradients of queries, keys and values."""
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    num_heads = q.shape[1]
    if grad.stride(-1) != 1:  # the kernel reads neighbouring coordinates, without asking
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
            if num_sharing > 1:  # query heads that read the same keys and values
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

# --- kernels of a GPU, memory of a backward pass --------------------------------------------------

# Not cuDNN's, which plans for tens of milliseconds for each of the hundreds of shapes.
_GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_choosing = threading.RLock()


@contextmanager
def fast_kernels(device: torch.device, differentiate_bias: bool = False) -> Iterator[None]:
    """Inside, choose the fastest attention kernels of a GPU. This is a setting of the whole
    process, so one thread at a time changes it, and restores it afterwards.

    `differentiate_bias`: choose the plain kernel (MATH). Of the kernels that a GPU may choose,
    cuDNN's does not differentiate a bias, and the memory-efficient one reads memory that it never
    wrote if only the bias needs a gradient. MATH then computes in the dtype of the queries, as in
    fp32 it would not use tensor cores.
    """
    if device.type == "cpu":
        yield
        return
    cuda = torch.backends.cuda
    with _choosing, sdpa_kernel(SDPBackend.MATH if differentiate_bias else _GPU_KERNELS):
        was_allowed = cuda.fp16_bf16_reduction_math_sdp_allowed()
        cuda.allow_fp16_bf16_reduction_math_sdp(differentiate_bias or was_allowed)
        try:
            yield
        finally:
            cuda.allow_fp16_bf16_reduction_math_sdp(was_allowed)


MAX_ACTIVATIONS_B = 2**31
"""Bytes that a backward pass of an evaluation may keep; beyond, layers are computed again."""


def keeps_much(
    num_tokens: int, num_keys: int, width: int, num_heads: int, num_layers: int, itemsize: int
) -> bool:
    """Return whether a backward pass would keep more activations than `MAX_ACTIVATIONS_B`.
    `num_keys`: how many places each token attends to, if attention scores are kept, else 0."""
    numbers_kept = 20 * width + 3 * num_heads * num_keys  # for each token and layer, as measured
    return num_tokens * numbers_kept * num_layers * itemsize > MAX_ACTIVATIONS_B
