"""Hold keys and values of all tokens of a text, in each layer, while they are computed in chunks.

Place in the flow: `InferringOLMo.distant_states` (inference.py) computes a chunk →
**`StateBuffer`** → the next chunk attends to all tokens before it. A text of 6 tokens in chunks of
4, in a model of two layers:

    buffer = StateBuffer(num_tokens=6)
    buffer.write(0, 0, projections of 0 … 3)     buffer.write(1, 0, …)
    buffer.write(0, 4, projections of 4 and 5)   buffer.first_tokens(0, 4)   k, v of 0 … 3, layer 0
    buffer.write(1, 4, …)                        buffer.first_tokens(1, 4)
    buffer.layers                                k, v of all 6 tokens in each layer

The memory for all tokens is taken once. Joining chunks would copy all states for each chunk.

Dimension key: B rows, L tokens of a chunk, G heads of keys and values, K width of a head.
"""

from __future__ import annotations

from torch import Tensor

from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.olmo.projections import Projections


class StateBuffer:
    """Keys and values of all tokens of a text, in each layer."""

    def __init__(self, num_tokens: int, earlier: DistantStates | None = None) -> None:
        """Begin with the states of `earlier`, which are the first of `num_tokens`."""
        self.num_tokens = num_tokens
        self.earlier = earlier
        self.layers: list[tuple[Tensor, Tensor]] = []
        """(keys, values) of each layer that has been written to, (B, num_tokens, G, K)."""

    def write(self, layer_index: int, start: int, projections: Projections) -> None:
        """Store keys and values of a chunk in one layer. The first chunk must write the layers in
        order. `start`: the index in the text of the first token of the chunk."""
        if layer_index == len(self.layers):
            self._add_layer(projections)
        all_k, all_v = self.layers[layer_index]
        end = start + projections.k_BLGK.shape[1]
        all_k[:, start:end] = projections.k_BLGK
        all_v[:, start:end] = projections.v_BLGK

    def first_tokens(self, layer_index: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first tokens of the text in one layer, as views."""
        all_k, all_v = self.layers[layer_index]
        return all_k[:, :num_tokens], all_v[:, :num_tokens]

    def _add_layer(self, projections: Projections) -> None:
        """Add the next layer, with room for all tokens and the states of `earlier` filled in. Only
        projections show the dtype and the number of heads."""
        _, k, v = projections
        all_k = k.new_empty(k.shape[0], self.num_tokens, *k.shape[2:])
        all_v = v.new_empty(v.shape[0], self.num_tokens, *v.shape[2:])
        if self.earlier is not None:
            num_earlier = self.earlier.num_tokens
            earlier_k, earlier_v = self.earlier.layers[len(self.layers)]
            all_k[:, :num_earlier] = earlier_k
            all_v[:, :num_earlier] = earlier_v
        self.layers.append((all_k, all_v))
