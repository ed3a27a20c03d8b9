"""Compute one layer of OLMo in inference, in steps: projections → attention → feed-forward.

    x_BLD ─ project ─> q of the last W tokens, k and v of all L
          ─ attend_from_last ─> mixed_BWHK ─ finish_layer ─> x_BWD

The last layer of a model needs queries, attention and feed-forward of the W wanted tokens only; the
other tokens contribute keys and values. In all other layers W is L. `PositionedBlock.forward`
computes the same for training.

Dimension key: B rows, L tokens of a row, W wanted tokens (the last of each row), F distant tokens,
D width, H heads, G heads of keys and values, K width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from olmo.model import SwiGLU
from torch import Tensor

from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.models.block import PositionedBlock
from olmo_sparsity.models.distant_attention import attend_to_distant
from olmo_sparsity.models.projections import Projections, project


class DistantLayer(NamedTuple):
    """Keys and values of distant tokens in one layer."""

    k_BFGK: Tensor
    v_BFGK: Tensor
    bias_BF: Tensor | None
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
    mixed = attend_from_last(block, projections, bias, num_wanted, distant_layer)
    return finish_layer(block, x_BLD, mixed)


def attend_from_last(
    block: PositionedBlock,
    projections: Projections,
    bias: Tensor | None,
    num_wanted: int,
    distant_layer: DistantLayer | None = None,
) -> Tensor:
    """Return mixed_BWHK: attention from the last `num_wanted` tokens to all tokens of the row, and
    to distant tokens."""
    q, k, v = projections
    q = q[:, -num_wanted:]
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

    # Distant tokens precede the row, so causal attention sees all of them.
    if distant_layer is not None:
        k = torch.cat((distant_layer.k_BFGK, k), dim=1)
        v = torch.cat((distant_layer.v_BFGK, v), dim=1)
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)

    # Kernels align a causal mask with the first key if there are fewer queries than keys, so a mask
    # is passed. With as many queries as keys `block.mix` masks by itself; a single query sees all.
    if bias is None and 1 < num_wanted < k.shape[2]:
        bias = causal_bias(k.shape[2], q.device, num_wanted)
    if bias is not None:
        bias = block._cast_attn_bias(bias[:, :, -num_wanted:], q.dtype)
    return block.mix(q, k, v, bias).transpose(1, 2)


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
        h = F.silu(gate) * up if h.requires_grad else F.silu(gate, inplace=True).mul_(up)
    else:
        h = block.act(h)
    h = block.ff_out(h)
    if norm_after:
        h = block.ff_norm(h)
    return h.add_(x_BWD)
