"""Attention kernels and biases of any model: functions of tensors, which import no model.

Dimension key: B batch, L length (K keys: with a cache longer than L), H heads, F far places.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from olmo_sparsity.base.errors import is_out_of_memory

OWN_ATTENTION = "olmo_sparsity"
"""The name of our attention function in the registry of transformers."""

USUAL = {OWN_ATTENTION: "sdpa", "olmo_sparsity_eager": "eager"}
"""The only attention that ours takes the place of, by our name for each."""


@dataclass(frozen=True)
class AttentionWindow:
    """Which places the queries of a layer see, by position IDs: those less than `size` before them,
    or, in chunks, those with the same multiple of `size` before them."""

    size: int
    is_chunked: bool = False

    def hides(self, queries_BL: Tensor, keys_BK: Tensor) -> Tensor:
        """hides_BLK. Keys are not after queries, or hidden anyway."""
        if self.is_chunked:
            return (queries_BL // self.size)[:, :, None] != (keys_BK // self.size)[:, None]
        return queries_BL[:, :, None] - keys_BK[:, None] >= self.size

    def holds(self, first: int, last: int) -> bool:
        """Whether all places from the first to the last position ID see each other, also if they
        are counted from 0."""
        return last < self.size if self.is_chunked else last - first < self.size


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    dropout_p: float = 0.0,
    grouped: bool = False,
) -> Tensor:
    """Attention by the fastest kernel; all attention in this project runs here.

    On CPU the fused kernel's backward is slower than that of plain matmuls below about 192 places
    (by a third of a training step at 128). Forward only, the fused kernel is always faster, and by
    another third with blocks of queries and a mask instead of `is_causal`.
    """
    if torch.is_grad_enabled() and matmul_is_faster(q.device, q.shape[-2], grouped):
        return _attend_by_matmul(q, k, v, bias if bias is not None else _future(q, k), dropout_p)
    if q.device.type == "cpu" and not torch.is_grad_enabled() and is_causal and q.shape[-2] >= 96:
        return _attend_by_blocks(q, k, v, dropout_p, grouped)
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p, is_causal, enable_gqa=grouped)


def attend_to_far(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far_k: Tensor,
    far_v: Tensor,
    far_bias: Tensor | None,
    scale: float | None = None,
    own_bias: Tensor | None = None,
) -> Tensor:
    """Attention of the last places to far places and to the row's own, without gradients. The two
    parts are joined by their log-sum-exp, so that far keys and values which rows share (as views)
    are not copied for each of them. `far_bias`: (B, F), or (B, L, F) where queries differ.
    `own_bias`: (B, 1, L, K), in place of a causal one."""
    # The kernels themselves check few sizes.
    assert len(q) == len(k) == len(v) == len(far_k) == len(far_v)
    assert far_bias is None or far_bias.shape[:: far_bias.dim() - 1] == (len(q), far_k.shape[2])
    num_queries, (num_heads, num_keys) = q.shape[2], k.shape[1:3]
    own_bias = causal_bias(num_keys, q.device, num_queries) if own_bias is None else own_bias
    grouped = q.unflatten(1, (num_heads, -1)).flatten(2, 3)  # heads that read the same keys
    num_groups = grouped.shape[2] // num_queries
    near, near_sum = _attend_with_sum(grouped, k, v, own_bias.repeat(1, 1, num_groups, 1), scale)
    if far_k.shape[2] == 0:
        return near.unflatten(2, (-1, num_queries)).flatten(1, 2)
    bias = None if far_bias is None else far_bias[:, None, None]
    if far_bias is not None and far_bias.dim() == 3:
        bias = far_bias[:, None].repeat(1, 1, num_groups, 1)
    far, far_sum = _attend_with_sum(grouped, far_k, far_v, bias, scale)
    far_share = (far_sum - near_sum).sigmoid()[..., None]
    mixed = torch.lerp(near.to(far_share), far.to(far_share), far_share).to(near.dtype)
    return mixed.unflatten(2, (-1, num_queries)).flatten(1, 2)


def _attend_with_sum(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention, and log-sum-exp of each query's scores."""
    if bias is not None:
        # Half the lowest number: the kernel of CUDA multiplies scores by log2(e), and a query that
        # sees nothing but -inf gets NaN, which no weight of 0 takes out again.
        bias, num_keys = bias.to(q).clamp(min=torch.finfo(q.dtype).min / 2), bias.shape[-1]
        aligned = F.pad(bias, (0, -num_keys % 16))  # on CUDA, rows begin at multiples of 16 bytes
        bias = aligned.narrow(-1, 0, num_keys).expand(len(q), q.shape[1], q.shape[2], -1)
    if q.device.type == "cpu":
        return _KERNEL(q, k, v, attn_mask=bias, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    mixed, sum_BHL, _, _ = kernel(q, k, v, bias, compute_log_sumexp=True, scale=scale)
    return mixed, sum_BHL.narrow(-1, 0, q.shape[2])  # padded by the kernel


def can_share_far(
    device: torch.device, dtype: torch.dtype, head_width: int, num_far: int, length: int
) -> bool:
    """Whether `attend_to_far` serves a model with these weights; for few far places copies cost
    less."""
    return (
        num_far > length
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(device.type)
        and _far_attends_apart(device, dtype, head_width)
    )


@functools.cache
def _far_attends_apart(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Which kernels there are, and for which dtypes and widths, depends on the hardware."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return False
    try:
        return far_error(device, dtype, head_width) <= 1
    except RuntimeError as error:
        if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            raise
        return False


def far_error(device: torch.device, dtype: torch.dtype, head_width: int) -> float:
    """The largest difference between `attend_to_far` and attention to all places, over what
    rounding allows. A kernel that does not take these sizes raises RuntimeError."""
    queries, far = 40, 300  # several blocks of any kernel
    generator = torch.Generator().manual_seed(0)
    shape = (2, 1, far + queries, 2, head_width)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float)
    k_1HLK, v_1HLK = numbers.to(dtype).transpose(2, 3)
    bias_BF = torch.zeros(4, far, dtype=torch.float)
    lowest = torch.finfo(torch.float).min
    bias_BF[1, : far // 2], bias_BF[2, far // 2 :], bias_BF[3] = lowest, lowest, lowest
    bias_BHLK = torch.cat(
        (
            bias_BF[:, None, None].expand(-1, -1, queries, -1),
            causal_bias(queries, bias_BF.device).expand(4, -1, -1, -1),
        ),
        dim=-1,
    )
    q_1HLK = v_1HLK[:, :, -queries:].repeat_interleave(2, dim=1)  # grouped heads
    k, v = (part.double().repeat_interleave(2, dim=1) for part in (k_1HLK, v_1HLK))
    scores = q_1HLK.double() @ k.mT * head_width**-0.5 + bias_BHLK
    expected = scores.softmax(-1) @ v
    q, k, v = (part.to(device).expand(4, -1, -1, -1) for part in (q_1HLK, k_1HLK, v_1HLK))
    own, past = (k[:, :, far:], v[:, :, far:]), (k[:, :, :far], v[:, :, :far])
    with torch.no_grad():
        found = attend_to_far(q, *own, *past, bias_BF.to(device)).cpu().double()
    allowed = 4 * max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float).eps)
    return float((found - expected).abs().max()) / allowed


