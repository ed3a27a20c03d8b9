"""Run our attention in models of transformers, whose layers look attention up by name in its
AttentionInterface. Ours is registered under names of its own, and computes one of:

- attention within documents, if a layer gets an argument `documents`;
- attention to distant states that all rows share (inside `attending_to`);
- the family's eager attention, whose weights are collected (inside `reading_weights`).

The way of a call:

    with attending_to(distant, views, configs):     sets the task of this thread, and our name in
        model(...)                                  the configurations of the layers
          └─ each layer → transformers → `_attend` → the task

Other threads may run the model meanwhile: they have no task, and `_attend` calls the attention that
the model usually has. huggingface/model.py calls `attending_to`, `reading_weights` and
`own_attention`. Importing this module registers our names.

Dimension key: B rows, L tokens of a row, F distant tokens, H heads, K width of a head.
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
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from olmo_sparsity.models.distant_attention import attend_to_distant
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.document_attention import Documents, attend_within
from olmo_sparsity.models.huggingface.attention_names import (
    OWN_IN_PLACE_OF,
    REPLACED_BY_OWN,
)
from olmo_sparsity.models.huggingface.layer_views import LayerView

_HARMLESS_OPTIONS = frozenset(
    {"dropout", "is_causal", "sliding_window", "position_ids", "use_cache"}
)
"""Options of a layer that change nothing here, because its mask says what it sees of its row."""


# --- what a thread asks of attention --------------------------------------------------------------


@dataclass
class _ShareStates:
    """The task to attend to shared distant states in addition to the row."""

    distant: DistantStates
    views: Sequence[LayerView]
    """What each layer sees of them."""

    num_calls: int = 0
    """How many layers have called our attention so far."""


@dataclass
class _CollectWeights:
    """The task to collect the attention weights of each layer."""

    weights: list[Tensor] = field(default_factory=list)


_task: ContextVar[_ShareStates | _CollectWeights | None] = ContextVar("task", default=None)
"""The task of attention in this thread; None where a model runs as usual."""


@contextmanager
def attending_to(
    distant: DistantStates, views: Sequence[LayerView], configs: Sequence[Any]
) -> Iterator[None]:
    """Let all layers attend to `distant` and to the rows' own tokens inside the block, in this
    thread.

    Args:
        views: What each layer sees.
        configs: The configurations of the layers.
    """
    task = _ShareStates(distant, views)
    with _with_task(task, configs):
        yield
    # A layer that does not use AttentionInterface would leave distant tokens out without a word.
    if task.num_calls < len(views):
        raise NotImplementedError(f"{task.num_calls} of {len(views)} layers attended to them")


@contextmanager
def reading_weights(configs: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Let layers compute attention weights inside the block, in this thread. Yield a list to which
    each layer appends its own."""
    task = _CollectWeights()
    with _with_task(task, configs):
        yield task.weights


@contextmanager
def _with_task(task: _ShareStates | _CollectWeights, configs: Sequence[Any]) -> Iterator[None]:
    """Give layers with these configurations a task inside the block, in this thread."""
    token = _task.set(task)
    try:
        with own_attention(configs):
            yield
    finally:
        _task.reset(token)


# --- our name in the configuration of a model -----------------------------------------------------

_switching = threading.Lock()
"""Held while a configuration gets our name or its usual one again."""

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
    """Let layers with these configurations call our attention inside the block. The last thread
    that leaves restores the usual one."""
    with _switching:
        # Attention of other kinds, such as flash attention, is not replaced.
        replaced = [
            config
            for config in configs
            if config._attn_implementation in OWN_IN_PLACE_OF or id(config) in _users
        ]
        for config in replaced:
            _users[id(config)] = _users.get(id(config), 0) + 1
            name = config._attn_implementation
            # It has our name already if another thread runs the model.
            config._attn_implementation_internal = OWN_IN_PLACE_OF.get(name, name)
    try:
        yield
    finally:
        with _switching:
            for config in replaced:
                _users[id(config)] -= 1
                if not _users[id(config)]:
                    del _users[id(config)]
                    own_name = config._attn_implementation
                    config._attn_implementation_internal = REPLACED_BY_OWN[own_name]


