"""Run our attention in models of transformers whose attention goes through its AttentionInterface,
where ours has a name of its own: over distant states that all rows share, within documents, or
returning its weights. A model is given it only inside `own_attention`; other threads, which may run
the model meanwhile, get what is registered under the model's usual name.

Dimension key: B rows, L tokens of a row, F distant places.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from olmo_sparsity.models.attention import (
    USUAL,
    AttentionWindow,
    attend_within,
)
from olmo_sparsity.models.distant_attention import attend_to_distant
from olmo_sparsity.models.distant_states import DistantStates

_HARMLESS = frozenset({"dropout", "is_causal", "sliding_window", "position_ids", "use_cache"})
"""Arguments that change nothing here: what a layer sees of its row is in its mask."""

_OWN = {usual: own for own, usual in USUAL.items()}
"""Our name for each usual kernel."""


@dataclass(frozen=True)
class LayerView:
    """What one layer sees: a mask over the rows' own places, and a bias over distant ones."""

    mask: Tensor
    """As the model is given it for the own places of rows; a model that changes it is rejected."""

    bias: Tensor | None = None
    """The part over distant places: (B, F), or (B, L, F) where queries differ."""

    first: int = 0
    """The distant places before it are outside of the layer's window, and not in `bias`."""

    is_causal: bool = True
    """Whether rows see all of their own places up to each query, without a window."""

    @staticmethod
    def through(
        window: AttentionWindow, mask: Tensor, distant: DistantStates, positions_BL: Tensor
    ) -> LayerView:
        """Return the view through a window, which hides some places from some queries."""
        hides_BLF = window.hides(positions_BL, distant.positions_BF)
        # The number of places at the beginning that are hidden from all queries: left out, they
        # cost nothing.
        is_hidden_F = hides_BLF.flatten(0, 1).all(0)
        first = int(is_hidden_F.long().cumprod(0).sum())
        bias_BF = distant.bias_BF
        if bias_BF is None:
            bias_BF = torch.zeros(hides_BLF.shape[::2], dtype=torch.float, device=mask.device)
        bias_BLF = bias_BF[:, None, first:].expand(-1, hides_BLF.shape[1], -1)
        lowest = torch.finfo(torch.float).min
        return LayerView(mask, bias_BLF.masked_fill(hides_BLF[..., first:], lowest), first, False)


@dataclass
class _Wanted:
    """What this thread requires of the attention of a forward pass."""

    distant: DistantStates | None = None
    """States that all rows attend to; None if the weights of attention are read."""

    views: Sequence[LayerView] = ()
    """Keys and values of each layer."""

    weights: list[Tensor] = field(default_factory=list)
    """Attention weights of the layers that were called."""

    num_calls: int = 0


_wanted: ContextVar[_Wanted | None] = ContextVar("wanted", default=None)


class DistantCache(DynamicCache):
    """Hands out distant states before the keys and values of the row, and keeps nothing, so that a
    layer may be computed again."""

    def __init__(self, distant: DistantStates) -> None:
        super().__init__()
        self.distant = distant

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.distant.num_places

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.distant.num_places

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.distant.num_places + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        distant_k, distant_v = (part.transpose(1, 2) for part in self.distant.layers[layer_idx])
        return torch.cat((distant_k, key_states), 2), torch.cat((distant_v, value_states), 2)


