"""Compute one layer of OLMo in inference, in steps: projections → attention → feed-forward.

    x_BLD ─ project ─> q of the last W tokens, k and v of all L
          ─ attend_from_last ─> mixed_BWHK ─ finish_layer ─> x_BWD

The last layer of a model needs queries, attention and feed-forward of the W wanted tokens only; the
other tokens contribute keys and values. In all other layers W is L. `PositionedBlock.forward`
computes the same for training.

Dimension key: B rows, L tokens of a row, W wanted tokens (the last of each row), F distant tokens,
S = F + L all keys, D width, H heads, G heads of keys and values, K width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from olmo.model import SwiGLU
from torch import Tensor
from torch.nn import functional

from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.models.distant_attention import attend_to_distant
from olmo_sparsity.models.olmo.block import PositionedBlock
from olmo_sparsity.models.olmo.projections import Projections, project


class DistantLayer(NamedTuple):
    """Keys and values of distant tokens in one layer."""

    k_BFGK: Tensor
    v_BFGK: Tensor
    bias_BF: Tensor | None
    """Added to the scores of distant tokens, by row; None adds nothing. It is read only where the
    states are shared. Otherwise one bias for all keys of a row has it in itself."""

    is_shared: bool
    """Whether all rows attend to the same states, which are not copied for each row."""


def layer_output(
    block: PositionedBlock,
    x_BLD: Tensor,
    rotations: Tensor | None,
    bias: Tensor | None,
    num_wanted: int,
    distant_layer: DistantLayer | None,
) -> Tensor:
    """Return x_BWD, the output of the layer at the last `num_wanted` tokens."""
    projections = project(block, x_BLD, rotations, num_wanted)
    mixed_BWHK = attend_from_last(block, projections, bias, num_wanted, distant_layer)
    return finish_layer(block, x_BLD, mixed_BWHK)


def attend_from_last(
    block: PositionedBlock,
    projections: Projections,
    bias: Tensor | None,
    num_wanted: int,
    distant_layer: DistantLayer | None = None,
) -> Tensor:
    """Return mixed_BWHK: attention from the last `num_wanted` tokens to all tokens of the row, and
    to distant tokens. `bias`: added to attention scores, (B or 1, H or 1, L, S). None for causal
    attention."""
    q_BLHK, k_BLGK, v_BLGK = projections
    q_BHWK = q_BLHK[:, -num_wanted:].transpose(1, 2)  # kernels take heads before tokens
    if distant_layer is None:
        return _attend(block, q_BHWK, k_BLGK, v_BLGK, bias)

    if distant_layer.is_shared:
        assert bias is None, "shared states come with `bias_BF`, and causal attention to the row"
        mixed_BHWK = attend_to_distant(
            q_BHWK,
            k_BLGK.transpose(1, 2),
            v_BLGK.transpose(1, 2),
            distant_layer.k_BFGK.transpose(1, 2),
            distant_layer.v_BFGK.transpose(1, 2),
            distant_layer.bias_BF,
        )
        return mixed_BHWK.transpose(1, 2)

    # Distant tokens precede the row, so causal attention sees all of them.
    k_BSGK = torch.cat((distant_layer.k_BFGK, k_BLGK), dim=1)
    v_BSGK = torch.cat((distant_layer.v_BFGK, v_BLGK), dim=1)
    return _attend(block, q_BHWK, k_BSGK, v_BSGK, bias)


def _attend(
    block: PositionedBlock, q_BHWK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, bias: Tensor | None
) -> Tensor:
    """Return mixed_BWHK: attention from the wanted tokens to all keys, causal without a bias."""
    num_wanted = q_BHWK.shape[2]
    num_keys = k_BSGK.shape[1]
    # Kernels align a causal mask with the first key if there are fewer queries than keys, so a mask
    # is passed. With as many queries as keys `block.mix` masks by itself; a single query sees all.
    if bias is None and 1 < num_wanted < num_keys:
        bias = causal_bias(num_keys, q_BHWK.device, num_wanted)
    if bias is not None:
        bias = block._cast_attn_bias(bias[:, :, -num_wanted:], q_BHWK.dtype)
    k_BGSK = k_BSGK.transpose(1, 2)
    v_BGSK = v_BSGK.transpose(1, 2)
    return block.mix(q_BHWK, k_BGSK, v_BGSK, bias).transpose(1, 2)


def finish_layer(block: PositionedBlock, x_BLD: Tensor, mixed_BWHK: Tensor) -> Tensor:
    """Return x_BWD, the output of the layer, from attention that is not projected yet: apply the
    output projection, the feed-forward part, their norms and both residual sums."""
    norm_after = block.config.norm_after
    attended = block.attn_out(mixed_BWHK.flatten(2).to(x_BLD.dtype))
    if norm_after:
        attended = block.attn_norm(attended)
    x_BWD = attended.add_(x_BLD[:, -attended.shape[1] :])

    h = block.ff_proj(x_BWD if norm_after else block.ff_norm(x_BWD))
    if type(block.act) is SwiGLU:
        up, gate = h.chunk(2, dim=-1)
        # In place, unless a gradient needs the values that would be overwritten.
        if h.requires_grad:
            h = functional.silu(gate) * up
        else:
            h = functional.silu(gate, inplace=True).mul_(up)
    else:
        h = block.act(h)
    h = block.ff_out(h)
    if norm_after:
        h = block.ff_norm(h)
    return h.add_(x_BWD)
