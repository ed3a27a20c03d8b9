"""Give kept states of distant tokens to models of transformers, as the caches that these take.

A cache of transformers grows with each call, in place. Kept states must stay as they are and serve
many calls, so two caches here keep nothing of what a layer adds:

                      a layer gets back from `update`
    growing_cache     states so far + its own, which are kept for the next call
    DistantCache      distant states + its own, joined anew for each row
    SharedCache       its own alone; our attention adds the distant ones (own_attention.py)

transformers has (B, heads, tokens, width), `DistantStates` have (B, tokens, heads, width).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from olmo_sparsity.models.distant_states import DistantStates


def growing_cache(earlier: DistantStates | None) -> Cache:
    """Return a cache that begins with copies of kept states, and grows with each forward pass.
    None: it begins empty."""
    cache = DynamicCache()
    if earlier is not None:
        for index, (k_BFHK, v_BFHK) in enumerate(earlier.layers):
            cache.update(k_BFHK.transpose(1, 2), v_BFHK.transpose(1, 2), index)
    return cache


def states_in(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of each layer in a growing cache, as `DistantStates` have them."""
    layers: list[Any] = cache.layers
    return [(layer.keys.transpose(1, 2), layer.values.transpose(1, 2)) for layer in layers]


class DistantCache(DynamicCache):
    """A cache that puts distant states before the keys and values of a row, and keeps nothing. So a
    layer may be computed again in a backward pass."""

    def __init__(self, distant: DistantStates) -> None:
        super().__init__()
        self.distant = distant

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.distant.num_tokens

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.distant.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.distant.num_tokens + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        distant_k, distant_v = (states.transpose(1, 2) for states in self.distant.layers[layer_idx])
        return torch.cat((distant_k, key_states), 2), torch.cat((distant_v, value_states), 2)


class SharedCache(DistantCache):
    """A cache that counts the distant tokens, and leaves them to our attention: it returns the keys
    and values of the row alone."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states
