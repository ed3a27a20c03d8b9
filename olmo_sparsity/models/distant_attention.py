"""Attend to distant tokens whose keys and values many rows share, without a copy for each row.

Two rows that see the same 1,000 distant tokens, and two local ones each:

    row 0    d d d … d d  a b        d: keys and values are stored once, as a view for each row
    row 1    d d d … d d  x y        a, b, x, y: the rows' own

`attend_to_distant` computes attention to the shared states and to a row's own tokens separately,
and joins the two. `can_share_distant` says where that is possible and worth it: it tries the
kernels of the hardware once. Both kinds of models call them (olmo/layer_steps.py,
huggingface/own_attention.py).

Dimension key: B rows, L local tokens (those of the row), W queries (the last of these), F distant
tokens, S = F + L all keys, H heads of queries, G heads of keys and values, K width of a head. A
prefix 1 is a dimension of size 1.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from olmo_sparsity.base.errors import is_out_of_memory
from olmo_sparsity.models.attention import CPU_KERNEL, causal_bias


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
    """Return attention of W queries to distant and to local tokens, (B, H, W, K), with one softmax
    over both. It has no gradients.

    Let a_d and a_l be the attention to distant tokens alone and to local ones alone, and z_d and
    z_l the log-sum-exp of their scores. Then the result is

        (1 − f) · a_l + f · a_d,   f = sigmoid(z_d − z_l).

    So distant keys and values that rows share (as views) are not copied for each of them.

    Args:
        q: Queries, (B, H, W, K).
        k, v: Keys and values of local tokens, (B, G, L, K).
        distant_k, distant_v: Keys and values of distant tokens, (B, G, F, K).
        distant_bias: Added to the scores of distant tokens, (B, F), or (B, W, F) where queries
            differ. None means that all are visible.
        scale: The factor of scores. None means K ** −0.5.
        local_bias: Added to the scores of local tokens, (B, 1, W, L). None means causal attention.
    """
    _check_sizes(q, k, v, distant_k, distant_v, distant_bias)
    num_distant = distant_k.shape[2]
    num_queries = q.shape[2]
    num_key_heads, num_local = k.shape[1:3]
    if local_bias is None:
        local_bias = causal_bias(num_local, q.device, num_queries)

    # Query heads that read the same keys become more queries of one head: (B, G, H / G · W, K). So
    # keys and values are not copied for each query head, and a bias over queries is repeated for
    # each head of a group instead.
    group_size = q.shape[1] // num_key_heads
    grouped = q.unflatten(1, (num_key_heads, group_size)).flatten(2, 3)
    local_bias = local_bias.repeat(1, 1, group_size, 1)
    local, local_log_sum = _attend_with_log_sum(grouped, k, v, local_bias, scale)
    if num_distant == 0:
        return local.unflatten(2, (-1, num_queries)).flatten(1, 2)

    grouped_bias = None
    if distant_bias is not None and distant_bias.dim() == 3:
        grouped_bias = distant_bias[:, None].repeat(1, 1, group_size, 1)
    elif distant_bias is not None:
        grouped_bias = distant_bias[:, None, None]
    distant, distant_log_sum = _attend_with_log_sum(
        grouped, distant_k, distant_v, grouped_bias, scale
    )

    # The fraction f of attention to distant tokens. It is in fp32, as the kernels' sums are.
    fraction = (distant_log_sum - local_log_sum).sigmoid()[..., None]
    mixed = torch.lerp(local.to(fraction), distant.to(fraction), fraction)
    return mixed.to(local.dtype).unflatten(2, (-1, num_queries)).flatten(1, 2)


def _check_sizes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distant_k: Tensor,
    distant_v: Tensor,
    distant_bias: Tensor | None,
) -> None:
    """Fail if rows or distant tokens differ in number. The kernels themselves check few sizes, and
    read beyond the end of a tensor that is too short."""
    num_rows = len(q)
    assert num_rows == len(k) == len(v) == len(distant_k) == len(distant_v)
    if distant_bias is not None:
        assert distant_bias.shape[0] == num_rows
        assert distant_bias.shape[-1] == distant_k.shape[2]


class _AttentionWithLogSum(NamedTuple):
    """Attention, and what is needed to join it with attention to other keys."""

    mixed: Tensor
    """In the shape of the queries."""

    log_sum: Tensor
    """The log-sum-exp of each query's scores: the same without the last dimension."""


