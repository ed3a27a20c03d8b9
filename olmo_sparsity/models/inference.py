"""Compute hidden states at the last places of many short rows, which is what scoring asks for.

`PositionedOLMo.hidden` calls `InferringOLMo.last_hidden` where no gradients are needed, or where
rows attend to states of distant tokens. It returns what the plain forward pass returns at these
places, in less time:

    tokens, position IDs → first layer         → middle layers → last layer        → hidden_BWD
                           each different pair                   queries of the W
                           is projected once                     wanted places only

- The queries, keys and values of the first layer depend on token and position ID alone. On CPU,
  a pair of both that occurs more than once in a batch is projected once. If rows differ in their
  first token only (one distant token before a window), the attention of the window to itself is
  computed once for all rows.
- In the last layer only the wanted places need queries, attention output and feed-forward. The
  other places contribute keys and values.
- Distant tokens that keep the states they have in the full text (`distant_states`) are keys and
  values that were computed once. Rows that see most of them share them without copies.
- On CPU sums are computed in place. Attention runs in fp32 there for any dtype of weights, as
  neither the rotation nor the fused kernel is faster in bf16.

Dimension key: B rows, L tokens of a row, W wanted places, F distant places, D width, H heads,
G heads of keys and values, K width of a head, P different (token, position ID) pairs, R pairs of
rotated coordinates.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from olmo.model import LayerNormBase, OLMo, SwiGLU
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.attention import causal_bias, keeps_much
from olmo_sparsity.models.block import PositionedBlock
from olmo_sparsity.models.distant_attention import attend_to_distant, can_share_distant
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.layers import RMSNorm, alibi_bias, count_keys, rms_norm
from olmo_sparsity.models.rope import rotary_tables, rotated_width


class Projections(NamedTuple):
    """Queries, keys and values of one layer, split into heads; queries and keys are rotated."""

    q_BLHK: Tensor
    k_BLGK: Tensor
    v_BLGK: Tensor


class DistantLayer(NamedTuple):
    """The states of distant places in one layer."""

    k_BFGK: Tensor
    v_BFGK: Tensor
    bias_BF: Tensor | None
    is_shared: bool
    """Whether rows attend to them without a copy for each."""


class InferringOLMo(OLMo):
    """OLMo with the two passes of inference: hidden states of the last places (`last_hidden`), and
    states of distant tokens (`distant_states`). `PositionedOLMo` adds the pass of training."""

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
        """Return whether attention to distant places is computed apart from attention to the row's
        own places, so that rows share the distant states."""
        config = self.config
        # ALiBi's bias and the factors of scaled queries depend on both kinds of places.
        if config.alibi or config.scales_queries:
            return False
        # A record of attention holds the keys of all places in one tensor.
        if self.blocks[0].attention_record is not None:
            return False
        weight = self.embedding.weight
        head_width = config.effective_head_width
        return can_share_distant(weight.device, weight.dtype, head_width, num_distant, length)

    def last_hidden(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        bias: Tensor | None,
        num_last: int,
        distant: DistantStates | None = None,
    ) -> Tensor:
        """Return hidden_BWD of the last `num_last` places, after the last norm. Each place of a row
        attends to all of `distant` and to the places of the row before it."""
        config = self.config
        length = tokens_BL.shape[1]
        num_keys = length
        positions_BL = positions_BL.expand_as(tokens_BL)
        distant_layers: list[DistantLayer | None] = [None] * config.n_layers
        if distant is not None:
            assert bias is None
            is_shared = self.shares_distant(distant.num_places, length)
            if not is_shared:  # then one bias covers distant places and the row
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
            num_outputs = length if len(layers) > 1 else num_last
            x_BLD, rotations = _first_layer(
                self, tokens_BL, positions_BL, bias, num_outputs, distant_layers[0]
            )
            del layers[0]
        else:
            # Not on a GPU: to count different pairs, the host would wait for it.
            x_BLD = _embed(self, tokens_BL)
            rotations = _rotations(positions_BL, config, x_BLD.dtype) if config.rope else None

        for block, distant_layer in layers:
            # Places of the last layer serve no later layer, so only the wanted ones are computed.
            num_outputs = num_last if block is self.blocks[-1] else length
            inputs = (block, x_BLD, rotations, bias, num_outputs, distant_layer)
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
        places_at_once: int | None = None,
        earlier: DistantStates | None = None,
    ) -> DistantStates:
        """Return keys, values and hidden states of all places, each of which sees the places before
        it. `places_at_once`: how many places are computed together. `earlier`: states of what
        precedes these places, which become part of the result."""
        config = self.config
        length = tokens_BL.shape[1]
        positions_BL = positions_BL.expand_as(tokens_BL)
        num_before = 0
        if earlier is not None:
            num_before = earlier.num_places
            positions_BL = torch.cat([earlier.positions_BF, positions_BL], 1)
        num_places = num_before + length

        layers: list[tuple[Tensor, Tensor]] = []
        hidden: list[Tensor] = []
        step = places_at_once or length
        for start in range(num_before, num_places, step):
            end = min(start + step, num_places)
            x_BLD = _embed(self, tokens_BL[:, start - num_before : end - num_before])
            rotations = None
            if config.rope:
                rotations = _rotations(positions_BL[:, start:end], config, x_BLD.dtype)
            bias = None
            if config.alibi:
                bias = alibi_bias(positions_BL[:, :end], config, num_queries=end - start)
            is_shared = start > 0 and self.shares_distant(start, end - start)
            for index, block in enumerate(self.blocks):
                projections = _project(block, x_BLD, rotations, end - start)
                if start == num_before:
                    # Room for all places, which each part fills further: to join parts would copy
                    # all states once for each of them.
                    earlier_layer = None if earlier is None else earlier.layers[index]
                    layers.append(_room_for_states(projections, num_places, earlier_layer))
                all_k, all_v = layers[index]
                distant_layer = None
                if start > 0:
                    distant_layer = DistantLayer(
                        all_k[:, :start], all_v[:, :start], None, is_shared
                    )
                mixed = _attend(block, projections, bias, end - start, distant_layer)
                x_BLD = _finish(block, x_BLD, mixed)
                all_k[:, start:end] = projections.k_BLGK
                all_v[:, start:end] = projections.v_BLGK
            hidden.append(self.transformer.ln_f(x_BLD))
        states = DistantStates(positions_BL, layers)
        return states.with_hidden_after(earlier, torch.cat(hidden, 1))


def _room_for_states(
    projections: Projections, num_places: int, earlier: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return tensors for the keys and values of all places, in which those of earlier places are
    filled in."""
    _, k, v = projections
    all_k = k.new_empty(k.shape[0], num_places, *k.shape[2:])
    all_v = v.new_empty(v.shape[0], num_places, *v.shape[2:])
    if earlier is not None:
        earlier_k, earlier_v = earlier
        all_k[:, : earlier_k.shape[1]] = earlier_k
        all_v[:, : earlier_v.shape[1]] = earlier_v
    return all_k, all_v


