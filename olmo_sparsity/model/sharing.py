"""Let the rows of a transformers model attend to the same far states without copies of them.

Place in the flow: far states → **attention of every layer to them** → `HuggingFaceLM.hidden`.
Without gradients, for models whose attention runs through transformers' AttentionInterface.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from olmo_sparsity.model.far_states import FarStates
from olmo_sparsity.model.layers import attend_to_far

_HARMLESS = frozenset({"dropout", "is_causal", "sliding_window", "position_ids", "use_cache"})
"""Arguments that change nothing here: the own places of a row are causal, and a text that is longer
than a sliding window is refused."""

_sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
_shared: ContextVar[tuple[FarStates, Tensor]] = ContextVar("shared")


class SharedCache(DynamicCache):
    """Counts the far places, but hands out the keys and values of the row alone."""

    def __init__(self, num_places: int) -> None:
        super().__init__()
        self.num_places = num_places

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_places

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@contextmanager
def attending_to(far: FarStates, mask: Tensor) -> Iterator[None]:
    """Attention of all layers to `far` and, causally, to the rows' own places, in this thread.
    `mask`: what the model is given for the own places; a model that changes it is refused."""
    token = _shared.set((far, mask))
    try:
        yield
    finally:
        _shared.reset(token)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    shared = _shared.get(None)
    if shared is None:
        return _sdpa(module, query, key, value, attention_mask, scaling=scaling, **more)
    far, mask = shared
    unknown = [name for name, given in more.items() if given is not None and name not in _HARMLESS]
    if attention_mask is not mask or unknown:
        raise NotImplementedError(f"attention with {unknown or 'another mask'}")
    far_k, far_v = (part.transpose(1, 2) for part in far.layers[module.layer_idx])
    mixed = attend_to_far(query, key, value, far_k, far_v, far.bias_BF, scaling)
    return mixed.transpose(1, 2).contiguous(), None


# Under the name that models have anyway: settings of a model are not changed, not even for a while.
AttentionInterface.register("sdpa", _attend)
