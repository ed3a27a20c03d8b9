"""OLMo's hidden states at the last places only, without gradients: the same function, less work.

Place in the flow: model → **the states that predict a target** → losses. Called by
`PositionedOLMo.hidden(last=…)`; questions about far tokens put thousands of short rows through it.

- The first layer's queries, keys and values depend on a token and its position ID alone: pairs that
  occur more than once in a batch (rows that differ in one far token) are projected once.
- In the last layer only the wanted places need queries, attention output and feed-forward; the rest
  of the row is keys and values.
- On CPU sums are taken in place, and attention runs in fp32 whatever the weights are in: neither
  rotation nor the fused kernel is any faster there in bf16.

Dimension key: B rows, L tokens of a row, W wanted places, D width, H heads, K width of a head, P
different (token, position ID) pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from olmo.model import SwiGLU
from torch import Tensor

from olmo_sparsity.config import ModelConfig
from olmo_sparsity.model.layers import alibi_bias, causal_bias, rotary_tables

if TYPE_CHECKING:
    from olmo_sparsity.model.olmo import PositionedBlock, PositionedOLMo

Projected = tuple[Tensor, Tensor, Tensor]
"""q_BLHK, k_BLHK and v_BLHK of one layer, rotated."""


@torch.no_grad()
def last_hidden(
    model: PositionedOLMo,
    tokens_BL: Tensor,
    positions_BL: Tensor,
    bias: Tensor | None,
    last: int,
) -> Tensor:
    """hidden_BWD of the last W places, after the last norm."""
    config, (first, *middle) = model.config, model.blocks
    positions_BL = positions_BL.expand_as(tokens_BL)
    if config.alibi:
        alibi = alibi_bias(positions_BL, config, num_queries=tokens_BL.shape[1])
        bias = alibi if bias is None else alibi + bias
    tokens_P, positions_P, pair_BL = _different_pairs(tokens_BL, positions_BL)
    x_PD = model.transformer.wte(tokens_P)
    if config.embedding_layer_norm:
        x_PD = model.transformer.emb_norm(x_PD)
    turns_P = _turns(positions_P, config, x_PD.dtype) if config.rope else None
    projected = _project(first, x_PD, turns_P)
    x_BLD, q, k, v = (part[pair_BL] for part in (x_PD, *projected))
    turns = None if turns_P is None else turns_P[pair_BL]
    if not middle:
        return model.transformer.ln_f(_mix(first, x_BLD, q, k, v, bias, last))
    x_BLD = _mix(first, x_BLD, q, k, v, bias, x_BLD.shape[1])
    for block in middle[:-1]:
        x_BLD = _mix(block, x_BLD, *_project(block, x_BLD, turns), bias, x_BLD.shape[1])
    q, k, v = _project(middle[-1], x_BLD, turns, last)
    return model.transformer.ln_f(_mix(middle[-1], x_BLD, q, k, v, bias, last))


def _different_pairs(tokens_BL: Tensor, positions_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tokens_P, positions_P and the index into them of each place."""
    num_positions = int(positions_BL.max()) + 1
    pairs_P, index_BL = torch.unique(tokens_BL * num_positions + positions_BL, return_inverse=True)
    return pairs_P // num_positions, pairs_P % num_positions, index_BL


def _turns(positions_P: Tensor, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """cos + i·sin of each place's angles, one per pair of coordinates."""
    cos_PR, sin_PR = rotary_tables(positions_P, config)
    if not config.rope_full_precision:
        cos_PR, sin_PR = cos_PR.to(dtype).float(), sin_PR.to(dtype).float()
    half = cos_PR.shape[-1] // 2  # the two halves of a table are equal
    return torch.complex(cos_PR[:, :half], sin_PR[:, :half])[:, None]


def _project(
    block: PositionedBlock, x: Tensor, turns: Tensor | None, last: int | None = None
) -> Projected:
    """Queries of the last places only; keys and values of all."""
    config, (query_width, *widths) = block.config, block.fused_dims
    h = x if config.norm_after else block.attn_norm(x)
    weight, bias = block.att_proj.weight, block.att_proj.bias
    if last is None:
        q, k, v = block.att_proj(h).split(block.fused_dims, dim=-1)
    else:
        of_q, of_kv = slice(None, query_width), slice(query_width, None)
        q = F.linear(h[:, -last:], weight[of_q], None if bias is None else bias[of_q])
        k, v = F.linear(h, weight[of_kv], None if bias is None else bias[of_kv]).split(widths, -1)
    if config.clip_qkv is not None:
        q, k, v = (part.clamp(-config.clip_qkv, config.clip_qkv) for part in (q, k, v))
    if block.q_norm is not None and block.k_norm is not None:
        q, k = block.q_norm(q), block.k_norm(k)
    head_width = config.d_model // config.n_heads
    q, k, v = (part.unflatten(-1, (-1, head_width)) for part in (q, k, v))
    if turns is not None:
        q, k = _turn(q, turns[..., -q.shape[-3] :, :, :]), _turn(k, turns)
    dtype = torch.float if x.device.type == "cpu" else x.dtype
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Upstream's rotation, the two coordinates of a pair side by side as one complex number:
    half the time on CPU. Queries and keys are reordered alike, so their products stay."""
    half, x = turns.shape[-1], x.float()
    pairs = x[..., : 2 * half].unflatten(-1, (2, half)).transpose(-1, -2)
    turned = pairs.clone(memory_format=torch.contiguous_format)
    torch.view_as_complex(turned).mul_(turns)
    kept = x[..., 2 * half :]
    return torch.cat((turned.flatten(-2), kept), dim=-1) if kept.numel() else turned.flatten(-2)


def _mix(
    block: PositionedBlock,
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    last: int,
) -> Tensor:
    """The block's output at the last places, from their queries and all keys and values."""
    x, (q, k, v) = x[:, -last:], (part.transpose(1, 2) for part in (q[:, -last:], k, v))
    if bias is None and 1 < last < k.shape[2]:
        bias = causal_bias(k.shape[2], x.device)
    if bias is not None:
        bias = block._cast_attn_bias(bias[:, :, -last:], q.dtype)
    mixed = block._scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None)
    mixed = block.attn_out(mixed.transpose(1, 2).flatten(2).to(x.dtype))
    if block.config.norm_after:
        mixed = block.attn_norm(mixed)
    x = mixed.add_(x)
    h = block.ff_proj(x if block.config.norm_after else block.ff_norm(x))
    if type(block.act) is SwiGLU:
        up, gate = h.chunk(2, dim=-1)
        h = F.silu(gate, inplace=True).mul_(up)
    else:
        h = block.act(h)
    h = block.ff_out(h)
    if block.config.norm_after:
        h = block.ff_norm(h)
    return h.add_(x)
