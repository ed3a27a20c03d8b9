"""Compute attention for any model: functions of tensors, which import no model.

- `attend` computes the attention of rows by the fastest kernel.
- `AttentionWindow` says what sliding and chunked windows hide, by position IDs.
- `keeps_much` says whether a backward pass would need too much memory.
- `fast_kernels` chooses the kernels of a GPU.

Attention within the documents of a row is in document_attention.py, attention to distant tokens
whose states rows share in distant_attention.py.

Dimension key: B batch, L length, S keys that a token may attend to (more than L where earlier
tokens are attended to), H heads, G heads of keys and values, K width of a head.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# The kernel of scaled_dot_product_attention on CPU, called directly because it also returns the
# log-sum-exp of each query's scores.
CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class AttentionWindow:
    """A limit to the keys that the queries of a layer see, by position IDs.

    A sliding window of size 4 shows the query with ID 10 the IDs 7 to 10, less than `size` before
    it. A chunked window shows it 8 to 10, as IDs are cut into chunks at multiples of `size`."""

    size: int
    is_chunked: bool = False

    def hides(self, queries_BL: Tensor, keys_BS: Tensor) -> Tensor:
        """Return hides_BLS, which is true where the window hides a key from a query. Keys after the
        query are not considered, since causal attention hides them anyway. `queries_BL` and
        `keys_BS`: position IDs."""
        if self.is_chunked:
            return (queries_BL // self.size)[:, :, None] != (keys_BS // self.size)[:, None]
        return queries_BL[:, :, None] - keys_BS[:, None] >= self.size

    def spans(self, smallest_id: int, largest_id: int) -> bool:
        """Return whether the window is as wide as the span of these position IDs: it then hides no
        token between them from another, and no mask is needed. A sliding window of size 4 spans 7
        to 10, and not 6 to 10."""
        if self.is_chunked:
            # In the first chunk alone, where position IDs and tokens are counted alike: without a
            # mask the model itself would cut chunks by the count of tokens.
            return largest_id < self.size
        return largest_id - smallest_id < self.size


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return attention of rows, in the shape of q, by the fastest kernel.

    Args:
        q: (B, H, L, K).
        k, v: (B, G, S, K). H is a multiple of G (grouped heads).
        bias: Added to the scores, (B or 1, H or 1, L, S). None means causal attention.
        dropout_p: The fraction of attention weights that are dropped.

    What each query sees:

        bias      queries, keys
        given     any               what the bias leaves visible; it must hide later tokens, too
        None      as many           the keys up to its own (causal)
        None      1, any number     all keys: it is the last token

    Several queries with more keys must come with a bias.

    On CPU the fused kernel's backward is slower than that of plain matmuls below about 192 tokens
    (by a third of a training step at 128). Forward only, the fused kernel is always faster, and by
    another third with blocks of queries and a mask instead of `is_causal`.
    """
    length = q.shape[-2]
    num_keys = k.shape[-2]
    is_causal = bias is None and length == num_keys
    grouped = q.shape[1] != k.shape[1]

    trains = torch.is_grad_enabled()
    if trains and _matmul_is_faster(q.device, length, grouped):
        if bias is None:
            bias = causal_bias(num_keys, q.device, length).to(q.dtype)
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
    """Return causal attention, computed for `size` queries at a time. Each block attends only to
    the keys up to its own end, so about half of the scores are never computed:

        queries 0 … 63      keys 0 … 63
        queries 64 … 127    keys 0 … 127
    """
    length = q.shape[-2]
    lowest = torch.finfo(torch.float).min
    # The bias of the last `size` queries. The bias of any other block is its lower right corner.
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
    """Return attention by two batched matrix products. All rows and heads are one dimension, as
    PyTorch's fastest batched product takes three dimensions."""
    bias = bias.expand(*q.shape[:3], k.shape[2]).flatten(0, 1)
    keys = k.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(bias, q.flatten(0, 1), keys, alpha=q.shape[-1] ** -0.5)
    weights = F.dropout(scores.softmax(-1), dropout_p)
    return torch.bmm(weights, v.flatten(0, 1)).view_as(q)


def causal_bias(num_keys: int, device: torch.device, num_queries: int | None = None) -> Tensor:
    """Return bias_11LS of causal attention: 0 for visible keys, the lowest number of fp32 for later
    ones. The queries are the last `num_queries` of the `num_keys` tokens, by default all of them:

        causal_bias(3, device, 2)      0    0  low
                                       0    0    0
    """
    if num_queries is None:
        num_queries = num_keys
    lowest = torch.finfo(torch.float).min
    bias_LS = torch.full((num_queries, num_keys), lowest, dtype=torch.float, device=device)
    return bias_LS.triu_(diagonal=1 + num_keys - num_queries)[None, None]


# --- kernels of a GPU, memory of a backward pass --------------------------------------------------


# Not cuDNN's, which plans for tens of milliseconds for each of the hundreds of shapes.
_GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_choosing = threading.RLock()


@contextmanager
def fast_kernels(device: torch.device, differentiate_bias: bool = False) -> Iterator[None]:
    """Let PyTorch choose the fastest attention kernels of a GPU inside the block. This is a setting
    of the whole process, so one thread at a time changes it, and restores it afterwards.

    Args:
        device: Where attention is computed. On a CPU nothing is set.
        differentiate_bias: Whether the bias needs a gradient, so that only the plain kernel (MATH)
            is right: cuDNN's does not differentiate a bias, and the memory-efficient one reads
            memory that it never wrote if only the bias needs a gradient. MATH then computes in the
            dtype of the queries, as in fp32 it would not use tensor cores.
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
"""The number of bytes that a backward pass of an evaluation may keep. If it would keep more, layers
are computed again in it."""


def keeps_much(
    num_tokens: int, num_keys: int, width: int, num_heads: int, num_layers: int, itemsize: int
) -> bool:
    """Return whether a backward pass would keep more activations than `MAX_ACTIVATIONS_B`.

    Args:
        num_keys: How many keys each token attends to, if attention scores are kept, else 0.
        itemsize: Bytes of a number.
    """
    # For each token and layer, as measured: vectors of the model's width, and scores of each head.
    numbers_kept = 20 * width + 3 * num_heads * num_keys
    return num_tokens * numbers_kept * num_layers * itemsize > MAX_ACTIVATIONS_B