# --- a layer: inputs at all places → outputs at the last ones -------------------------------------


def _layer(
    block: PositionedBlock,
    x_BLD: Tensor,
    rotations: Tensor | None,
    bias: Tensor | None,
    num_last: int,
    distant_layer: DistantLayer | None,
) -> Tensor:
    """Return the output of the block at the last places."""
    projections = _project(block, x_BLD, rotations, num_last)
    mixed = _attend(block, projections, bias, num_last, distant_layer)
    return _finish(block, x_BLD, mixed)


def _first_layer(
    model: InferringOLMo,
    tokens_BL: Tensor,
    positions_BL: Tensor,
    bias: Tensor | None,
    num_last: int,
    distant_layer: DistantLayer | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output of the first layer at the last places, and the rotations of all places,
    which the other layers need, too. Each different pair of token and position ID is projected
    once."""
    block = model.blocks[0]
    config = model.config
    tokens_P, positions_P, pair_BL = _different_pairs(tokens_BL, positions_BL)
    x_PD = _embed(model, tokens_P)
    rotations_P = _rotations(positions_P, config, x_PD.dtype) if config.rope else None
    # All queries, too: a pair may be at a wanted place of one row and at another place elsewhere.
    projections_P = _project(block, x_PD, rotations_P, len(tokens_P))
    mixed = _attend_to_pairs(block, projections_P, pair_BL, bias, num_last, distant_layer)
    rotations = None if rotations_P is None else _gather(rotations_P, pair_BL)
    return _finish(block, _gather(x_PD, pair_BL), mixed), rotations


def _embed(model: InferringOLMo, tokens: Tensor) -> Tensor:
    """Return the embeddings of tokens, of rows or of pairs: the input of the first layer."""
    x = model.transformer.wte(tokens)
    return model.transformer.emb_norm(x) if model.config.embedding_layer_norm else x


def _different_pairs(tokens_BL: Tensor, positions_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens_P, positions_P, and pair_BL: the number of each place's pair."""
    # One number for each pair, as `unique` is much slower on rows of two.
    num_positions = int(positions_BL.max()) + 1
    pairs_P, pair_BL = torch.unique(tokens_BL * num_positions + positions_BL, return_inverse=True)
    return pairs_P // num_positions, pairs_P % num_positions, pair_BL


def _gather(part_P: Tensor, pair_BL: Tensor) -> Tensor:
    """Return part_P[pair_BL]; on CPU this is six times as fast."""
    return part_P.index_select(0, pair_BL.flatten()).unflatten(0, pair_BL.shape)


# --- queries, keys and values ---------------------------------------------------------------------


def _rotations(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Return cos + i·sin of the angles of each place, as (…, 1, R): the same for all heads. To
    rotate a pair of coordinates is to multiply it, as a complex number, by one of these."""
    cos_PR, sin_PR = rotary_tables(positions, config)
    if not config.rope_full_precision:  # rounded, as the block rotates in the dtype of its inputs
        cos_PR = cos_PR.to(dtype).float()
        sin_PR = sin_PR.to(dtype).float()
    return torch.complex(cos_PR, sin_PR)[..., None, :]


def _project(
    block: PositionedBlock, x: Tensor, rotations: Tensor | None, num_last: int
) -> Projections:
    """Return queries of the last places only, and keys and values of all places."""
    h = x if block.config.norm_after else block.attn_norm(x)
    if num_last == h.shape[-2]:
        q, k, v = _linear(block, h, "qkv")
    else:
        (q,) = _linear(block, h[:, -num_last:], "q")
        k, v = _linear(block, h, "kv")
    q, k = _queries_and_keys(block, q, k, rotations)
    return Projections(q, k, _heads(block, v))


def _linear(block: PositionedBlock, h: Tensor, wanted: str) -> tuple[Tensor, ...]:
    """Return those of queries, keys and values whose letters are in `wanted`, such as "kv", without
    computing the others: upstream has one matrix for all three."""
    rows_of_part = dict(zip("qkv", _rows_of_parts(block), strict=True))
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


def _rows_of_parts(block: PositionedBlock) -> tuple[Tensor, ...]:
    """Return the rows of queries, of keys and of values in their common matrix, in the order in
    which coordinates are computed here.

    RoPE rotates coordinates i and i + R of a head together. Here the two stand side by side, so
    that they are one complex number, and a rotation is one product. Queries and keys are reordered
    alike, so their products do not change.
    """
    config = block.config
    num_rotated = rotated_width(config) if config.rope else 0
    head_width = config.effective_head_width
    return _pairs_side_by_side(
        block.fused_dims, head_width, num_rotated, block.att_proj.weight.device
    )


@functools.cache
def _pairs_side_by_side(
    widths: tuple[int, ...], head_width: int, num_rotated: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Return row numbers of queries, keys and values, with rotated pairs side by side.
    `widths`: numbers of rows of the three."""
    rows = torch.arange(sum(widths), device=device)
    rows_of_heads = rows.unflatten(0, (-1, head_width))
    # Of each head (0, 1, …, R − 1, R, R + 1, …) becomes (0, R, 1, R + 1, …).
    pairs = rows_of_heads[:, :num_rotated].unflatten(1, (2, -1)).transpose(1, 2)
    reordered = rows_of_heads.clone()
    reordered[:, :num_rotated] = pairs.flatten(1)
    q, k, _ = reordered.flatten().split(widths)
    *_, v = rows.split(widths)  # values are not rotated
    return q, k, v


def _queries_and_keys(
    block: PositionedBlock, q: Tensor, k: Tensor, rotations: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return queries and keys split into heads, normed and rotated. Queries may be of the last
    places only."""
    if block.q_norm is not None and block.k_norm is not None:
        # Row numbers of queries count from 0, so they also say where each coordinate came from.
        order, *_ = _rows_of_parts(block)
        q = _apply_norm(block.q_norm, q, order)
        k = _apply_norm(block.k_norm, k, order[: k.shape[-1]])
    if rotations is None or not block.rotates:
        return _heads(block, q), _heads(block, k)
    rotations_of_queries = rotations[..., -q.shape[-2] :, :, :]
    return _heads(block, q, rotations_of_queries), _heads(block, k, rotations)


def _apply_norm(norm: LayerNormBase, x: Tensor, order: Tensor) -> Tensor:
    """Return upstream's norm of reordered coordinates, over all heads or over each. `order`: the
    place of each coordinate of x in upstream's order, by which the norm's weights are reordered."""
    (size,) = norm.normalized_shape
    if size < x.shape[-1]:  # a norm over each head, with weights that all heads share
        return _apply_norm(norm, x.unflatten(-1, (-1, size)), order[:size]).flatten(-2)
    reordered = {name: p.index_select(0, order) for name, p in norm.named_parameters()}
    if type(norm) is RMSNorm and reordered.keys() == {"weight"}:  # the same in half the time
        return rms_norm(x, reordered["weight"], norm.eps)
    return torch.func.functional_call(norm, reordered, (x,))


def _heads(block: PositionedBlock, x: Tensor, rotations: Tensor | None = None) -> Tensor:
    """Return (…, H·K) as (…, H, K), rotated, in the dtype of attention. It may change x."""
    dtype = torch.float if x.device.type == "cpu" else x.dtype
    x = x.unflatten(-1, (-1, block.config.effective_head_width))
    if rotations is not None:
        x = _rotate(x, rotations)
    return x.to(dtype)


def _rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate the first 2R coordinates of each head, in fp32. It changes x in place if x is in fp32,
    rotated completely, and without gradients."""
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


# --- attention: queries, keys, values → mixed_BWHK, before the output projection ------------------


def _attend(
    block: PositionedBlock,
    projections: Projections,
    bias: Tensor | None,
    num_last: int,
    distant_layer: DistantLayer | None = None,
) -> Tensor:
    """Return attention from the last places to all places of the row, and to distant places."""
    q, k, v = projections
    q = q[:, -num_last:]
    if distant_layer is not None and distant_layer.is_shared:
        mixed = attend_to_distant(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            distant_layer.k_BFGK.transpose(1, 2),
            distant_layer.v_BFGK.transpose(1, 2),
            distant_layer.bias_BF,
        )
        return mixed.transpose(1, 2)
    if distant_layer is not None:
        k = torch.cat((distant_layer.k_BFGK, k), dim=1)
        v = torch.cat((distant_layer.v_BFGK, v), dim=1)
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    # Kernels align a causal mask with the first key if there are fewer queries than keys, so a mask
    # is passed. With as many queries as keys `block.mix` masks by itself; a single query sees all.
    if bias is None and 1 < num_last < k.shape[2]:
        bias = causal_bias(k.shape[2], q.device, num_last)
    if bias is not None:
        bias = block._cast_attn_bias(bias[:, :, -num_last:], q.dtype)
    return block.mix(q, k, v, bias).transpose(1, 2)


def _attend_to_pairs(
    block: PositionedBlock,
    projections_P: Projections,
    pair_BL: Tensor,
    bias: Tensor | None,
    num_last: int,
    distant_layer: DistantLayer | None,
) -> Tensor:
    """Return attention in the first layer, from the projections of different pairs."""
    rows_are_alike = len(pair_BL) > 1 and (pair_BL[:, 1:] == pair_BL[0, 1:]).all()
    if bias is None and distant_layer is None and rows_are_alike:
        return _attend_to_common_window(block, projections_P, pair_BL)[:, -num_last:]
    projections = Projections(*(_gather(part_P, pair_BL) for part_P in projections_P))
    return _attend(block, projections, bias, num_last, distant_layer)


def _attend_to_common_window(
    block: PositionedBlock, projections_P: Projections, pair_BL: Tensor
) -> Tensor:
    """Return mixed_BLHK of rows that differ in their first place only, here one distant token.

    For a query, let s_w be its scores with the window, s_d that with the distant token, and a_w its
    attention within the window, which is the same in all rows. A softmax over both gives

        (1 − share) · a_w + share · v_d,   share = sigmoid(s_d − log Σ exp(s_w)),

    so that each row costs one score and one sum for each query. S = L − 1 places are the window.
    """
    q_PHK, k_PGK, v_PGK = projections_P
    distant_B = pair_BL[:, 0]
    window_S = pair_BL[0, 1:]
    q_SHK = q_PHK[window_S] * q_PHK.shape[-1] ** -0.5
    if block.config.scales_queries:
        counts_1S = count_keys(len(window_S), pair_BL.shape[1], q_SHK.device)
        factors_SH = block.query_factors(counts_1S)[0].T
        q_SHK *= factors_SH[..., None].to(q_SHK.dtype)
    k_PHK = _for_each_query_head(k_PGK, q_SHK)
    v_PHK = _for_each_query_head(v_PGK, q_SHK)

    # Attention within the window, once for all rows.
    scores_HSS = torch.einsum("lhk,mhk->hlm", q_SHK, k_PHK[window_S]).float()
    scores_HSS += causal_bias(len(window_S), scores_HSS.device)[0]
    weights_HSS = scores_HSS.softmax(-1).to(v_PHK.dtype)
    local_SHK = torch.einsum("hlm,mhk->lhk", weights_HSS, v_PHK[window_S])

    # The share of the distant token, for each row.
    scores_BSH = torch.einsum("lhk,bhk->blh", q_SHK, k_PHK[distant_B]).float()
    share_BSH = (scores_BSH - scores_HSS.logsumexp(-1).T).sigmoid().to(v_PHK.dtype)
    mixed_BLHK = local_SHK.new_empty(*pair_BL.shape, *local_SHK.shape[1:])
    mixed_BLHK[:, 0] = v_PHK[distant_B]  # the distant token sees itself alone
    torch.lerp(local_SHK, v_PHK[distant_B, None], share_BSH[..., None], out=mixed_BLHK[:, 1:])
    return mixed_BLHK


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values (…, G, K) as (…, H, K): once for each of the query heads that share
    them."""
    return x.repeat_interleave(q.shape[-2] // x.shape[-2], dim=-2)


def _finish(block: PositionedBlock, x_BLD: Tensor, mixed_BWHK: Tensor) -> Tensor:
    """Return the output of the block at the last places, from their attention: output projection,
    feed-forward, and both residual sums."""
    norm_after = block.config.norm_after
    attended = block.attn_out(mixed_BWHK.flatten(2).to(x_BLD.dtype))
    if norm_after:
        attended = block.attn_norm(attended)
    x_BWD = attended.add_(x_BLD[:, -attended.shape[1] :])

    h = block.ff_proj(x_BWD if norm_after else block.ff_norm(x_BWD))
    if type(block.act) is SwiGLU:
        up, gate = h.chunk(2, dim=-1)
        # In place where no gradient needs the values before.
        h = F.silu(gate) * up if h.requires_grad else F.silu(gate, inplace=True).mul_(up)
    else:
        h = block.act(h)
    h = block.ff_out(h)
    if norm_after:
        h = block.ff_norm(h)
    return h.add_(x_BWD)
