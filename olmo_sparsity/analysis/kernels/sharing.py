"""Let the rows of a transformers model attend to the same far states without copies of them.

Place in the flow: far states → **attention of every layer to them** → `HuggingFaceLM.hidden`.
Without gradients, for models whose attention runs through transformers' AttentionInterface. With
gradients, documents of a training sequence are kept apart at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from olmo_sparsity.analysis.kernels.attention import attend_to_far, attend_within
from olmo_sparsity.analysis.kernels.far_states import FarStates

_HARMLESS = frozenset({"dropout", "is_causal", "sliding_window", "position_ids", "use_cache"})
"""Arguments that change nothing here: the own places of a row are causal, and a text that is longer
than a sliding window is refused."""

_sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
_shared: ContextVar[tuple[FarStates, Tensor, set[torch.device]]] = ContextVar("shared")


class FarCache(DynamicCache):
    """Hands out far states before the keys and values of the row, and keeps nothing, so that a
    layer may be computed again."""

    def __init__(self, far: FarStates) -> None:
        super().__init__()
        self.far = far

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.far.num_places

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.far.num_places

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.far.num_places + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        far_k, far_v = (part.transpose(1, 2) for part in self.far.layers[layer_idx])
        return torch.cat((far_k, key_states), 2), torch.cat((far_v, value_states), 2)


class SharedCache(FarCache):
    """Counts the far places, but hands out the keys and values of the row alone."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@contextmanager
def attending_to(far: FarStates, mask: Tensor) -> Iterator[None]:
    """Attention of all layers to `far` and, causally, to the rows' own places, in this thread.
    `mask`: what the model is given for the own places; a model that changes it is refused."""
    token = _shared.set((far, mask, set()))
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
    documents = more.pop("documents", None)
    if documents is not None:
        assert attention_mask is None
        assert scaling in (None, query.shape[-1] ** -0.5)
        mixed = attend_within(query, key, value, documents, dropout_p=more.get("dropout", 0.0))
        return mixed.transpose(1, 2).contiguous(), None
    shared = _shared.get(None)
    if shared is None:
        return _sdpa(module, query, key, value, attention_mask, scaling=scaling, **more)
    far, mask, copied = shared
    unknown = [name for name, given in more.items() if given is not None and name not in _HARMLESS]
    if unknown or not _is_same(attention_mask, mask, copied):
        raise NotImplementedError(f"attention with {unknown or 'another mask'}")
    far_k, far_v = (part.transpose(1, 2) for part in far.layers[module.layer_idx])
    mixed = attend_to_far(query, key, value, far_k, far_v, far.bias_BF, scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _is_same(given: Tensor | None, mask: Tensor, copied: set[torch.device]) -> bool:
    """With a device map, accelerate copies the mask for each layer on another device. The numbers
    of the first copy there are compared, which waits for that device."""
    if given is mask or given is None or given.device == mask.device:
        return given is mask
    if given.shape != mask.shape or given.dtype != mask.dtype:
        return False
    if given.device not in copied and torch.equal(given.to(mask.device), mask):
        copied.add(given.device)
    return given.device in copied


# Under the name that models have anyway: settings of a model are not changed, not even for a while.
AttentionInterface.register("sdpa", _attend)