class SharedCache(DistantCache):
    """Counts the distant places, but hands out the keys and values of the row alone."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


_switching = threading.Lock()
# A process that is forked while another thread switches would find the lock held for ever.
os.register_at_fork(
    before=_switching.acquire,
    after_in_parent=_switching.release,
    after_in_child=_switching.release,
)
_users: dict[int, int] = {}
"""How many threads want our attention of a configuration, by its id. Models may share one."""


@contextmanager
def own_attention(configs: Sequence[Any]) -> Iterator[None]:
    """Inside, layers with these configurations call ours in place of their usual attention."""
    with _switching:
        configs = [c for c in configs if c._attn_implementation in _OWN or id(c) in _users]
        for config in configs:
            _users[id(config)] = _users.get(id(config), 0) + 1
            name = config._attn_implementation
            config._attn_implementation_internal = _OWN.get(name, name)  # or another thread has
    try:
        yield
    finally:
        with _switching:
            for config in configs:
                _users[id(config)] -= 1
                if not _users[id(config)]:
                    del _users[id(config)]
                    config._attn_implementation_internal = USUAL[config._attn_implementation]


@contextmanager
def _wanting(wanted: _Wanted, configs: Sequence[Any]) -> Iterator[_Wanted]:
    token = _wanted.set(wanted)
    try:
        with own_attention(configs):
            yield wanted
    finally:
        _wanted.reset(token)


@contextmanager
def attending_to(
    distant: DistantStates, views: Sequence[LayerView], configs: Sequence[Any]
) -> Iterator[None]:
    """Inside, all layers attend to `distant` and to the rows' own places, in this thread."""
    with _wanting(_Wanted(distant, views), configs) as wanted:
        yield
    # A layer that does not use AttentionInterface would leave distant places out without a word.
    if wanted.num_calls < len(views):
        raise NotImplementedError(f"{wanted.num_calls} of {len(views)} layers attended to them")


@contextmanager
def reading_weights(configs: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Inside, layers compute attention weights, in this thread. Yield the list of them, which grows
    layer by layer."""
    with _wanting(_Wanted(), configs) as wanted:
        yield wanted.weights


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as AttentionInterface requires. This is what is registered under our names."""
    documents = options.pop("documents", None)
    if documents is not None:
        assert scaling in (None, query.shape[-1] ** -0.5)
        # The mask, of layers with a window, goes by position IDs and hides later places.
        dropout_p = options.get("dropout", 0.0)
        mixed = attend_within(query, key, value, documents, attention_mask, dropout_p)
        return mixed.transpose(1, 2).contiguous(), None
    wanted = _wanted.get()
    if wanted is None:  # another thread has set our attention, and this one runs the model as usual
        name = module.config._attn_implementation
        name = USUAL.get(name, name)
        usual = _eager(module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        return usual(module, query, key, value, attention_mask, scaling=scaling, **options)
    wanted.num_calls += 1
    if wanted.distant is not None:
        view = wanted.views[module.layer_idx]
        _refuse_other_attention(attention_mask, view.mask, options)
        layer = wanted.distant.layers[module.layer_idx]
        distant_k, distant_v = (part[:, view.first :].transpose(1, 2) for part in layer)
        local_bias = None if view.is_causal else attention_mask
        mixed = attend_to_distant(
            query, key, value, distant_k, distant_v, view.bias, scaling, local_bias
        )
        return mixed.transpose(1, 2).contiguous(), None
    # Fused kernels return no weights, so the family's eager attention computes them.
    mixed, weights = _eager(module)(
        module,
        query,
        key,
        value,
        _additive(attention_mask, query.dtype),
        scaling=module.head_dim**-0.5 if scaling is None else scaling,
        **options,
    )
    wanted.weights.append(weights)
    return mixed, None


def _refuse_other_attention(
    mask: Tensor | None, expected_mask: Tensor, options: dict[str, Any]
) -> None:
    """Raise if a layer asks for more than ours computes, such as a cap of scores or its own mask.
    The trial of a model then shows that it cannot share distant states."""
    unknown = [name for name, value in options.items() if value is not None]
    unknown = [name for name in unknown if name not in _HARMLESS]
    if unknown or not _is_same(mask, expected_mask):
        raise NotImplementedError(f"attention with {unknown or 'another mask'}")


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask that eager attention takes: of numbers to add, where that of the fused kernel
    may be of truth values."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill_(~mask, torch.finfo(dtype).min)


def _eager(module: Any) -> Any:
    """Return the attention with weights that the family itself has, in the module of its class or
    of one that it inherits from."""
    for kind in type(module).__mro__:
        if eager := getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None):
            return eager
    raise NotImplementedError(f"{type(module).__name__} has no eager attention")


def _is_same(passed: Tensor | None, mask: Tensor | None) -> bool:
    """Return whether the model has passed on its mask unchanged. With a device map, accelerate
    copies the mask for each layer on another device, where values are compared."""
    if passed is mask or passed is None or mask is None or passed.device == mask.device:
        return passed is mask
    return passed.dtype == mask.dtype and torch.equal(passed.to(mask.device), mask)


for _name, _usual in USUAL.items():
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_usual])
