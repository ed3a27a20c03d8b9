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
from typing import Any, NamedTuple

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


class DistantLayer(NamedTuple):
    """The states of distant places in one layer."""

    k_BFHK: Tensor
    v_BFHK: Tensor
    bias_BF: Tensor | None
    is_shared: bool
    """Whether rows attend to them without a copy for each."""


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
        """Return whether layers are computed again in a backward pass, to save memory."""
        if self.activation_checkpointing_strategy is not None:
            return True
        if self.training:  # without the setting, a training keeps its activations
            return False
        config = self.config
        shape = (config.d_model, config.n_heads, config.n_layers)
        itemsize = self.embedding.weight.element_size()
        return keeps_much(num_tokens, num_keys, *shape, itemsize)

    def shares_distant(self, num_distant: int, length: int) -> bool:
        """Return whether attention to distant places is computed apart from that to the row's own.
        ALiBi and scaled queries depend on both."""
        config = self.config
        if config.alibi or config.scales_queries:
            return False
        if self.blocks[0].attention_record is not None:  # it records attention to all places
            return False
        weight = self.embedding.weight
        head_width = config.effective_head_width
        return can_share_distant(weight.device, weight.dtype, head_width, num_distant, length)

    def last_hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        bias: Tensor | None,
        last: int,
        distant: DistantStates | None = None,
    ) -> Tensor:
        """Return hidden_BWD of the last W places, after the last norm. All attend to all of
        `distant`."""
        config = self.config
        length = tokens_BL.shape[1]
        positions_BL = positions_BL.expand_as(tokens_BL)
        num_keys = length
        distant_layers: list[DistantLayer | None] = [None] * config.n_layers
        if distant is not None:
            assert bias is None
            is_shared = self.shares_distant(distant.num_places, length)
            if not is_shared:
                bias = distant.window_bias(length)
            num_keys += distant.num_places
            distant_layers = [
                DistantLayer(k, v, distant.bias_BF, is_shared) for k, v in distant.layers
            ]
        if config.alibi:
            keys_BK = positions_BL
            if distant is not None:
                keys_BK = torch.cat((distant.positions_BF, positions_BL), 1)
            alibi = alibi_bias(keys_BK, config, num_queries=length)
            bias = alibi if bias is None else alibi + bias
        recomputes = torch.is_grad_enabled() and self.recomputes(tokens_BL.numel(), num_keys)
        layers = list(zip(self.blocks, distant_layers, strict=True))
        if tokens_BL.device.type == "cpu" and not recomputes:
            last_of_first = length if len(layers) > 1 else last
            x_BLD, turns = _first_layer(
                self, tokens_BL, positions_BL, bias, last_of_first, distant_layers[0]
            )
            del layers[0]
        else:
            # Not on a GPU: to count different pairs, the host would wait for it.
            x_BLD = _embed(self, tokens_BL)
            turns = _turns(positions_BL, config, x_BLD.dtype) if config.rope else None
        for block, past in layers:
            last_of_block = last if block is self.blocks[-1] else length
            inputs = (block, x_BLD, turns, bias, last_of_block, past)
            if recomputes:
                x_BLD = checkpoint(_layer, *inputs, use_reentrant=False)
            else:
                x_BLD = _layer(*inputs)
        return self.transformer.ln_f(x_BLD)

    @torch.no_grad()
    def distant_states(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        at_once: int | None = None,
        before: DistantStates | None = None,
    ) -> DistantStates:
        """Return keys, values and last states of all places, each seeing those before it."""
        config = self.config
        length = tokens_BL.shape[1]
        positions_BL = positions_BL.expand_as(tokens_BL)
        first = 0
        if before is not None:
            first = before.num_places
            positions_BL = torch.cat([before.positions_BF, positions_BL], 1)
        num_places = first + length
        layers: list[tuple[Tensor, Tensor]] = []
        hidden: list[Tensor] = []
        for start in range(first, num_places, at_once or length):
            end = min(start + (at_once or length), num_places)
            x_BLD = _embed(self, tokens_BL[:, start - first : end - first])
            turns = _turns(positions_BL[:, start:end], config, x_BLD.dtype) if config.rope else None
            bias = None
            if config.alibi:
                bias = alibi_bias(positions_BL[:, :end], config, num_queries=end - start)
            is_shared = start > 0 and self.shares_distant(start, end - start)
            for index, block in enumerate(self.blocks):
                q, k, v = _project(block, x_BLD, turns)
                if start == first:
                    # Room for all places, which each part fills further: to join parts would copy
                    # all states once for each of them.
                    earlier = None if before is None else before.layers[index]
                    layers.append(_room_for_states(k, v, num_places, earlier))
                all_k, all_v = layers[index]
                past = None
                if start > 0:
                    past = DistantLayer(all_k[:, :start], all_v[:, :start], None, is_shared)
                x_BLD = _finish(block, x_BLD, _attend(block, q, k, v, bias, end - start, past))
                all_k[:, start:end] = k
                all_v[:, start:end] = v
            hidden.append(self.transformer.ln_f(x_BLD))
        return DistantStates(positions_BL, layers).predicting(torch.cat(hidden, 1), before)


