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
    """The keys and values of distant tokens: the same text in every row, or one row for all."""

    positions_BF: Tensor
    """Position IDs of these tokens."""

    layers: list[tuple[Tensor, Tensor]]
    """k_BFHK, rotated, and v_BFHK of each layer."""

    bias_BF: Tensor | None = None
    """Added to the attention scores of these places, by row; None adds nothing."""

    hidden_BFD: Tensor | None = None
    """After the last norm: what these places predict."""

    @staticmethod
    def behind_prefix(batches: Sequence[DistantStates], num_prefix: int) -> DistantStates:
        """Join rows of the same prefix and one more place each into one text. These are states
        without their context, each computed behind the prefix alone."""

        def join(parts: list[Tensor]) -> Tensor:
            prefix = parts[0][:1, :num_prefix]
            last_places = [part[None, :, -1] for part in parts]  # rows become places
            return torch.cat([prefix, *last_places], 1)

        layers = [
            (join([k for k, _ in layer]), join([v for _, v in layer]))
            for layer in zip(*(batch.layers for batch in batches), strict=True)
        ]
        return DistantStates(join([batch.positions_BF for batch in batches]), layers)

    def predicting(self, hidden_BLD: Tensor, before: DistantStates | None) -> DistantStates:
        """Return these states with the hidden ones of all places: those of `before`, and
        `hidden_BLD` of the places after it; with none if `before` does not have them."""
        if before is None:
            return replace(self, hidden_BFD=hidden_BLD)
        if before.hidden_BFD is None:
            return replace(self, hidden_BFD=None)
        return replace(self, hidden_BFD=torch.cat([before.hidden_BFD, hidden_BLD], 1))

    @property
    def num_places(self) -> int:
        return self.positions_BF.shape[1]

    @property
    def num_heads(self) -> int:
        return self.layers[0][0].shape[2]

    def expand(self, num_rows: int, bias_BF: Tensor | None = None) -> DistantStates:
        """Return the same states in every row, as views, with a bias of its own for each."""

        def rows(x_1F: Tensor) -> Tensor:
            return x_1F.expand(num_rows, *x_1F.shape[1:])

        layers = [(rows(k), rows(v)) for k, v in self.layers]
        return DistantStates(rows(self.positions_BF), layers, bias_BF)

    def window_bias(self, length: int) -> Tensor | None:
        """Return bias_B1LK of a window's queries: `bias_BF` for these places, causal within the
        window. None means causal attention that sees all of them."""
        if self.bias_BF is None:
            return None
        distant_B1LF = self.bias_BF[:, None, None].expand(-1, -1, length, -1)
        causal_B1LL = causal_bias(length, self.bias_BF.device).expand(len(self.bias_BF), -1, -1, -1)
        return torch.cat((distant_B1LF, causal_B1LL), dim=-1)

    def first(self, num_places: int) -> DistantStates:
        """Return the states of the first places, as views."""
        assert self.bias_BF is None
        layers = [(k[:, :num_places], v[:, :num_places]) for k, v in self.layers]
        hidden_BFD = None if self.hidden_BFD is None else self.hidden_BFD[:, :num_places]
        return DistantStates(self.positions_BF[:, :num_places], layers, hidden_BFD=hidden_BFD)

    def choose(self, places_BF: Tensor) -> DistantStates:
        """Return the states of some places for each row; the text is the same for all rows."""
        assert self.bias_BF is None
        if places_BF.shape == (1, self.num_places):
            return self  # all places, in order

        def pick(x_1F: Tensor) -> Tensor:
            index = places_BF.to(x_1F.device).flatten()
            return x_1F[0].index_select(0, index).unflatten(0, places_BF.shape)

        return DistantStates(pick(self.positions_BF), [(pick(k), pick(v)) for k, v in self.layers])


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays of integers as tensors on a device, in one copy, for which the host does not
    wait."""
    numbers = torch.from_numpy(np.concatenate([a.ravel() for a in arrays]).astype(np.int64))
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    parts = numbers.to(device).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