# --- the attention function -----------------------------------------------------------------------


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    documents: Documents | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return attention (B, L, H, K) and its weights, as AttentionInterface requires. This is the
    function that layers call under our names. What it computes depends on `documents` and on the
    task of this thread.

    Args:
        module: The attention module of a layer.
        query, key, value: (B, heads, L, K).
        scaling: The factor of scores; None means K ** −0.5.
        options: What the layer passes besides, such as dropout.
    """
    if documents is not None:
        assert scaling in (None, query.shape[-1] ** -0.5)
        # Layers with a window have a mask, which goes by position IDs and hides later tokens.
        dropout_p = options.get("dropout", 0.0)
        mixed = attend_within(query, key, value, documents, attention_mask, dropout_p)
        return _as_transformers_returns(mixed), None

    task = _task.get()
    if isinstance(task, _ShareStates):
        mixed = _attend_with_shared_states(
            task, module.layer_idx, query, key, value, attention_mask, scaling, options
        )
        return _as_transformers_returns(mixed), None

    if isinstance(task, _CollectWeights):
        # Fused kernels return no weights, so the family's eager attention computes them.
        eager = _eager_attention_of(module)
        mask = _in_numbers(attention_mask, query.dtype)
        # Unlike fused ones, most eager functions have no default of this factor.
        if scaling is None:
            scaling = module.head_dim**-0.5
        mixed, weights = eager(module, query, key, value, mask, scaling=scaling, **options)
        task.weights.append(weights)
        return mixed, None

    # Another thread has set our attention, and this one runs the model as usual.
    usual = _usual_attention_of(module)
    return usual(module, query, key, value, attention_mask, scaling=scaling, **options)


def _usual_attention_of(module: Any) -> Any:
    """Return the attention function that a layer calls while ours is not set."""
    own_name = module.config._attn_implementation
    # By now the other thread may have restored the usual name.
    usual_name = REPLACED_BY_OWN.get(own_name, own_name)
    if usual_name == "eager":  # which each family defines for itself
        return _eager_attention_of(module)
    return ALL_ATTENTION_FUNCTIONS[usual_name]


def _eager_attention_of(module: Any) -> Any:
    """Return the attention function of the layer's family that also returns weights. It is in the
    Python module that defines the layer's class, or a class that this one inherits from."""
    for parent in type(module).__mro__:
        eager = getattr(sys.modules.get(parent.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise NotImplementedError(f"{type(module).__name__} has no eager attention")


def _in_numbers(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as eager attention takes it: numbers that are added to scores. The mask of the
    fused kernel may have truth values instead."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill_(~mask, torch.finfo(dtype).min)


def _as_transformers_returns(mixed: Tensor) -> Tensor:
    """Return (B, L, H, K) of attention (B, H, L, K)."""
    return mixed.transpose(1, 2).contiguous()


def _attend_with_shared_states(
    task: _ShareStates,
    layer_index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    options: dict[str, Any],
) -> Tensor:
    """Return attention (B, H, L, K) of a layer to the shared states of distant tokens, as far as
    the layer sees them, and to the row's own tokens. Raise NotImplementedError if the layer asks
    for more."""
    # Counted, so that `attending_to` notices layers that did not come here.
    task.num_calls += 1
    view = task.views[layer_index]
    _check_usual_attention(mask, view.mask, options)
    layer = task.distant.layers[layer_index]
    distant_k, distant_v = (states[:, view.first_distant :].transpose(1, 2) for states in layer)
    # None lets `attend_to_distant` build the causal bias, which is the same for all layers.
    local_bias = None if view.sees_all_earlier else mask
    return attend_to_distant(
        query, key, value, distant_k, distant_v, view.bias, scaling, local_bias
    )


def _check_usual_attention(
    mask: Tensor | None, expected_mask: Tensor, options: dict[str, Any]
) -> None:
    """Raise NotImplementedError if a layer asks for more than our attention computes, such as a cap
    of scores or another mask. The trial of a model then shows that it cannot share distant
    states."""
    unknown = [
        name
        for name, value in options.items()
        if value is not None and name not in _HARMLESS_OPTIONS
    ]
    if unknown or not _is_same_mask(mask, expected_mask):
        raise NotImplementedError(f"attention with {unknown or 'another mask'}")


def _is_same_mask(passed: Tensor | None, mask: Tensor | None) -> bool:
    """Return whether a model has passed its mask on unchanged. If a device map spreads its layers,
    accelerate copies the mask to each device; only then are values compared."""
    if passed is mask or passed is None or mask is None or passed.device == mask.device:
        return passed is mask
    return passed.dtype == mask.dtype and torch.equal(passed.to(mask.device), mask)


# transformers builds masks by the same name, so ours takes those of the function that it replaces.
for _own_name, _replaced_name in REPLACED_BY_OWN.items():
    AttentionInterface.register(_own_name, _attend)
    AttentionMaskInterface.register(_own_name, ALL_MASK_ATTENTION_FUNCTIONS[_replaced_name])
