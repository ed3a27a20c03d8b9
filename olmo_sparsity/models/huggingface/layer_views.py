"""Say what each layer sees where rows share the states of distant tokens: which of these, and which
of the row's own tokens.

    masks of the row (masks.py) ─┐
    position IDs of both         ├─ views_of_layers ─> a LayerView for each layer
    windows of the layers       ─┘                     ─> `attending_to` (own_attention.py)

Dimension key: B rows, L tokens of a row, F distant tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from olmo_sparsity.models.attention import AttentionWindow
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.huggingface.masks import (
    ALL_LAYERS,
    LayerWindows,
    Masks,
    window_hides_some,
)


@dataclass(frozen=True)
class LayerView:
    """What one layer sees: a mask over the rows' own tokens, and a bias over distant tokens.

    A row of tokens with the position IDs 20, 21 after distant ones with 10, 18, 19, through a
    window of 3 IDs, sees (x: visible) what the view below says:

                   10 18 19    20 21
        query 20       x  x     x          first_distant = 1: no query sees the ID 10
        query 21          x     x  x       bias over 18, 19, which hides 18 from the query 21
    """

    mask: Tensor
    """The mask over the rows' own tokens, as it is passed to the model (`Masks`). A
    model that passes another one on to its layers is rejected."""

    bias: Tensor | None = None
    """The bias over distant tokens: (B, F), or (B, L, F) where queries differ."""

    first_distant: int = 0
    """The index of the distant token at which `bias` begins. Those before it are outside of the
    layer's window for all queries."""

    sees_all_earlier: bool = True
    """Whether queries see all earlier tokens of their row, without a window."""

    @staticmethod
    def behind_window(
        window: AttentionWindow, mask: Tensor, distant: DistantStates, positions_BL: Tensor
    ) -> LayerView:
        """Return the view of a layer whose window hides some tokens from some queries."""
        hides_BLF = window.hides(positions_BL, distant.positions_BF)
        # Tokens at the beginning that are hidden from all queries are left out, so that they cost
        # nothing: the cumulative product is 1 up to the first token that some query sees.
        is_hidden_F = hides_BLF.flatten(0, 1).all(0)
        first_distant = int(is_hidden_F.long().cumprod(0).sum())
        num_rows, length, num_distant = hides_BLF.shape
        bias_BF = distant.bias_BF
        if bias_BF is None:
            bias_BF = torch.zeros(num_rows, num_distant, dtype=torch.float, device=mask.device)
        bias_BLF = bias_BF[:, None, first_distant:].expand(-1, length, -1)
        lowest = torch.finfo(torch.float).min
        bias_BLF = bias_BLF.masked_fill(hides_BLF[..., first_distant:], lowest)
        return LayerView(mask, bias_BLF, first_distant, sees_all_earlier=False)


def views_of_layers(
    kind_of_layer: Sequence[str],
    windows: LayerWindows,
    masks: Masks,
    positions_BL: Tensor,
    distant: DistantStates,
) -> list[LayerView]:
    """Return what each layer sees of the row and of distant tokens.

    Args:
        kind_of_layer: The kind of each layer, by which `windows` and `masks` name it; `ALL_LAYERS`
            if all layers are alike, as in `windows_of`.
        masks: Over the row's own tokens.
        positions_BL: Position IDs of the row.
    """
    # Where no window hides a token, layers of all kinds see the same, so one view serves them all.
    # `windows` has this kind only where all layers have one window, which then hides nothing.
    if not window_hides_some(windows, distant.positions_before(positions_BL)):
        kind_of_layer = [ALL_LAYERS] * len(kind_of_layer)

    view_of_kind = {}
    for kind in set(kind_of_layer):
        mask = masks[kind] if isinstance(masks, dict) else masks
        assert mask is not None  # the masks were built with a bias, so each kind has one
        window = windows.get(kind)
        if window is None:
            view_of_kind[kind] = LayerView(mask, distant.bias_BF)
        else:
            view_of_kind[kind] = LayerView.behind_window(window, mask, distant, positions_BL)
    return [view_of_kind[kind] for kind in kind_of_layer]