def _room_for_states(
    k: Tensor, v: Tensor, num_places: int, earlier: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return tensors for the keys and values of all places, with those of earlier places."""
    all_k = k.new_empty(k.shape[0], num_places, *k.shape[2:])
    all_v = v.new_empty(v.shape[0], num_places, *v.shape[2:])
    if earlier is not None:
        earlier_k, earlier_v = earlier
        all_k[:, : earlier_k.shape[1]] = earlier_k
        all_v[:, : earlier_v.shape[1]] = earlier_v
    return all_k, all_v


def _layer(
    block: PositionedBlock,
    x: Tensor,
    turns: Tensor | None,
    bias: Tensor | None,
    last: int,
    past: DistantLayer | None,
) -> Tensor:
    """Return the block's output at the last places."""
    q, k, v = _project(block, x, turns, last)
    mixed = _attend(block, q, k, v, bias, last, past)
    return _finish(block, x, mixed)


def _first_layer(
    model: InferringOLMo,
    tokens_BL: Tensor,
    positions_BL: Tensor,
    bias: Tensor | None,
    last: int,
    past: DistantLayer | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the first layer's output at the last places, and the turns of all places, which all
    layers use. Each different pair of token and position ID is projected once."""
    first = model.blocks[0]
    config = model.config
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
    """Return tokens_P, positions_P, and the index of each place's pair."""
    # One number for each pair, as `unique` is much slower on rows of two.
    num_positions = int(positions_BL.max()) + 1
    pairs_P, index_BL = torch.unique(tokens_BL * num_positions + positions_BL, return_inverse=True)
    return pairs_P // num_positions, pairs_P % num_positions, index_BL


def _gather(part_P: Tensor, pair_BL: Tensor) -> Tensor:
    """Return part_P[pair_BL]; on CPU this is six times as fast."""
    return part_P.index_select(0, pair_BL.flatten()).unflatten(0, pair_BL.shape)


def _turns(positions_P: Tensor, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Return cos + i·sin of each place's angles, one for each pair of coordinates."""
    cos_PR, sin_PR = rotary_tables(positions_P, config)
    if not config.rope_full_precision:  # rounded, as the block rotates in the dtype of its inputs
        cos_PR = cos_PR.to(dtype).float()
        sin_PR = sin_PR.to(dtype).float()
    return torch.complex(cos_PR, sin_PR)[..., None, :]


def _project(
    block: PositionedBlock, x: Tensor, turns: Tensor | None, last: int | None = None
) -> Projected:
    """Return queries of the last places only, and keys and values of all."""
    h = _before_attention(block, x)
    if last is None or last == h.shape[-2]:
        q, k, v = _linear(block, h, "qkv")
    else:
        (q,) = _linear(block, h[:, -last:], "q")
        k, v = _linear(block, h, "kv")
    q, k = _queries_and_keys(block, q, k, turns)
    return q, k, _heads(block, v)


def _before_attention(block: PositionedBlock, x: Tensor) -> Tensor:
    return x if block.config.norm_after else block.attn_norm(x)


def _linear(block: PositionedBlock, h: Tensor, wanted: str) -> tuple[Tensor, ...]:
    """Return some of queries, keys and values, without computing the others. `wanted`: letters out
    of "qkv"."""
    rows_of_part = dict(zip("qkv", _order(block), strict=True))
    rows = torch.cat([rows_of_part[name] for name in wanted])
    weight = block.att_proj.weight.index_select(0, rows)
    bias: Tensor | None = block.att_proj.bias
    if bias is not None:
        bias = bias.index_select(0, rows)
    projected = F.linear(h, weight, bias)
    limit = block.config.clip_qkv
    if limit is not None:
        projected = projected.clamp(-limit, limit)
    return projected.split([len(rows_of_part[name]) for name in wanted], dim=-1)


def _order(block: PositionedBlock) -> tuple[Tensor, ...]:
    """Return the rows of queries, keys and values in their common matrix, in the order used here:
    the two coordinates of a rotated pair side by side, so that they are one complex number.
    Products of queries and keys do not change."""
    config = block.config
    rotated = rotated_width(config) if config.rope else 0
    head_width = config.effective_head_width
    return _side_by_side(block.fused_dims, head_width, rotated, block.att_proj.weight.device)


@functools.cache
def _side_by_side(
    widths: tuple[int, ...], head_width: int, rotated: int, device: torch.device
) -> tuple[Tensor, ...]:
    rows = torch.arange(sum(widths), device=device)
    of_heads = rows.unflatten(0, (-1, head_width))
    paired = of_heads.clone()
    # Coordinates i and i + R make a pair.
    pairs = of_heads[:, :rotated].unflatten(1, (2, -1)).transpose(1, 2)
    paired[:, :rotated] = pairs.flatten(1)
    q, k, _ = paired.flatten().split(widths)
    *_, v = rows.split(widths)  # values are not rotated
    return q, k, v


def _queries_and_keys(
    block: PositionedBlock, q: Tensor, k: Tensor, turns: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return queries and keys split into heads, normed and rotated; queries may be of the last
    places only."""
    if block.q_norm is not None and block.k_norm is not None:
        order, *_ = _order(block)
        q = _norm(block.q_norm, q, order)
        k = _norm(block.k_norm, k, order[: k.shape[-1]])
    if turns is None or not block.rotates:
        return _heads(block, q), _heads(block, k)
    turns_of_queries = turns[..., -q.shape[-2] :, :, :]
    return _heads(block, q, turns_of_queries), _heads(block, k, turns)


def _norm(norm: LayerNormBase, x: Tensor, order: Tensor) -> Tensor:
    """Return upstream's norm of coordinates in another order: over all heads, or over each."""
    (size,) = norm.normalized_shape
    if size < x.shape[-1]:
        return _norm(norm, x.unflatten(-1, (-1, size)), order[:size]).flatten(-2)
    reordered = {name: p.index_select(0, order) for name, p in norm.named_parameters()}
    if type(norm) is RMSNorm and reordered.keys() == {"weight"}:  # the same in half the time
        return rms_norm(x, reordered["weight"], norm.eps)
    return torch.func.functional_call(norm, reordered, (x,))


def _heads(block: PositionedBlock, x: Tensor, turns: Tensor | None = None) -> Tensor:
    """Return (…, H·K) as (…, H, K), rotated, in the dtype of attention. It may change x."""
    dtype = torch.float if x.device.type == "cpu" else x.dtype
    x = x.unflatten(-1, (-1, block.config.effective_head_width))
    if turns is not None:
        x = _turn(x, turns)
    return x.to(dtype)


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate in fp32; in place without gradients, if x is in fp32 and rotated completely."""
    num_rotated = 2 * turns.shape[-1]
    rotated, kept = x.float().split((num_rotated, x.shape[-1] - num_rotated), -1)
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
    """Return attention from the last places to all places of the row, and to past places."""
    if past is not None and past.is_shared:
        mixed = attend_to_distant(
            q[:, -last:].transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            past.k_BFHK.transpose(1, 2),
            past.v_BFHK.transpose(1, 2),
            past.bias_BF,
        )
        return mixed.transpose(1, 2)
    if past is not None:
        k = torch.cat((past.k_BFHK, k), dim=1)
        v = torch.cat((past.v_BFHK, v), dim=1)
    q = q[:, -last:].transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    # Kernels align a causal mask with the first key if there are fewer queries than keys. A single
    # query needs no mask.
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
    """Return the first layer's attention. If rows differ only in their first place, that place is
    one more key next to a softmax over the others, which is the same for all rows."""
    q_PHK, k_PHK, v_PHK = pairs
    distant_B = pair_BL[:, 0]
    window_L = pair_BL[0, 1:]
    rows_are_alike = len(distant_B) > 1 and (pair_BL[:, 1:] == window_L).all()
    if bias is not None or past is not None or not rows_are_alike:
        q, k, v = (_gather(part, pair_BL) for part in pairs)
        return _attend(block, q, k, v, bias, last, past)
    q_LHK = q_PHK[window_L] * q_PHK.shape[-1] ** -0.5
    if block.config.scales_queries:
        counts_1L = count_keys(len(window_L), pair_BL.shape[1], q_LHK.device)
        factors_LH = block.query_factors(counts_1L)[0].T
        q_LHK *= factors_LH[..., None].to(q_LHK.dtype)
    k_PHK = _for_each_query(k_PHK, q_LHK)
    v_PHK = _for_each_query(v_PHK, q_LHK)
    # Attention within the window, once for all rows.
    scores_HLL = torch.einsum("lhk,mhk->hlm", q_LHK, k_PHK[window_L]).float()
    scores_HLL += causal_bias(len(window_L), scores_HLL.device)[0]
    weights_HLL = scores_HLL.softmax(-1).to(v_PHK.dtype)
    local_LHK = torch.einsum("hlm,mhk->lhk", weights_HLL, v_PHK[window_L])
    # The share of the first place in a softmax over it and the window.
    scores_BLH = torch.einsum("lhk,bhk->blh", q_LHK, k_PHK[distant_B]).float()
    share_BLH = (scores_BLH - scores_HLL.logsumexp(-1).T).sigmoid().to(v_PHK.dtype)
    mixed_BLHK = local_LHK.new_empty(*pair_BL.shape, *local_LHK.shape[1:])
    mixed_BLHK[:, 0] = v_PHK[distant_B]  # which sees itself alone
    torch.lerp(local_LHK, v_PHK[distant_B, None], share_BLH[..., None], out=mixed_BLHK[:, 1:])
    return mixed_BLHK[:, -last:]


def _for_each_query(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values of grouped heads, (…, G, K), once for each head of the queries."""
    return x.repeat_interleave(q.shape[-2] // x.shape[-2], dim=-2)


def _finish(block: PositionedBlock, x: Tensor, mixed: Tensor) -> Tensor:
    """Return the block's output at the last places, from their attention."""
    mixed = block.attn_out(mixed.flatten(2).to(x.dtype))
    if block.config.norm_after:
        mixed = block.attn_norm(mixed)
    x = mixed.add_(x[:, -mixed.shape[1] :])
    h = block.ff_proj(x if block.config.norm_after else block.ff_norm(x))
    if type(block.act) is SwiGLU:
        up, gate = h.chunk(2, dim=-1)
        # In place where no gradient needs the values before.
        h = F.silu(gate) * up if h.requires_grad else F.silu(gate, inplace=True).mul_(up)
    else:
        h = block.act(h)
    h = block.ff_out(h)
    if block.config.norm_after:
        h = block.ff_norm(h)
    return h.add_(x)
