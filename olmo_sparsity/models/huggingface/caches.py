"""Pass `DistantStates` to models of transformers, in the form of the caches that these take.

A layer of transformers hands the keys and values of its row to the `update` of a cache, and attends
to what `update` returns. For a row of 3 tokens after 100 distant ones:

                      `update` returns keys of                   after the call the cache has
    growing_cache     100 + 3 tokens                             103: the text is read in chunks
    DistantCache      100 + 3 tokens, joined anew in each call   100, as before
    SharedCache       3 tokens                                   100, as before

With `SharedCache` our own attention (own_attention.py) adds the distant tokens, without copies of
their states. The last two serve many calls with the same states, so they must not grow, as a cache
of transformers otherwise does.

The tensors of transformers are (B, heads, tokens, width); those of `DistantStates` are (B, tokens,
heads, width).

Dimension key: B rows, F distant tokens, G heads of keys and values, K width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from olmo_sparsity.models.distant_states import DistantStates


def growing_cache(earlier: DistantStates | None) -> Cache:
    """Return a cache that begins with copies of the states of `earlier`, or empty if it is None,
    and grows with each forward pass."""
    cache = DynamicCache()
    if earlier is not None:
        for index, (k_BFGK, v_BFGK) in enumerate(earlier.layers):
            cache.update(k_BFGK.transpose(1, 2), v_BFGK.transpose(1, 2), index)
    return cache


def states_in(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of each layer in a growing cache, as `DistantStates` have them."""
    layers: list[Any] = cache.layers
    return [(layer.keys.transpose(1, 2), layer.values.transpose(1, 2)) for layer in layers]


class DistantCache(DynamicCache):
    """A cache that puts distant states before the keys and values of a row, and keeps nothing of
    the row. So a layer may be computed again in a backward pass, which calls `update` twice."""

    def __init__(self, distant: DistantStates) -> None:
        super().__init__()
        self.distant = distant

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the row."""
        return self.distant.num_tokens

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the index of the row's first token among all keys, from which transformers builds
        the causal mask."""
        return self.distant.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys of a mask for a row of this length, and the index of the first
        key."""
        return self.distant.num_tokens + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the distant tokens and then of the row, for one layer."""
        distant_k, distant_v = (states.transpose(1, 2) for states in self.distant.layers[layer_idx])
        return torch.cat((distant_k, key_states), 2), torch.cat((distant_v, value_states), 2)


class SharedCache(DistantCache):
    """A cache that counts the distant tokens, and leaves them to our attention: it returns the keys
    and values of the row alone."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the row alone, as they are."""
        return key_states, value_states
