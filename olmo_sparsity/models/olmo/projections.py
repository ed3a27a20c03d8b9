"""Compute queries, keys and values of a layer in inference, rotated by RoPE.

    x (…, D) → norm → _linear: q, k, v → norms of q and k → _rotate: q, k → `Projections`

It gives the same numbers as `PositionedBlock._project`, in less time, for two reasons:

- Only the queries of the last tokens are computed where no others are needed.
- A rotation is one product of complex numbers. Upstream's matrix has the two coordinates of a
  rotated pair far apart, so its rows are reordered. For a head of six coordinates, all rotated:

      upstream   0 1 2 | 3 4 5      pairs are (0, 3), (1, 4), (2, 5)
      here       0 3 1 4 2 5        each pair is one complex number

Inputs may be tokens of rows, (B, L, D), or different pairs of token and position ID, (P, D): see
first_layer.py.

Dimension key: B rows, L tokens of a row, P pairs of token and position ID, D width, H heads,
G heads of keys and values, K width of a head, R pairs of rotated coordinates.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from olmo.model import LayerNormBase
from torch import Tensor

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.olmo.block import PositionedBlock
from olmo_sparsity.models.olmo.layers import RMSNorm, rms_norm
from olmo_sparsity.models.rope import rotary_tables, rotated_width


class Projections(NamedTuple):
    """Queries, keys and values of one layer, split into heads. Queries and keys are rotated."""

    q_BLHK: Tensor
    k_BLGK: Tensor
    v_BLGK: Tensor


def rotations_of(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Return cos + i·sin of the angles of each position ID, (…, 1, R): all heads have the same.
    Multiplied by one of these, a pair of coordinates is rotated, as a complex number."""
    cos_PR, sin_PR = rotary_tables(positions, config)
    if not config.rope_full_precision:
        # The block of training rotates in the dtype of its inputs, so its tables are rounded.
        cos_PR = cos_PR.to(dtype).float()
        sin_PR = sin_PR.to(dtype).float()
    return torch.complex(cos_PR, sin_PR)[..., None, :]


def project(
    block: PositionedBlock, x: Tensor, rotations: Tensor | None, num_queries: int
) -> Projections:
    """Return queries of the last `num_queries` tokens, and keys and values of all tokens.

    Args:
        x: The input of the layer, before its norm.
        rotations: Those of all tokens (`rotations_of`); None without RoPE.
    """
    h = x if block.config.norm_after else block.attn_norm(x)
    rows = _rows_of_fused_matrix(block)
    if num_queries == h.shape[-2]:
        q, k, v = _linear(block, h, rows.q, rows.k, rows.v)
    else:
        (q,) = _linear(block, h[:, -num_queries:], rows.q)
        k, v = _linear(block, h, rows.k, rows.v)
    q, k = _norm_and_rotate(block, q, k, rotations)
    return Projections(q, k, _split_into_heads(block, v))


def _linear(block: PositionedBlock, h: Tensor, *row_groups: Tensor) -> tuple[Tensor, ...]:
    """Return a projection for each group of rows of the layer's fused matrix.

    Upstream has one matrix for queries, keys and values, of which only the needed rows are
    multiplied, all in one product."""
    rows = torch.cat(row_groups)
    weight = block.att_proj.weight.index_select(0, rows)
    bias: Tensor | None = block.att_proj.bias
    if bias is not None:
        bias = bias.index_select(0, rows)

    projected = F.linear(h, weight, bias)
    limit = block.config.clip_qkv
    if limit is not None:
        projected = projected.clamp(-limit, limit)
    return projected.split([len(group) for group in row_groups], dim=-1)


class _FusedRows(NamedTuple):
    """Row indices of a layer's fused matrix, in the order in which this module computes coordinates
    (see the module)."""

    q: Tensor
    k: Tensor
    v: Tensor


def _rows_of_fused_matrix(block: PositionedBlock) -> _FusedRows:
    """Return the row indices of queries, keys and values in the layer's fused matrix. Queries and
    keys are reordered alike, so their products stay the same."""
    config = block.config
    num_rotated = rotated_width(config) if config.rope else 0
    head_width = config.effective_head_width
    return _pairs_side_by_side(
        block.fused_dims, head_width, num_rotated, block.att_proj.weight.device
    )