# --- documents kept apart -------------------------------------------------------------------------

Documents = tuple[Tensor, Tensor]
"""starts_D1, on the host and on the device of the model: where the documents of a batch begin, all
rows one after another, and where the last one ends."""


def find_documents(documents_BL: Tensor, device: torch.device) -> Documents:
    """`documents_BL`: a number for each place, on the host. A document is a run of equal ones."""
    begins_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    begins_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    starts_D = begins_BL.flatten().nonzero()[:, 0]
    starts_D1 = F.pad(starts_D, (0, 1), value=documents_BL.numel()).int()
    documents = starts_D1, starts_D1.to(device, non_blocking=True)
    for starts in documents:  # a compiled model is one graph for any number of them
        torch._dynamo.maybe_mark_dynamic(starts, 0)
    return documents


def attend_within(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention of each document to itself. No kernel sees two documents, so time and memory
    equal the documents' own, without a mask of L·L places. `bias`: causal already."""
    starts_on_host, starts = documents
    q, k = q.to(v.dtype), k.to(v.dtype)
    if bias is None and dropout_p == 0:
        if packs(q.device, q.dtype, q.shape[-1]):
            from torch.nn.attention.varlen import varlen_attn

            length, grouped = q.shape[2], q.shape[1] != k.shape[1]
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            mixed_NHK: Any = varlen_attn(
                q, k, v, starts, starts, length, length, window_size=(-1, 0), enable_gqa=grouped
            )
            return mixed_NHK.unflatten(0, (-1, length)).transpose(1, 2)
        if q.device.type == "cpu":
            return _attend_by_document(q, k, v, starts_on_host)[0]
    return _attend_one_by_one(q, k, v, starts_on_host, bias, dropout_p)


# That of 2.10 has neither windows nor grouped heads.
_PACKING_IS_THERE = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def packs(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Return whether flash attention takes documents of several lengths here."""
    return (
        device.type == "cuda"
        and _PACKING_IS_THERE
        and dtype in (torch.bfloat16, torch.float16)
        and head_width % 8 == 0
        and head_width <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _attend_one_by_one(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, bias: Tensor | None, dropout_p: float
) -> Tensor:
    """For what the other two ways do not take: fp32 on a GPU, ALiBi, dropout."""
    num_rows, _, length, _ = q.shape
    sizes, grouped = starts.diff().tolist(), q.shape[1] != k.shape[1]
    # Split once, as the gradient of a slice is as large as the whole.
    parts = zip(*(x.transpose(1, 2).flatten(0, 1).split(sizes) for x in (q, k, v)), strict=True)
    mixed = []
    for (row, _, places), part in zip(_slices(starts, length), parts, strict=True):
        own_bias = None if bias is None else bias[row if len(bias) > 1 else slice(1)]
        if own_bias is not None:
            own_bias = own_bias[..., places, places]
        own_q, own_k, own_v = (x.transpose(0, 1)[None] for x in part)
        out = attend(own_q, own_k, own_v, own_bias, own_bias is None, dropout_p, grouped)
        mixed.append(out[0].transpose(0, 1))
    return torch.cat(mixed).unflatten(0, (num_rows, length)).transpose(1, 2)


def keep_out_of_graphs() -> None:
    """Call before compiling: `_attend_one_by_one` would get a graph for each set of lengths. The
    decorator would import the compiler, half of the time that the tool takes to start."""
    global _attend_one_by_one
    _attend_one_by_one = torch.compiler.disable(_attend_one_by_one)


def _slices(starts: Tensor, length: int) -> list[tuple[slice, slice, slice]]:
    """The place of each document in a tensor (B, H, L, …)."""
    edges = starts.tolist()
    return [
        (
            slice(first // length, first // length + 1),
            slice(None),
            slice(first % length, first % length + last - first),
        )
        for first, last in pairwise(edges)
    ]


# An operation of its own, which the compiler calls as it is, whatever the documents' lengths are.
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    """Keys or values, once for each head of the queries."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


@torch.library.custom_op(
    "olmo_sparsity::attend_by_document",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor starts) -> (Tensor, Tensor)",
)
def _attend_by_document(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """On CPU: attention, and log-sum-exp of each query's scores."""
    mixed, sums_BHL = _empty_of_documents(q, k, v, starts)
    for at in _slices(starts, q.shape[2]):
        own = (q[at], *(_repeated(x[at], q.shape[1]) for x in (k, v)))
        mixed[at], sums_BHL[at] = _KERNEL(*own, 0.0, True)
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
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    for at in _slices(starts, q.shape[2]):
        own = (q[at], *(_repeated(x[at], q.shape[1]) for x in (k, v)))
        found = _KERNEL_BACKWARD(grad[at], *own, mixed[at], sums_BHL[at], 0.0, True)
        for whole, part in zip(grads, found, strict=True):
            shared = part.shape[1] // whole.shape[1]
            whole[at] = part if shared == 1 else part.unflatten(1, (-1, shared)).sum(2)
    return grads


@_backward_by_document.register_fake
def _empty_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts = inputs
    ctx.save_for_backward(q, k, v, *output, starts)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_backward_by_document(grad, *ctx.saved_tensors), None


_attend_by_document.register_autograd(_gradients, setup_context=_keep_for_backward)

# --- which kernel, how much memory ----------------------------------------------------------------

# Not cuDNN's, which plans for tens of milliseconds for each of the hundreds of shapes.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_choosing = threading.RLock()


@contextmanager
def fast_kernels(device: torch.device, differentiate_bias: bool = False) -> Iterator[None]:
    """Choose attention kernels on a GPU. This is a setting of the whole process, so one thread at a
    time changes it, and puts it back.

    `differentiate_bias`: of the kernels that a GPU may choose, cuDNN's does not differentiate a
    bias, and the memory-efficient one reads memory that it never wrote if only the bias needs a
    gradient. MATH then computes in the dtype of the queries: in fp32 it has no tensor cores.
    """
    if device.type == "cpu":
        yield
        return
    cuda = torch.backends.cuda
    with _choosing, sdpa_kernel(SDPBackend.MATH if differentiate_bias else _KERNELS):
        before = cuda.fp16_bf16_reduction_math_sdp_allowed()
        cuda.allow_fp16_bf16_reduction_math_sdp(differentiate_bias or before)
        try:
            yield
        finally:
            cuda.allow_fp16_bf16_reduction_math_sdp(before)


MAX_ACTIVATIONS_B = 2**31
"""Bytes that a backward pass of an evaluation may keep; beyond, layers are computed again."""


def keeps_much(
    num_tokens: int, num_keys: int, width: int, num_heads: int, num_layers: int, itemsize: int
) -> bool:
    kept = 20 * width + 3 * num_heads * num_keys  # numbers a token and layer, as measured
    return num_tokens * kept * num_layers * itemsize > MAX_ACTIVATIONS_B


def matmul_is_faster(device: torch.device, length: int, grouped: bool) -> bool:
    return device.type == "cpu" and length <= 192 and not grouped


def _attend_by_blocks(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, grouped: bool, size: int = 64
) -> Tensor:
    """Attention of `size` queries at a time to the keys up to their own, with a mask."""
    length = q.shape[-2]
    lowest = torch.finfo(torch.float).min
    bias = torch.full((size, length), lowest, dtype=torch.float, device=q.device)
    bias = bias.triu_(length - size + 1).to(q.dtype)
    mixed = []
    for start in range(0, length, size):
        end = min(start + size, length)
        block = (q[..., start:end, :], k[..., :end, :], v[..., :end, :])
        bias_of_block = bias[start - end :, length - end :]
        out = F.scaled_dot_product_attention(*block, bias_of_block, dropout_p, enable_gqa=grouped)
        mixed.append(out.transpose(1, 2))
    return torch.cat(mixed, dim=1).transpose(1, 2)


def _attend_by_matmul(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout_p: float) -> Tensor:
    bias = bias.expand(*q.shape[:3], k.shape[2]).flatten(0, 1)
    scores = torch.baddbmm(
        bias, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=q.shape[-1] ** -0.5
    )
    return torch.bmm(F.dropout(scores.softmax(-1), dropout_p), v.flatten(0, 1)).view_as(q)


def _future(q: Tensor, k: Tensor) -> Tensor:
    return causal_bias(k.shape[2], q.device, q.shape[2]).to(q.dtype)


def causal_bias(num_keys: int, device: torch.device, num_queries: int | None = None) -> Tensor:
    """bias_11LK of the last queries: 0 for visible places, the most negative number for others."""
    num_queries = num_keys if num_queries is None else num_queries
    lowest = torch.finfo(torch.float).min
    bias_LK = torch.full((num_queries, num_keys), lowest, dtype=torch.float, device=device)
    return bias_LK.triu_(diagonal=1 + num_keys - num_queries)[None, None]
