"""Fast inference with OLMo for many short rows, computing hidden states at the last places only,
with the same result as the plain forward pass.

- The first layer's queries, keys and values depend only on token and position ID: on CPU, pairs
  that occur more than once in a batch are projected once. If rows differ only in their first token
  (one distant token before a window), the window's attention to itself is computed once for all.
- In the last layer only the wanted places need queries, attention output and feed-forward; the
  other places give keys and values.
- Distant tokens that keep their states of the full text (`distant_states`) are keys and values
  computed once. Rows that see most of them share them.
- On CPU sums are taken in place, and attention runs in fp32, as it is not faster in bf16.

Dimension key: B rows, L tokens of a row, W wanted places, D width, H heads, K width of a head, P
distinct (token, position ID) pairs."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from olmo.model import LayerNormBase, OLMo, SwiGLU
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.models.attention import (
    attend_to_distant,
    can_share_distant,
    causal_bias,
    keeps_much,
)
from olmo_sparsity.models.block import PositionedBlock
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.layers import RMSNorm, alibi_bias, count_keys, rms_norm
from olmo_sparsity.models.rope import rotary_tables, rotated_width

Projected = tuple[Tensor, Tensor, Tensor]
"""q_BLHK, k_BLHK and v_BLHK of one layer, rotated."""

DistantLayer = tuple[Tensor, Tensor, Tensor | None, bool]
"""Keys, values and bias_BF of distant places in one layer, and whether rows share them uncopied."""


class InferringOLMo(OLMo):
    """What fast inference needs of a model, and its ways to compute hidden states."""

    config: ModelConfig  # type: ignore[assignment] # OLMo: its own class, with the same fields
    transformer: Any  # a ModuleDict; its entries depend on the config
    reach: int | None = None

    @property
    def blocks(self) -> list[PositionedBlock]:
        return list(self.transformer.blocks)

    @property
    def embedding(self) -> nn.Embedding:
        return self.transformer.wte

    def recomputes(self, num_tokens: int, num_keys: int = 0) -> bool:
        config, itemsize = self.config, self.embedding.weight.element_size()
        shape = (config.d_model, config.n_heads, config.n_layers)
        checkpointing = self.activation_checkpointing_strategy is not None
        return checkpointing or (
            not self.training and keeps_much(num_tokens, num_keys, *shape, itemsize)
        )

    def shares_distant(self, num_distant: int, length: int) -> bool:
        """Whether attention to distant places is computed apart from that to the row's own. ALiBi
        and scaled queries depend on both."""
        config, weight = self.config, self.embedding.weight
        head_width = config.effective_head_width
        return (
            not config.alibi
            and not config.scales_queries
            and self.blocks[0].attention_record is None
            and can_share_distant(weight.device, weight.dtype, head_width, num_distant, length)
        )

    def last_hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        bias: Tensor | None,
        last: int,
        distant: DistantStates | None = None,
    ) -> Tensor:
        """hidden_BWD of the last W places, after the last norm. All attend to all of `distant`."""
        config, length = self.config, tokens_BL.shape[1]
        positions_BL = positions_BL.expand_as(tokens_BL)
        earlier: list[DistantLayer | None] = [None] * config.n_layers
        if distant is not None:
            assert bias is None
            shares = self.shares_distant(distant.num_places, length)
            bias = None if shares else distant.window_bias(length)
            earlier = [(k, v, distant.bias_BF, shares) for k, v in distant.layers]
        if config.alibi:
            keys_at = (
                positions_BL
                if distant is None
                else torch.cat((distant.positions_BF, positions_BL), 1)
            )
            alibi = alibi_bias(keys_at, config, num_queries=length)
            bias = alibi if bias is None else alibi + bias
        num_keys = length + (0 if distant is None else distant.num_places)
        recomputes = torch.is_grad_enabled() and self.recomputes(tokens_BL.numel(), num_keys)
        layers = list(zip(self.blocks, earlier, strict=True))
        if tokens_BL.device.type == "cpu" and not recomputes:
            given = (tokens_BL, positions_BL, bias, length if layers[1:] else last, earlier[0])
            x_BLD, turns = _first_layer(self, *given)
            del layers[0]
        else:  # to count different pairs, the host would wait for the GPU
            x_BLD, turns = _embed(self, tokens_BL), None
            if config.rope:
                turns = _turns(positions_BL, config, x_BLD.dtype)
        for block, past in layers:
            inputs = (block, x_BLD, turns, bias, last if block is self.blocks[-1] else length, past)
            x_BLD = (
                checkpoint(_layer, *inputs, use_reentrant=False) if recomputes else _layer(*inputs)
            )
        return self.transformer.ln_f(x_BLD)

    @torch.no_grad()
    def distant_states(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        at_once: int | None = None,
        before: DistantStates | None = None,
    ) -> DistantStates:
        """Keys, values and last states of all places, each seeing those before it."""
        config, (num_rows, length) = self.config, tokens_BL.shape
        positions_BL, first = positions_BL.expand_as(tokens_BL), 0
        if before is not None:
            first = before.num_places
            positions_BL = torch.cat([before.positions_BF, positions_BL], 1)
        layers: list[tuple[Tensor, Tensor]] = []
        hidden: list[Tensor] = []
        for start in range(first, first + length, at_once or length):
            end = min(start + (at_once or length), first + length)
            x_BLD = _embed(self, tokens_BL[:, start - first : end - first])
            turns = _turns(positions_BL[:, start:end], config, x_BLD.dtype) if config.rope else None
            bias = None
            if config.alibi:
                bias = alibi_bias(positions_BL[:, :end], config, num_queries=end - start)
            shares = start > 0 and self.shares_distant(start, end - start)
            for index, block in enumerate(self.blocks):
                q, k, v = _project(block, x_BLD, turns)
                if start == first:
                    every = [
                        own.new_empty(num_rows, first + length, *own.shape[2:]) for own in (k, v)
                    ]
                    for own, earlier in zip(
                        every, before.layers[index] if before else (), strict=False
                    ):
                        own[:, :first] = earlier
                    layers.append((every[0], every[1]))
                past_k, past_v = layers[index]
                past = (past_k[:, :start], past_v[:, :start], None, shares) if start else None
                x_BLD = _finish(block, x_BLD, _attend(block, q, k, v, bias, end - start, past))
                past_k[:, start:end], past_v[:, start:end] = k, v
            hidden.append(self.transformer.ln_f(x_BLD))
        return DistantStates(positions_BL, layers).predicting(torch.cat(hidden, 1), before)


def _layer(
    block: PositionedBlock,
    x: Tensor,
    turns: Tensor | None,
    bias: Tensor | None,
    last: int,
    past: DistantLayer | None,
) -> Tensor:
    return _finish(block, x, _attend(block, *_project(block, x, turns, last), bias, last, past))


def _first_layer(
    model: InferringOLMo,
    tokens_BL: Tensor,
    positions_BL: Tensor,
    bias: Tensor | None,
    last: int,
    past: DistantLayer | None,
) -> tuple[Tensor, Tensor | None]:
    """Its output at the last places, and the turns of all places, which all layers use."""
    first, config = model.blocks[0], model.config
    tokens_P, positions_P, pair_BL = _different_pairs(tokens_BL, positions_BL)
    x_PD = _embed(model, tokens_P)
    turns_P = _turns(positions_P, config, x_PD.dtype) if config.rope else None
    mixed = _attend_to_pairs(first, _project(first, x_PD, turns_P), pair_BL, bias, last, past)
    turns = None if turns_P is None else _gather(turns_P, pair_BL)
    return _finish(first, _gather(x_PD, pair_BL), mixed), turns


def _embed(model: InferringOLMo, tokens: Tensor) -> Tensor:
    x = model.transformer.wte(tokens)
    return model.transformer.emb_norm(x) if model.config.embedding_layer_norm else x


def _different_pairs(tokens_BL: Tensor, positions_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tokens_P, positions_P, and the index of each place's pair."""
    num_positions = int(positions_BL.max()) + 1
    pairs_P, index_BL = torch.unique(tokens_BL * num_positions + positions_BL, return_inverse=True)
    return pairs_P // num_positions, pairs_P % num_positions, index_BL


