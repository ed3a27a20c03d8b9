"""Hold the keys and values of distant tokens in all layers, and select some of them. A window that
attends to k distant places costs its own places only, however long the text is.

Dimension key: B rows, F distant places, H heads of keys, K width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.models.attention import causal_bias


@dataclass(frozen=True)
class DistantStates:
    positions_BF: Tensor
    layers: list[tuple[Tensor, Tensor]]
    """k_BFHK, rotated, and v_BFHK of each layer."""

    bias_BF: Tensor | None = None
    """Added to the attention scores of these places."""

    hidden_BFD: Tensor | None = None
    """After the last norm: what these places predict."""

    @staticmethod
    def behind_prefix(batches: Sequence[DistantStates], num_prefix: int) -> DistantStates:
        """Join rows of the same prefix and one more place each into one text."""

        def join(parts: list[Tensor]) -> Tensor:
            return torch.cat([parts[0][:1, :num_prefix], *(part[None, :, -1] for part in parts)], 1)

        layers = [
            (join([k for k, _ in layer]), join([v for _, v in layer]))
            for layer in zip(*(batch.layers for batch in batches), strict=True)
        ]
        return DistantStates(join([batch.positions_BF for batch in batches]), layers)

    def predicting(self, hidden_BLD: Tensor, before: DistantStates | None) -> DistantStates:
        """With the last states of all places: those of `before`, if it has them, and these."""
        parts = [hidden_BLD] if before is None else [before.hidden_BFD, hidden_BLD]
        known = [part for part in parts if part is not None]
        return replace(self, hidden_BFD=torch.cat(known, 1) if len(known) == len(parts) else None)

    @property
    def num_places(self) -> int:
        return self.positions_BF.shape[1]

    @property
    def num_heads(self) -> int:
        return self.layers[0][0].shape[2]

    def expand(self, num_rows: int, bias_BF: Tensor | None = None) -> DistantStates:
        """The same states in every row, as views, with a bias of its own for each."""

        def rows(x_1F: Tensor) -> Tensor:
            return x_1F.expand(num_rows, *x_1F.shape[1:])

        layers = [(rows(k), rows(v)) for k, v in self.layers]
        return DistantStates(rows(self.positions_BF), layers, bias_BF)

    def window_bias(self, length: int) -> Tensor | None:
        """bias_B1LK of a window's places: `bias_BF` for these ones, causal within the window. None
        means causal attention that sees all of them."""
        if self.bias_BF is None:
            return None
        causal = causal_bias(length, self.bias_BF.device).expand(len(self.bias_BF), -1, -1, -1)
        return torch.cat((self.bias_BF[:, None, None].expand(-1, -1, length, -1), causal), dim=-1)

    def first(self, num_places: int) -> DistantStates:
        """The states of the first places, as views."""
        assert self.bias_BF is None
        layers = [(k[:, :num_places], v[:, :num_places]) for k, v in self.layers]
        hidden_BFD = None if self.hidden_BFD is None else self.hidden_BFD[:, :num_places]
        return DistantStates(self.positions_BF[:, :num_places], layers, hidden_BFD=hidden_BFD)

    def choose(self, places_BF: Tensor) -> DistantStates:
        """The states of the given places for each row; the text is the same for all rows."""
        assert self.bias_BF is None
        if places_BF.shape == (1, self.num_places):
            return self

        def pick(x_1F: Tensor) -> Tensor:
            index = places_BF.to(x_1F.device).flatten()
            return x_1F[0].index_select(0, index).unflatten(0, places_BF.shape)

        return DistantStates(pick(self.positions_BF), [(pick(k), pick(v)) for k, v in self.layers])


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integers, in one copy, for which the host does not wait."""
    numbers = torch.from_numpy(np.concatenate([a.ravel() for a in arrays]).astype(np.int64))
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    parts = numbers.to(device).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
