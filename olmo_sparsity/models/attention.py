"""Attention kernels and biases of any model: functions of tensors, which import no model.

Dimension key: B batch, L length (K keys: with a cache longer than L), H heads, F distant places.
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
"""The usual attention that ours replaces, by our name for each. No other is replaced."""


@dataclass(frozen=True)
class AttentionWindow:
    """Which places the queries of a layer see, by position IDs: those less than `size` before them,
    or, in chunks, those with the same multiple of `size` before them."""

    size: int
    is_chunked: bool = False

    def hides(self, queries_BL: Tensor, keys_BK: Tensor) -> Tensor:
        """Return hides_BLK: whether the window hides a key from a query. Keys after the query are
        not considered, since causal attention hides them anyway."""
        if self.is_chunked:
            return (queries_BL // self.size)[:, :, None] != (keys_BK // self.size)[:, None]
        return queries_BL[:, :, None] - keys_BK[:, None] >= self.size

    def holds(self, first: int, last: int) -> bool:
        """Return whether all places from the first to the last position ID see each other, also if
        they are counted from 0."""
        if self.is_chunked:
            return last < self.size
        return last - first < self.size


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    dropout_p: float = 0.0,
    grouped: bool = False,
) -> Tensor:
    """Return attention by the fastest kernel; the plain attention of this project runs here.

    On CPU the fused kernel's backward is slower than that of plain matmuls below about 192 places
    (by a third of a training step at 128). Forward only, the fused kernel is always faster, and by
    another third with blocks of queries and a mask instead of `is_causal`.
    """
    length = q.shape[-2]
    trains = torch.is_grad_enabled()
    if trains and matmul_is_faster(q.device, length, grouped):
        if bias is None:
            bias = causal_bias(k.shape[2], q.device, length).to(q.dtype)
        return _attend_by_matmul(q, k, v, bias, dropout_p)
    if q.device.type == "cpu" and not trains and is_causal and length >= 96:
        return _attend_by_blocks(q, k, v, dropout_p, grouped)
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p, is_causal, enable_gqa=grouped)


def attend_to_distant(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distant_k: Tensor,
    distant_v: Tensor,
    distant_bias: Tensor | None,
    scale: float | None = None,
    local_bias: Tensor | None = None,
) -> Tensor:
    """Return attention of the last places to distant and to local places, without gradients.

    The two parts are joined by their log-sum-exp, so that distant keys and values which rows share
    (as views) are not copied for each of them.

    distant_bias    (B, F), or (B, L, F) where queries differ
    local_bias  (B, 1, L, K); None: causal
    """
    # The kernels themselves check few sizes, and read beyond the end of a tensor that is too short.
    num_rows = len(q)
    num_distant = distant_k.shape[2]
    assert num_rows == len(k) == len(v) == len(distant_k) == len(distant_v)
    if distant_bias is not None:
        assert distant_bias.shape[0] == num_rows
        assert distant_bias.shape[-1] == num_distant
    num_queries = q.shape[2]
    num_heads, num_keys = k.shape[1:3]
    if local_bias is None:
        local_bias = causal_bias(num_keys, q.device, num_queries)

    # Query heads that read the same keys become more queries of one head. So keys and values are
    # not copied for each query head, and a bias over queries is repeated for each group instead.
    grouped = q.unflatten(1, (num_heads, -1)).flatten(2, 3)
    num_groups = grouped.shape[2] // num_queries
    local_bias = local_bias.repeat(1, 1, num_groups, 1)
    local, local_sum = _attend_with_sum(grouped, k, v, local_bias, scale)
    if num_distant == 0:
        return local.unflatten(2, (-1, num_queries)).flatten(1, 2)
    bias = None
    if distant_bias is not None and distant_bias.dim() == 3:
        bias = distant_bias[:, None].repeat(1, 1, num_groups, 1)
    elif distant_bias is not None:
        bias = distant_bias[:, None, None]
    distant, distant_sum = _attend_with_sum(grouped, distant_k, distant_v, bias, scale)

    # A softmax over both parts gives the distant one this share of the weight.
    distant_share = (distant_sum - local_sum).sigmoid()[..., None]
    mixed = torch.lerp(local.to(distant_share), distant.to(distant_share), distant_share)
    return mixed.to(local.dtype).unflatten(2, (-1, num_queries)).flatten(1, 2)


def _attend_with_sum(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention, and the log-sum-exp of each query's scores."""
    if bias is not None:
        num_keys = bias.shape[-1]
        # Half the lowest number: the kernel of CUDA multiplies scores by log2(e), and a query that
        # sees nothing but -inf gets NaN, which no weight of 0 takes out again.
        bias = bias.to(q).clamp(min=torch.finfo(q.dtype).min / 2)
        # The kernel of CUDA requires that rows of a bias begin at multiples of 16 bytes.
        aligned = F.pad(bias, (0, -num_keys % 16))
        bias = aligned.narrow(-1, 0, num_keys).expand(len(q), q.shape[1], q.shape[2], -1)
    if q.device.type == "cpu":
        return _KERNEL(q, k, v, attn_mask=bias, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    mixed, sum_BHL, _, _ = kernel(q, k, v, bias, compute_log_sumexp=True, scale=scale)
    return mixed, sum_BHL.narrow(-1, 0, q.shape[2])  # the kernel pads the sums


def can_share_distant(
    device: torch.device, dtype: torch.dtype, head_width: int, num_distant: int, length: int
) -> bool:
    """Return whether `attend_to_distant` can and should serve a model with these weights. Where
    there are fewer distant places than local ones, copying their states costs less."""
    return (
        num_distant > length
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(device.type)
        and _distant_attends_apart(device, dtype, head_width)
    )


@functools.cache
def _distant_attends_apart(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Try whether `attend_to_distant` computes right numbers here: it depends on the hardware which
    kernels exist, and for which dtypes and widths."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return False
    try:
        return distant_error(device, dtype, head_width) <= 1
    except RuntimeError as error:
        # These say nothing about the kernel, and the answer is kept as long as the process lives.
        if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            raise
        return False


def distant_error(device: torch.device, dtype: torch.dtype, head_width: int) -> float:
    """Return the largest difference between `attend_to_distant` and attention to all places,
    divided by what rounding allows. A kernel that does not take these sizes raises RuntimeError."""
    # Sizes of several blocks of any kernel, and no multiples of a block.
    num_queries = 40
    num_distant = 300
    generator = torch.Generator().manual_seed(0)
    shape = (2, 1, num_distant + num_queries, 2, head_width)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float)
    k_1HLK, v_1HLK = numbers.to(dtype).transpose(2, 3)
    q_1HLK = v_1HLK[:, :, -num_queries:].repeat_interleave(2, dim=1)  # grouped heads

    # Four rows: they see all distant places, the second half, the first half, and none.
    lowest = torch.finfo(torch.float).min
    bias_BF = torch.zeros(4, num_distant, dtype=torch.float)
    bias_BF[1, : num_distant // 2] = lowest
    bias_BF[2, num_distant // 2 :] = lowest
    bias_BF[3] = lowest

    # The expected result: one softmax over all places, in double precision, by plain products.
    distant_bias = bias_BF[:, None, None].expand(-1, -1, num_queries, -1)
    local_bias = causal_bias(num_queries, bias_BF.device).expand(4, -1, -1, -1)
    k_1HLK_double = k_1HLK.double().repeat_interleave(2, dim=1)
    v_1HLK_double = v_1HLK.double().repeat_interleave(2, dim=1)
    scores = q_1HLK.double() @ k_1HLK_double.mT * head_width**-0.5
    scores = scores + torch.cat((distant_bias, local_bias), dim=-1)
    expected = scores.softmax(-1) @ v_1HLK_double

    # Rows share keys and values as views, as they do in use.
    q, k, v = (part.to(device).expand(4, -1, -1, -1) for part in (q_1HLK, k_1HLK, v_1HLK))
    distant = (k[:, :, :num_distant], v[:, :, :num_distant])
    local = (k[:, :, num_distant:], v[:, :, num_distant:])
    with torch.no_grad():
        computed = attend_to_distant(q, *local, *distant, bias_BF.to(device)).cpu().double()
    allowed = 4 * max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float).eps)
    return float((computed - expected).abs().max()) / allowed


# --- documents kept apart -------------------------------------------------------------------------

Documents = tuple[Tensor, Tensor]
"""starts_D1, on the host and on the device of the model: where the documents of a batch begin, all
rows one after another, and where the last one ends."""


def find_documents(documents_BL: Tensor, device: torch.device) -> Documents:
    """Return where documents begin. `documents_BL`: a number for each place, on the host; a
    document is a run of equal numbers."""
    begins_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    begins_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    starts_D = begins_BL.flatten().nonzero()[:, 0]
    starts_D1 = F.pad(starts_D, (0, 1), value=documents_BL.numel()).int()
    documents = starts_D1, starts_D1.to(device, non_blocking=True)
    for starts in documents:  # so that a compiled model has one graph for any number of documents
        torch._dynamo.maybe_mark_dynamic(starts, 0)
    return documents


def count_keys_of_documents(documents: Documents, num_rows: int, length: int) -> Tensor:
    """Return counts_BL: how many places of its own document each place sees, with itself."""
    _, starts_D1 = documents
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
    """Return causal attention of each document to itself. No kernel sees two documents, so time and
    memory are those of the single documents, without a mask of L·L places. `bias` must hide later
    places already."""
    starts_on_host, starts = documents
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
                starts,
                starts,
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
    """Return attention of each document, for what the other two ways do not take: fp32 on a GPU,
    ALiBi, dropout."""
    num_rows, _, length, _ = q.shape
    sizes = starts.diff().tolist()
    grouped = q.shape[1] != k.shape[1]
    # Split once, as the gradient of a slice is as large as the whole.
    q_parts, k_parts, v_parts = (x.transpose(1, 2).flatten(0, 1).split(sizes) for x in (q, k, v))
    parts = zip(_slices(starts, length), q_parts, k_parts, v_parts, strict=True)
    mixed = []
    for (row, _, places), *document in parts:
        bias_of_document = None
        if bias is not None:
            rows = row if len(bias) > 1 else slice(1)
            bias_of_document = bias[rows][..., places, places]
        document_q, document_k, document_v = (x.transpose(0, 1)[None] for x in document)
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
    """Keep `_attend_one_by_one` out of compiled graphs: it would get one for each set of lengths.

    Call it before compiling. As a decorator, `disable` would import the compiler, half of the time
    that the tool takes to start."""
    global _attend_one_by_one
    _attend_one_by_one = torch.compiler.disable(_attend_one_by_one)


def _slices(starts: Tensor, length: int) -> list[tuple[slice, slice, slice]]:
    """Return the index of each document in a tensor (B, H, L, …). No document crosses two rows."""
    slices = []
    for start, end in pairwise(starts.tolist()):
        row, first = divmod(start, length)
        places = slice(first, first + end - start)
        slices.append((slice(row, row + 1), slice(None), places))
    return slices


# Their last two arguments here are dropout and whether attention is causal.
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return keys or values once for each head of the queries."""
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
    for place in _slices(starts, q.shape[2]):
        document_k = _repeat_heads(k[place], num_heads)
        document_v = _repeat_heads(v[place], num_heads)
        mixed[place], sums_BHL[place] = _KERNEL(q[place], document_k, document_v, 0.0, True)
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
    num_heads = q.shape[1]
    if grad.stride(-1) != 1:  # the kernel reads neighbouring coordinates, without asking
        grad = grad.contiguous()
    for place in _slices(starts, q.shape[2]):
        document_grads = _KERNEL_BACKWARD(
            grad[place],
            q[place],
            _repeat_heads(k[place], num_heads),
            _repeat_heads(v[place], num_heads),
            mixed[place],
            sums_BHL[place],
            0.0,
            True,
        )
        for grad_of_all, grad_of_document in zip(grads, document_grads, strict=True):
            num_sharing = grad_of_document.shape[1] // grad_of_all.shape[1]
            if num_sharing > 1:  # query heads that read the same keys and values
                grad_of_document = grad_of_document.unflatten(1, (-1, num_sharing)).sum(2)
            grad_of_all[place] = grad_of_document
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
    """Return whether a backward pass would keep more activations than `MAX_ACTIVATIONS_B`."""
    numbers_kept = 20 * width + 3 * num_heads * num_keys  # for each token and layer, as measured
    return num_tokens * numbers_kept * num_layers * itemsize > MAX_ACTIVATIONS_B


def matmul_is_faster(device: torch.device, length: int, grouped: bool) -> bool:
    """Return whether plain products train faster than the fused kernel (see `attend`)."""
    return device.type == "cpu" and length <= 192 and not grouped


def _attend_by_blocks(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, grouped: bool, size: int = 64
) -> Tensor:
    """Return attention of `size` queries at a time to the keys up to their own, with a mask."""
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
    """Return bias_11LK of the last queries: 0 for visible places, the most negative number for
    later ones."""
    if num_queries is None:
        num_queries = num_keys
    lowest = torch.finfo(torch.float).min
    bias_LK = torch.full((num_queries, num_keys), lowest, dtype=torch.float, device=device)
    return bias_LK.triu_(diagonal=1 + num_keys - num_queries)[None, None]
