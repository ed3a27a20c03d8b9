"""Build the attention masks that models of transformers take, from position IDs.

A model whose layers are all alike takes one mask. One that mixes kinds of layers takes a mask for
each kind, such as Gemma 3:

    {"full_attention": None, "sliding_attention": mask_B1LS}     None: causal, without a mask

transformers would build masks by itself, but counts tokens where a row with gaps has position IDs:
a window of 4 before ID 20 must hide the token with ID 10, although it is the one just before. The
mask of tokens with the IDs 9, 10, 20, 21 through that window (x: visible, a row for each query):

             9  10  20  21
         9   x
        10   x   x
        20           x
        21           x   x

Dimension key: B rows, L queries, S keys (more than L where earlier tokens are attended to).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from olmo_sparsity.models.attention import AttentionWindow, causal_bias

ALL_LAYERS = ""
"""The kind of all layers of a model whose layers are alike (`windows_of`). It takes one mask."""

LayerWindows = Mapping[str, AttentionWindow | None]
"""The window of each kind of layer (`windows_of`); None for layers that see all earlier tokens."""

Masks = Tensor | dict[str, Tensor | None]
"""One mask for all layers, or one for each kind of layer. A mask of (B, S) ones means causal
attention to all tokens; one of (B, 1, L, S) is added to attention scores."""


def window_hides_some(windows: LayerWindows, keys_BS: Tensor) -> bool:
    """Return whether the window of some layer hides one of these tokens from another. `keys_BS`:
    their position IDs."""
    limited = [window for window in windows.values() if window is not None]
    if not limited:
        return False
    smallest_id, largest_id = (int(edge) for edge in keys_BS.aminmax())
    return not all(window.spans(smallest_id, largest_id) for window in limited)


def build_masks(
    windows: LayerWindows,
    queries_BL: Tensor,
    keys_BS: Tensor,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    is_causal_without_mask: bool,
) -> Masks:
    """Return the masks of a forward pass:

        windows hide nothing, no bias    ones (B, S)
        windows hide nothing, a bias     that bias (B, 1, L, S)
        a window hides some token        one mask for each kind of layer

    Args:
        queries_BL, keys_BS: Position IDs.
        bias: bias_B1LS of attention scores; None for causal attention.
        dtype: That of the model's weights.
        is_causal_without_mask: Whether the model's attention is causal if it gets no mask.
    """
    num_rows, length = queries_BL.shape
    num_keys = keys_BS.shape[1]
    if not window_hides_some(windows, keys_BS):
        if bias is not None:
            return finite_bias(bias, dtype).expand(num_rows, -1, -1, -1)
        # Without a mask, transformers takes a gap in the position IDs for the start of another
        # packed sequence. A mask of ones means one sequence, and transformers drops it again, so
        # that attention still runs the fused causal kernel.
        return queries_BL.new_ones(num_rows, num_keys)

    # Plain causal attention needs no mask in a layer without a window. Where there are more keys
    # than queries, as after a common beginning, a mask says which of them precede each query.
    is_plain_causal = bias is None and num_keys == length
    if bias is None:
        bias = causal_bias(num_keys, keys_BS.device, length)
    masks: dict[str, Tensor | None] = {}
    for kind, window in windows.items():
        if window is None and is_plain_causal and is_causal_without_mask:
            masks[kind] = None
            continue
        bias_of_kind = bias
        if window is not None:
            hides_B1LS = window.hides(queries_BL, keys_BS)[:, None]
            bias_of_kind = bias.masked_fill(hides_B1LS, torch.finfo(bias.dtype).min)
        mask = finite_bias(bias_of_kind, dtype)
        masks[kind] = mask.expand(num_rows, -1, -1, -1)
    return masks if ALL_LAYERS not in masks else cast(Tensor, masks[ALL_LAYERS])


def finite_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias in the dtype of attention, without infinities: the lowest number of fp32 would
    become -inf in fp16, and the softmax of a row of -inf alone is NaN. `dtype`: the dtype of the
    weights, which autocast may override."""
    if torch.is_autocast_enabled(bias.device.type):
        dtype = torch.get_autocast_dtype(bias.device.type)
    return bias.clamp(min=torch.finfo(dtype).min).to(dtype)
