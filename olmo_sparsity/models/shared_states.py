"""Run our attention in models of transformers, whose layers look attention up by name in its
AttentionInterface. Ours is registered under a name of its own (`_attend`), and computes one of:

- attention to distant states that all rows share (`attending_to`);
- attention within documents (an argument `documents`);
- the family's eager attention, whose weights are collected (`reading_weights`).

The configuration of a model names our attention only inside `own_attention`. Other threads may run
the model meanwhile: for them `_attend` calls the attention that the model usually has.

Caches that hand out kept states in place of a growing cache are here, too.

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

_HARMLESS_OPTIONS = frozenset(
    {"dropout", "is_causal", "sliding_window", "position_ids", "use_cache"}
)
"""Options of a layer that change nothing here: what it sees of its row is in its mask."""

_OWN = {usual: own for own, usual in USUAL.items()}
"""Our name for each usual kernel."""


@dataclass(frozen=True)
class LayerView:
    """The places that one layer sees: a mask over the rows' own, and a bias over distant ones."""

    mask: Tensor
    """The mask over the rows' own places, as it is passed to the model. A model that passes another
    one on to its layers is rejected."""

    bias: Tensor | None = None
    """The bias over distant places: (B, F), or (B, L, F) where queries differ."""

    first: int = 0
    """The first distant place in `bias`. Those before it are outside of the layer's window."""

    is_causal: bool = True
    """Whether queries see all of their row's places before them, without a window."""

    @staticmethod
    def through(
        window: AttentionWindow, mask: Tensor, distant: DistantStates, positions_BL: Tensor
    ) -> LayerView:
        """Return the view through a window, which hides some places from some queries."""
        hides_BLF = window.hides(positions_BL, distant.positions_BF)
        # Places at the beginning that are hidden from all queries are left out, so that they cost
        # nothing.
        is_hidden_F = hides_BLF.flatten(0, 1).all(0)
        first = int(is_hidden_F.long().cumprod(0).sum())
        bias_BF = distant.bias_BF
        if bias_BF is None:
            bias_BF = torch.zeros(hides_BLF.shape[::2], dtype=torch.float, device=mask.device)
        bias_BLF = bias_BF[:, None, first:].expand(-1, hides_BLF.shape[1], -1)
        lowest = torch.finfo(torch.float).min
        return LayerView(mask, bias_BLF.masked_fill(hides_BLF[..., first:], lowest), first, False)


@dataclass
class _SharedStates:
    """The task of attention in a forward pass: attend to distant states, too."""

    distant: DistantStates
    views: Sequence[LayerView]
    """The view that each layer has of them."""

    num_calls: int = 0
    """How many layers have called our attention."""


@dataclass
class _CollectedWeights:
    """The task of attention in a forward pass: collect the weights of each layer."""

    weights: list[Tensor] = field(default_factory=list)


_task: ContextVar[_SharedStates | _CollectedWeights | None] = ContextVar("task", default=None)
"""What this thread asks of attention."""


class DistantCache(DynamicCache):
    """A cache that puts distant states before the keys and values of a row, and keeps nothing. So
    a layer may be computed again in a backward pass."""

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
    """A cache that counts the distant places, and leaves them to our attention: it returns the keys
    and values of the row alone."""

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
"""How many threads run layers of a configuration with our attention, by the configuration's id.
Models may share one."""


@contextmanager
def own_attention(configs: Sequence[Any]) -> Iterator[None]:
    """Inside, layers with these configurations call our attention. The last thread that leaves
    restores the usual one."""
    with _switching:
        configs = [c for c in configs if c._attn_implementation in _OWN or id(c) in _users]
        for config in configs:
            _users[id(config)] = _users.get(id(config), 0) + 1
            name = config._attn_implementation
            # It has our name already if another thread runs the model.
            config._attn_implementation_internal = _OWN.get(name, name)
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
def _with_task(task: _SharedStates | _CollectedWeights, configs: Sequence[Any]) -> Iterator[None]:
    """Inside, layers with these configurations do the task, in this thread."""
    token = _task.set(task)
    try:
        with own_attention(configs):
            yield
    finally:
        _task.reset(token)


@contextmanager
def attending_to(
    distant: DistantStates, views: Sequence[LayerView], configs: Sequence[Any]
) -> Iterator[None]:
    """Inside, all layers attend to `distant` and to the rows' own places, in this thread."""
    task = _SharedStates(distant, views)
    with _with_task(task, configs):
        yield
    # A layer that does not use AttentionInterface would leave distant places out without a word.
    if task.num_calls < len(views):
        raise NotImplementedError(f"{task.num_calls} of {len(views)} layers attended to them")


@contextmanager
def reading_weights(configs: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Inside, layers compute attention weights, in this thread. Yield a list to which each layer
    appends its own."""
    task = _CollectedWeights()
    with _with_task(task, configs):
        yield task.weights


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return attention (B, L, H, K) and its weights, as AttentionInterface requires: the function
    that is registered under our names. What it computes depends on `documents` and the task."""
    documents = options.pop("documents", None)
    if documents is not None:
        assert scaling in (None, query.shape[-1] ** -0.5)
        # Layers with a window have a mask, which goes by position IDs and hides later places.
        dropout_p = options.get("dropout", 0.0)
        mixed = attend_within(query, key, value, documents, attention_mask, dropout_p)
        return mixed.transpose(1, 2).contiguous(), None

    task = _task.get()
    if task is None:  # another thread has set our attention, and this one runs the model as usual
        name = module.config._attn_implementation
        name = USUAL.get(name, name)
        usual = _eager(module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        return usual(module, query, key, value, attention_mask, scaling=scaling, **options)

    if isinstance(task, _SharedStates):
        task.num_calls += 1
        view = task.views[module.layer_idx]
        _check_usual_attention(attention_mask, view.mask, options)
        layer = task.distant.layers[module.layer_idx]
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
    task.weights.append(weights)
    return mixed, None


def _check_usual_attention(
    mask: Tensor | None, expected_mask: Tensor, options: dict[str, Any]
) -> None:
    """Raise if a layer asks for more than ours computes, such as a cap of scores or its own mask.
    The trial of a model then shows that it cannot share distant states."""
    unknown = [
        name
        for name, value in options.items()
        if value is not None and name not in _HARMLESS_OPTIONS
    ]
    if unknown or not _is_same(mask, expected_mask):
        raise NotImplementedError(f"attention with {unknown or 'another mask'}")


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as eager attention takes it, with numbers to add to scores. The mask of the
    fused kernel may have truth values."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill_(~mask, torch.finfo(dtype).min)


def _eager(module: Any) -> Any:
    """Return the family's own attention that also returns weights. It is in the module that defines
    the class of the layer, or one that this class inherits from."""
    for parent in type(module).__mro__:
        eager = getattr(sys.modules.get(parent.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise NotImplementedError(f"{type(module).__name__} has no eager attention")


def _is_same(passed: Tensor | None, mask: Tensor | None) -> bool:
    """Return whether a model has passed its mask on unchanged. If a device map spreads its layers,
    accelerate copies the mask to each device; only then are values compared."""
    if passed is mask or passed is None or mask is None or passed.device == mask.device:
        return passed is mask
    return passed.dtype == mask.dtype and torch.equal(passed.to(mask.device), mask)


for _name, _usual in USUAL.items():
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_usual])
