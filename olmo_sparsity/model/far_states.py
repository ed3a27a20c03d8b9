"""What a model has made of tokens far back: keys and values of every layer.

Place in the flow: a model's `far_states` → some of them → its `hidden(far=…)`. A window that looks
back at k far places of a long text costs its own places only, however long the text.

Dimension key: B rows, F far places, H heads of keys, K width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FarStates:
    positions_BF: Tensor
    layers: list[tuple[Tensor, Tensor]]
    """k_BFHK, rotated, and v_BFHK of each layer."""

    @property
    def num_places(self) -> int:
        return self.positions_BF.shape[1]

    def choose(self, places_BF: Tensor) -> FarStates:
        """For each row, the places it may see, out of those of the one text that is here."""

        def pick(x_1F: Tensor) -> Tensor:
            index = places_BF.to(x_1F.device).flatten()
            return x_1F[0].index_select(0, index).unflatten(0, places_BF.shape)

        return FarStates(pick(self.positions_BF), [(pick(k), pick(v)) for k, v in self.layers])
