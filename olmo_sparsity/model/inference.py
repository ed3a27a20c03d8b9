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

from olmo_sparsity.model.layers import RotaryTables, alibi_bias, causal_bias, rotary_tables, rotate

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
    tables_P = rotary_tables(positions_P, config) if config.rope else None
    projected = _project(first, x_PD, tables_P)
    x_BLD, q, k, v = (part[pair_BL] for part in (x_PD, *projected))
    tables = None if tables_P is None else (tables_P[0][pair_BL], tables_P[1][pair_BL])
    if not middle:
        return model.transformer.ln_f(_mix(first, x_BLD, q, k, v, bias, last))
    x_BLD = _mix(first, x_BLD, q, k, v, bias, x_BLD.shape[1])
    for block in middle[:-1]:
        x_BLD = _mix(block, x_BLD, *_project(block, x_BLD, tables), bias, x_BLD.shape[1])
    q, k, v = _project(middle[-1], x_BLD, tables, last)
    return model.transformer.ln_f(_mix(middle[-1], x_BLD, q, k, v, bias, last))


def _different_pairs(tokens_BL: Tensor, positions_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tokens_P, positions_P and the index into them of each place."""
    num_positions = int(positions_BL.max()) + 1
    pairs_P, index_BL = torch.unique(tokens_BL * num_positions + positions_BL, return_inverse=True)
    return pairs_P // num_positions, pairs_P % num_positions, index_BL


def _project(
    block: PositionedBlock, x: Tensor, tables: RotaryTables | None, last: int | None = None
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
    if x.device.type == "cpu":
        q, k, v = q.float(), k.float(), v.float()
    if tables is not None:
        if not config.rope_full_precision:
            tables = tables[0].type_as(x), tables[1].type_as(x)
        cos, sin = (table[..., None, :] for table in tables)
        num_queries = q.shape[-3]
        q = rotate(q, cos[..., -num_queries:, :, :], sin[..., -num_queries:, :, :])
        k = rotate(k, cos, sin)
    return q, k, v


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
