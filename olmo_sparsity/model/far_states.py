"""What a model has made of tokens far back: keys and values of every layer.

Place in the flow: a model's `far_states` → some of them → its `hidden(far=…)`. A window that looks
back at k far places of a long text costs its own places only, however long the text.

Dimension key: B rows, F far places, H heads of keys, K width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FarStates:
    positions_BF: Tensor
    layers: list[tuple[Tensor, Tensor]]
    """k_BFHK, rotated, and v_BFHK of each layer."""

    @staticmethod
    def behind_prefix(batches: Sequence[FarStates], num_prefix: int) -> FarStates:
        """One text out of rows that begin with one prefix and have one more place each."""

        def join(parts: list[Tensor]) -> Tensor:
            return torch.cat([parts[0][:1, :num_prefix], *(part[None, :, -1] for part in parts)], 1)

        layers = [
            (join([k for k, _ in layer]), join([v for _, v in layer]))
            for layer in zip(*(batch.layers for batch in batches), strict=True)
        ]
        return FarStates(join([batch.positions_BF for batch in batches]), layers)

    @property
    def num_places(self) -> int:
        return self.positions_BF.shape[1]

    @property
    def num_heads(self) -> int:
        return self.layers[0][0].shape[2]

    def expand(self, num_rows: int) -> FarStates:
        """The same in every row: views, no copies."""

        def rows(x_1F: Tensor) -> Tensor:
            return x_1F.expand(num_rows, *x_1F.shape[1:])

        return FarStates(rows(self.positions_BF), [(rows(k), rows(v)) for k, v in self.layers])

    def first(self, num_places: int) -> FarStates:
        """Those of the first places: views, no copies."""
        layers = [(k[:, :num_places], v[:, :num_places]) for k, v in self.layers]
        return FarStates(self.positions_BF[:, :num_places], layers)

    def choose(self, places_BF: Tensor) -> FarStates:
        """For each row, the places it may see, out of those of the one text that is here."""
        if places_BF.shape == (1, self.num_places):
            return self

        def pick(x_1F: Tensor) -> Tensor:
            index = places_BF.to(x_1F.device).flatten()
            return x_1F[0].index_select(0, index).unflatten(0, places_BF.shape)

        return FarStates(pick(self.positions_BF), [(pick(k), pick(v)) for k, v in self.layers])