@functools.cache
def _pairs_side_by_side(
    num_rows: tuple[int, ...], head_width: int, num_rotated: int, device: torch.device
) -> _FusedRows:
    """Return the row indices of queries, keys and values, with rotated pairs side by side.

    Args:
        num_rows: How many rows of the fused matrix are queries, keys and values.
        num_rotated: How many coordinates of a head, from its first on, are rotated.
    """
    rows = torch.arange(sum(num_rows), device=device)
    rows_by_head = rows.unflatten(0, (-1, head_width))
    # In each head (0, 1, …, R − 1, R, R + 1, …) becomes (0, R, 1, R + 1, …).
    pairs = rows_by_head[:, :num_rotated].unflatten(1, (2, -1)).transpose(1, 2)
    reordered = rows_by_head.clone()
    reordered[:, :num_rotated] = pairs.flatten(1)
    q, k, _ = reordered.flatten().split(num_rows)
    *_, v = rows.split(num_rows)  # values are not rotated
    return _FusedRows(q, k, v)


def _norm_and_rotate(
    block: PositionedBlock, q: Tensor, k: Tensor, rotations: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return queries and keys split into heads, normed and rotated where the layer does so. There
    may be fewer queries than keys: those of the last tokens."""
    if block.q_norm is not None and block.k_norm is not None:
        # Row indices of queries count from 0, so they also say where each coordinate came from.
        upstream_order = _rows_of_fused_matrix(block).q
        q = _apply_norm(block.q_norm, q, upstream_order)
        k = _apply_norm(block.k_norm, k, upstream_order[: k.shape[-1]])
    if rotations is None or not block.rotates:
        return _split_into_heads(block, q), _split_into_heads(block, k)
    rotations_of_queries = rotations[..., -q.shape[-2] :, :, :]
    q = _split_into_heads(block, q, rotations_of_queries)
    return q, _split_into_heads(block, k, rotations)


def _apply_norm(norm: LayerNormBase, x: Tensor, upstream_order: Tensor) -> Tensor:
    """Return upstream's norm of reordered coordinates, over all heads or over each.
    `upstream_order`: the index in upstream's order of each coordinate of x. The weights of the norm
    are reordered by it."""
    (size,) = norm.normalized_shape
    if size < x.shape[-1]:  # a norm over each head, with weights that all heads share
        by_head = x.unflatten(-1, (-1, size))
        return _apply_norm(norm, by_head, upstream_order[:size]).flatten(-2)
    weights = {
        name: weight.index_select(0, upstream_order) for name, weight in norm.named_parameters()
    }
    if type(norm) is RMSNorm and weights.keys() == {"weight"}:  # the same in half the time
        return rms_norm(x, weights["weight"], norm.eps)
    return torch.func.functional_call(norm, weights, (x,))


def _split_into_heads(block: PositionedBlock, x: Tensor, rotations: Tensor | None = None) -> Tensor:
    """Return (…, H·K) as (…, H, K), rotated if there are rotations, in the dtype of attention. It
    may change x in place."""
    # On CPU neither the rotation nor the fused attention kernel is faster in bf16.
    dtype = torch.float if x.device.type == "cpu" else x.dtype
    x = x.unflatten(-1, (-1, block.config.effective_head_width))
    if rotations is not None:
        x = _rotate(x, rotations)
    return x.to(dtype)


def _rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Return x with the first 2R coordinates of each head rotated, in fp32. It changes x in place
    if x is in fp32, is rotated as a whole, and needs no gradient."""
    num_rotated = 2 * rotations.shape[-1]
    rotated, unrotated = x.float().split((num_rotated, x.shape[-1] - num_rotated), -1)
    if unrotated.numel():
        rotated = rotated.contiguous()  # as `view_as_complex` requires
    pairs = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)))
    if x.requires_grad:
        rotated = torch.view_as_real(pairs * rotations).flatten(-2)
    else:
        pairs.mul_(rotations)  # `rotated` is a view of the same memory
    return torch.cat((rotated, unrotated), dim=-1) if unrotated.numel() else rotated