def _attend_with_log_sum(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None
) -> _AttentionWithLogSum:
    """Return attention without a causal mask, with its log-sum-exp. `bias` alone hides keys."""
    if bias is not None:
        num_keys = bias.shape[-1]
        # Hidden keys have the lowest number. The kernel of CUDA multiplies scores by log2(e), which
        # would make it -inf, and a query that sees nothing but -inf gets NaN, which no weight of 0
        # takes out again. So it is halved.
        bias = bias.to(q).clamp(min=torch.finfo(q.dtype).min / 2)
        # The kernel of CUDA requires that rows of a bias begin at multiples of 16 bytes.
        aligned = functional.pad(bias, (0, -num_keys % 16))
        bias = aligned.narrow(-1, 0, num_keys).expand(len(q), q.shape[1], q.shape[2], -1)
    if q.device.type == "cpu":
        return _AttentionWithLogSum(*CPU_KERNEL(q, k, v, attn_mask=bias, scale=scale))
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    mixed, padded_log_sum, _, _ = kernel(q, k, v, bias, compute_log_sumexp=True, scale=scale)
    return _AttentionWithLogSum(mixed, padded_log_sum.narrow(-1, 0, q.shape[2]))


def can_share_distant(
    device: torch.device, dtype: torch.dtype, head_width: int, num_distant: int, length: int
) -> bool:
    """Return whether `attend_to_distant` is right for a model with weights of this dtype, and worth
    it. With fewer distant tokens than local ones, copying their states costs less."""
    return (
        num_distant > length
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(device.type)
        and _computes_right_numbers(device, dtype, head_width)
    )


@functools.cache
def _computes_right_numbers(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Return whether `attend_to_distant` computes right numbers on this device. It is tried,
    because the hardware decides which kernels exist, and for which dtypes and widths."""
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
    """Return the largest difference between `attend_to_distant` and plain attention to all tokens,
    divided by the difference that rounding may cause: up to 1 is right. A kernel that does not take
    these sizes raises RuntimeError."""
    # Sizes of several blocks of any kernel, and no multiples of a block. All local tokens are
    # queries: W is L.
    num_queries = 40
    num_distant = 300
    num_key_heads = 2
    group_size = 2
    generator = torch.Generator().manual_seed(0)
    shape = (2, 1, num_distant + num_queries, num_key_heads, head_width)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float)
    k_1GSK, v_1GSK = numbers.to(dtype).transpose(2, 3)
    q_1HWK = v_1GSK[:, :, -num_queries:].repeat_interleave(group_size, dim=1)

    # Four rows: they see all distant tokens, the second half, the first half, and none.
    lowest = torch.finfo(torch.float).min
    bias_BF = torch.zeros(4, num_distant, dtype=torch.float)
    bias_BF[1, : num_distant // 2] = lowest
    bias_BF[2, num_distant // 2 :] = lowest
    bias_BF[3] = lowest

    # The expected result: one softmax over all tokens, in double precision, by plain products.
    distant_bias = bias_BF[:, None, None].expand(-1, -1, num_queries, -1)
    local_bias = causal_bias(num_queries, bias_BF.device).expand(4, -1, -1, -1)
    k_1HSK = k_1GSK.double().repeat_interleave(group_size, dim=1)
    v_1HSK = v_1GSK.double().repeat_interleave(group_size, dim=1)
    scores_1HWS = q_1HWK.double() @ k_1HSK.mT * head_width**-0.5
    scores_BHWS = scores_1HWS + torch.cat((distant_bias, local_bias), dim=-1)
    expected = scores_BHWS.softmax(-1) @ v_1HSK

    # Rows share keys and values as views, as they do in use.
    q, k, v = (part.to(device).expand(4, -1, -1, -1) for part in (q_1HWK, k_1GSK, v_1GSK))
    distant = (k[:, :, :num_distant], v[:, :, :num_distant])
    local = (k[:, :, num_distant:], v[:, :, num_distant:])
    with torch.no_grad():
        computed = attend_to_distant(q, *local, *distant, bias_BF.to(device)).cpu().double()
    allowed = 4 * max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float).eps)
    return float((computed - expected).abs().max()) / allowed