def _gather(part_P: Tensor, pair_BL: Tensor) -> Tensor:
    """part_P[pair_BL], but six times as fast on CPU."""
    return part_P.index_select(0, pair_BL.flatten()).unflatten(0, pair_BL.shape)


def _turns(positions_P: Tensor, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """cos + i·sin of each place's angles, one per pair of coordinates."""
    cos_PR, sin_PR = rotary_tables(positions_P, config)
    if not config.rope_full_precision:
        cos_PR, sin_PR = cos_PR.to(dtype).float(), sin_PR.to(dtype).float()
    return torch.complex(cos_PR, sin_PR)[..., None, :]


def _project(
    block: PositionedBlock, x: Tensor, turns: Tensor | None, last: int | None = None
) -> Projected:
    """Queries of the last places only; keys and values of all."""
    h = _before_attention(block, x)
    if last is None or last == h.shape[-2]:
        q, k, v = _linear(block, h, "qkv")
    else:
        (q,), (k, v) = _linear(block, h[:, -last:], "q"), _linear(block, h, "kv")
    return *_queries_and_keys(block, q, k, turns), _heads(block, v)


def _before_attention(block: PositionedBlock, x: Tensor) -> Tensor:
    return x if block.config.norm_after else block.attn_norm(x)


def _linear(block: PositionedBlock, h: Tensor, wanted: str) -> tuple[Tensor, ...]:
    """The `wanted` ones of queries, keys and values, without the rest of their common matrix."""
    limit, weight, bias = block.config.clip_qkv, block.att_proj.weight, block.att_proj.bias
    parts = dict(zip("qkv", _order(block), strict=True))
    rows = torch.cat([parts[name] for name in wanted])
    bias_of_rows = None if bias is None else bias.index_select(0, rows)
    projected = F.linear(h, weight.index_select(0, rows), bias_of_rows)
    projected = projected if limit is None else projected.clamp(-limit, limit)
    return projected.split([len(parts[name]) for name in wanted], dim=-1)


def _order(block: PositionedBlock) -> tuple[Tensor, ...]:
    """Rows of queries, keys and values in their common matrix, in the order used here: the two
    coordinates of a rotated pair side by side. Products of queries and keys do not change."""
    config = block.config
    rotated = rotated_width(config) if config.rope else 0
    head_width = config.effective_head_width
    return _side_by_side(block.fused_dims, head_width, rotated, block.att_proj.weight.device)


@functools.cache
def _side_by_side(
    widths: tuple[int, ...], head_width: int, rotated: int, device: torch.device
) -> tuple[Tensor, ...]:
    rows = torch.arange(sum(widths), device=device).unflatten(0, (-1, head_width))
    paired = rows.clone()
    paired[:, :rotated] = rows[:, :rotated].unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    q, k, _ = paired.flatten().split(widths)
    return q, k, rows.flatten()[-widths[-1] :]


def _queries_and_keys(
    block: PositionedBlock, q: Tensor, k: Tensor, turns: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Split into heads, normed and rotated; queries may be of the last places only."""
    if block.q_norm is not None and block.k_norm is not None:
        order, *_ = _order(block)
        q, k = _norm(block.q_norm, q, order), _norm(block.k_norm, k, order[: k.shape[-1]])
    if turns is None or not block.rotates:
        return _heads(block, q), _heads(block, k)
    return _heads(block, q, turns[..., -q.shape[-2] :, :, :]), _heads(block, k, turns)


def _norm(norm: LayerNormBase, x: Tensor, order: Tensor) -> Tensor:
    """Upstream's norm, for coordinates in another order; of all heads, or of each."""
    (size,) = norm.normalized_shape
    if size < x.shape[-1]:
        return _norm(norm, x.unflatten(-1, (-1, size)), order[:size]).flatten(-2)
    reordered = {name: p.index_select(0, order) for name, p in norm.named_parameters()}
    if type(norm) is RMSNorm and reordered.keys() == {"weight"}:  # the same in half the time
        return rms_norm(x, reordered["weight"], norm.eps)
    return torch.func.functional_call(norm, reordered, (x,))


def _heads(block: PositionedBlock, x: Tensor, turns: Tensor | None = None) -> Tensor:
    """(…, H·K) → (…, H, K), rotated, in the dtype of attention. Changes x."""
    dtype = torch.float if x.device.type == "cpu" else x.dtype
    x = x.unflatten(-1, (-1, block.config.effective_head_width))
    return (x if turns is None else _turn(x, turns)).to(dtype)


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate in fp32; in place without gradients, if x is in fp32 and rotated completely."""
    rotated, kept = x.float().split((2 * turns.shape[-1], x.shape[-1] - 2 * turns.shape[-1]), -1)
    if kept.numel():
        rotated = rotated.contiguous()
    pairs = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)))
    if x.requires_grad:
        rotated = torch.view_as_real(pairs * turns).flatten(-2)
    else:
        pairs.mul_(turns)
    return torch.cat((rotated, kept), dim=-1) if kept.numel() else rotated


# --- attention: queries, keys, values → mixed_BLHK, before the output projection ------------------


def _attend(
    block: PositionedBlock,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    last: int,
    past: DistantLayer | None = None,
) -> Tensor:
    """Attention from the last places to all places, and to past places."""
    if past is not None:
        distant_k, distant_v, distant_bias_BF, shares = past
        if shares:
            own = (q[:, -last:].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            distant = (distant_k.transpose(1, 2), distant_v.transpose(1, 2), distant_bias_BF)
            return attend_to_distant(*own, *distant).transpose(1, 2)
        k, v = torch.cat((distant_k, k), dim=1), torch.cat((distant_v, v), dim=1)
    q, k, v = (part.transpose(1, 2) for part in (q[:, -last:], k, v))
    if bias is None and 1 < last < k.shape[2]:
        bias = causal_bias(k.shape[2], q.device, last)
    if bias is not None:
        bias = block._cast_attn_bias(bias[:, :, -last:], q.dtype)
    return block.mix(q, k, v, bias).transpose(1, 2)


def _attend_to_pairs(
    block: PositionedBlock,
    pairs: Projected,
    pair_BL: Tensor,
    bias: Tensor | None,
    last: int,
    past: DistantLayer | None,
) -> Tensor:
    """The first layer's attention. If rows differ only in their first place, that place is one more
    key next to a softmax over the others, which is the same for all rows."""
    q_PHK, k_PHK, v_PHK = pairs
    distant_B, window_L = pair_BL[:, 0], pair_BL[0, 1:]
    alike = len(distant_B) > 1 and (pair_BL[:, 1:] == window_L).all()
    if bias is not None or past is not None or not alike:
        q, k, v = (_gather(part, pair_BL) for part in pairs)
        return _attend(block, q, k, v, bias, last, past)
    q_LHK = q_PHK[window_L] * q_PHK.shape[-1] ** -0.5
    if block.config.scales_queries:
        counts_1L = count_keys(len(window_L), pair_BL.shape[1], q_LHK.device)
        factors_LH = block.query_factors(counts_1L)[0].T
        q_LHK *= factors_LH[..., None].to(q_LHK.dtype)
    k_PHK, v_PHK = _for_each_query(k_PHK, q_LHK), _for_each_query(v_PHK, q_LHK)
    scores_HLL = torch.einsum("lhk,mhk->hlm", q_LHK, k_PHK[window_L]).float()
    scores_HLL += causal_bias(len(window_L), scores_HLL.device)[0]
    weights_HLL = scores_HLL.softmax(-1).to(v_PHK.dtype)
    local_LHK = torch.einsum("hlm,mhk->lhk", weights_HLL, v_PHK[window_L])
    scores_BLH = torch.einsum("lhk,bhk->blh", q_LHK, k_PHK[distant_B]).float()
    share_BLH = (scores_BLH - scores_HLL.logsumexp(-1).T).sigmoid().to(v_PHK.dtype)
    mixed_BLHK = local_LHK.new_empty(*pair_BL.shape, *local_LHK.shape[1:])
    mixed_BLHK[:, 0] = v_PHK[distant_B]
    torch.lerp(local_LHK, v_PHK[distant_B, None], share_BLH[..., None], out=mixed_BLHK[:, 1:])
    return mixed_BLHK[:, -last:]


def _for_each_query(x: Tensor, q: Tensor) -> Tensor:
    """(…, G, K) → (…, H, K): keys or values of grouped heads, once for each head of the queries."""
    return x.repeat_interleave(q.shape[-2] // x.shape[-2], dim=-2)


def _finish(block: PositionedBlock, x: Tensor, mixed: Tensor) -> Tensor:
    """The block's output at the last places, from their attention."""
    mixed = block.attn_out(mixed.flatten(2).to(x.dtype))
    if block.config.norm_after:
        mixed = block.attn_norm(mixed)
    x = mixed.add_(x[:, -mixed.shape[1] :])
    h = block.ff_proj(x if block.config.norm_after else block.ff_norm(x))
    if type(block.act) is SwiGLU:
        up, gate = h.chunk(2, dim=-1)
        h = F.silu(gate) * up if h.requires_grad else F.silu(gate, inplace=True).mul_(up)
    else:
        h = block.act(h)
    h = block.ff_out(h)
    if block.config.norm_after:
        h = block.ff_norm(h)
    return h.add_(x)
