"""Compute the first layer of many similar rows in less time.

The input of the first layer depends on a token and its position ID alone. Rows that are scored
together are alike in most tokens: the two below try two distant tokens, 7 and 5, each before the
window 3 4.

    tokens_BL       positions_BL       pair_BL      different pairs (token, position ID)
    7 3 4           0 20 21            3 0 1        (3, 20), (4, 21), (5, 1), (7, 0)
    5 3 4           1 20 21            2 0 1

Each of the P different pairs is projected once (4 of 6 here). If rows differ in their first token
only, as these do, the attention of the window to itself is computed once for all rows, too.
`InferringOLMo.last_hidden` (inference.py) calls `find_different_pairs` and `first_layer_output`.

Dimension key: B rows, L tokens of a row, P different (token, position ID) pairs, S = L − 1 tokens
of the window, W wanted tokens (the last of each row), D width, H heads, G heads of keys and values,
K width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.models.olmo.block import PositionedBlock
from olmo_sparsity.models.olmo.layer_steps import DistantLayer, attend_from_last, finish_layer
from olmo_sparsity.models.olmo.layers import count_keys
from olmo_sparsity.models.olmo.projections import Projections, project, rotations_of


class DifferentPairs(NamedTuple):
    """The different pairs of token and position ID in a batch."""

    tokens_P: Tensor
    positions_P: Tensor
    pair_BL: Tensor
    """For each token of the batch, the index of its pair."""


class FirstLayer(NamedTuple):
    """What the first layer hands on to the others."""

    x_BWD: Tensor
    """Its output at the wanted tokens."""

    rotations: Tensor | None
    """The rotations of all tokens; None without RoPE."""


def find_different_pairs(tokens_BL: Tensor, positions_BL: Tensor) -> DifferentPairs:
    """Return the different pairs of token and position ID of a batch."""
    # Each pair becomes one number, as `unique` is much slower on rows of two.
    num_positions = int(positions_BL.max()) + 1
    pairs_P, pair_BL = torch.unique(tokens_BL * num_positions + positions_BL, return_inverse=True)
    return DifferentPairs(pairs_P // num_positions, pairs_P % num_positions, pair_BL)


def first_layer_output(
    block: PositionedBlock,
    embedded_PD: Tensor,
    pairs: DifferentPairs,
    bias: Tensor | None,
    num_wanted: int,
    distant_layer: DistantLayer | None,
) -> FirstLayer:
    """Return the output of the first layer at the last `num_wanted` tokens, and the rotations of
    all tokens, which the other layers need, too.

    Args:
        block: The first layer.
        embedded_PD: The embedding of each pair's token.
        pairs: The pairs of the batch.
        bias: Added to attention scores, as `attend_from_last` takes it.
        num_wanted: W.
        distant_layer: States of distant tokens in this layer; None if there are none.
    """
    config: ModelConfig = block.config
    rotations_P = None
    if config.rope:
        rotations_P = rotations_of(pairs.positions_P, config, embedded_PD.dtype)
    # Queries of all pairs, too: one may be at a wanted token of one row, and elsewhere in another.
    projections_P = project(block, embedded_PD, rotations_P, len(pairs.tokens_P))
    mixed = _attend_from_pairs(block, projections_P, pairs.pair_BL, bias, num_wanted, distant_layer)
    rotations = None if rotations_P is None else _for_each_token(rotations_P, pairs.pair_BL)
    x_BLD = _for_each_token(embedded_PD, pairs.pair_BL)
    return FirstLayer(finish_layer(block, x_BLD, mixed), rotations)


def _for_each_token(values_P: Tensor, pair_BL: Tensor) -> Tensor:
    """Return values_P[pair_BL]: for each token of the batch the value of its pair."""
    # On CPU `index_select` is six times as fast as indexing with `pair_BL`.
    return values_P.index_select(0, pair_BL.flatten()).unflatten(0, pair_BL.shape)


def _attend_from_pairs(
    block: PositionedBlock,
    projections_P: Projections,
    pair_BL: Tensor,
    bias: Tensor | None,
    num_wanted: int,
    distant_layer: DistantLayer | None,
) -> Tensor:
    """Return mixed_BWHK, the attention of the first layer, from the projections of its pairs."""
    if bias is None and distant_layer is None and _differ_in_first_token_only(pair_BL):
        return _attend_to_common_window(block, projections_P, pair_BL)[:, -num_wanted:]
    projections = Projections(*(_for_each_token(values_P, pair_BL) for values_P in projections_P))
    return attend_from_last(block, projections, bias, num_wanted, distant_layer)


def _differ_in_first_token_only(pair_BL: Tensor) -> bool:
    """Return whether there are several rows, which are equal but for their first tokens."""
    return len(pair_BL) > 1 and bool((pair_BL[:, 1:] == pair_BL[0, 1:]).all())


def _attend_to_common_window(
    block: PositionedBlock, projections_P: Projections, pair_BL: Tensor
) -> Tensor:
    """Return mixed_BLHK of rows that differ in their first token only, a distant one.

    For a query, let s_w be its scores with the window, s_d its score with the distant token, v_d
    the distant token's value, and a_w the attention within the window, which is the same in all
    rows. A softmax over both gives

        (1 − f) · a_w + f · v_d,   f = sigmoid(s_d − log Σ exp(s_w)),

    so that each row costs one score and one weighted sum for each query.
    """
    q_PHK, k_PGK, v_PGK = projections_P
    # Indices of pairs: the distant token of each row, and the window of all rows.
    distant_B = pair_BL[:, 0]
    window_S = pair_BL[0, 1:]
    q_SHK = q_PHK[window_S] * q_PHK.shape[-1] ** -0.5
    if block.config.scales_queries:
        counts_1S = count_keys(len(window_S), pair_BL.shape[1], q_SHK.device)
        factors_SH = block.query_factors(counts_1S)[0].T
        q_SHK *= factors_SH[..., None].to(q_SHK.dtype)
    k_PHK = _for_each_query_head(k_PGK, q_SHK)
    v_PHK = _for_each_query_head(v_PGK, q_SHK)

    # Attention within the window, once for all rows: s_w and a_w. (q: a query, s: a key)
    scores_HSS = torch.einsum("qhk,shk->hqs", q_SHK, k_PHK[window_S]).float()
    scores_HSS += causal_bias(len(window_S), scores_HSS.device)[0]
    weights_HSS = scores_HSS.softmax(-1).to(v_PHK.dtype)
    local_SHK = torch.einsum("hqs,shk->qhk", weights_HSS, v_PHK[window_S])

    # s_d of each row, and f, the fraction of attention that its distant token gets.
    scores_BSH = torch.einsum("qhk,bhk->bqh", q_SHK, k_PHK[distant_B]).float()
    fraction_BSH = (scores_BSH - scores_HSS.logsumexp(-1).T).sigmoid().to(v_PHK.dtype)
    mixed_BLHK = local_SHK.new_empty(*pair_BL.shape, *local_SHK.shape[1:])
    mixed_BLHK[:, 0] = v_PHK[distant_B]  # the distant token sees itself alone
    torch.lerp(local_SHK, v_PHK[distant_B, None], fraction_BSH[..., None], out=mixed_BLHK[:, 1:])
    return mixed_BLHK


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values x, (…, G, K), as (…, H, K): repeated for the query heads of each group.
    `q`: queries, (…, H, K)."""
    group_size = q.shape[-2] // x.shape[-2]
    return x.repeat_interleave(group_size, dim=-2)
