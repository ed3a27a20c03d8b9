"""Run our attention in models of transformers, whose layers call attention by a name.

The name is in the configuration of a layer, such as "sdpa", and AttentionInterface of transformers
has the function of each name. Ours, `_attend`, is registered under names of its own
(attention_names.py) when this module is imported. It computes one of

- attention within documents, if a layer gets an argument `documents` (`using_own_attention`);
- attention to distant states that all rows share (`attending_to`);
- the family's eager attention, whose weights are collected (`reading_weights`).

huggingface/model.py opens one of these three contexts and runs the model in it. The way of a call:

    with attending_to(distant, views, configs):     1. sets the task of this thread
                                                    2. writes our name into the configurations
        model(...)
          └─ each layer → transformers → `_attend`  3. does the task
                                                    4. restores the usual names

A configuration is seen by all threads, a task by one. So another thread that runs the model
meanwhile comes to `_attend` without a task: it calls the attention that the model usually has.

Dimension key: B rows, L tokens of a row, F distant tokens, H heads, G heads of keys and values, K
width of a head.
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
from olmo_sparsity.models.document_attention import DocumentStarts, attend_within
from olmo_sparsity.models.huggingface.attention_names import (
    OWN_IN_PLACE_OF,
    REPLACED_BY_OWN,
)
from olmo_sparsity.models.huggingface.layer_views import LayerView

_HARMLESS_OPTIONS = frozenset(
    {"dropout", "is_causal", "sliding_window", "position_ids", "use_cache"}
)
"""Options of a layer that change nothing here, because its mask says what it sees of its row."""


# --- the task of a thread -------------------------------------------------------------------------


@dataclass
class _ShareStates:
    """The task to attend to shared distant states in addition to the row."""

    distant: DistantStates
    views: Sequence[LayerView]
    """What each layer sees of them."""

    num_calls: int = 0
    """How many layers have done the task so far."""


@dataclass
class _CollectWeights:
    """The task to collect the attention weights of each layer."""

    weights: list[Tensor] = field(default_factory=list)


_Task = _ShareStates | _CollectWeights

_task: ContextVar[_Task | None] = ContextVar("task", default=None)
"""The task of attention in this thread; None where it has none."""


@contextmanager
def attending_to(
    distant: DistantStates, views: Sequence[LayerView], configs: Sequence[Any]
) -> Iterator[None]:
    """Let all layers attend to `distant` and to the rows' own tokens inside the block, in this
    thread. Raise NotImplementedError if not all layers have done so.

    Args:
        distant: States that all rows see.
        views: What each layer sees of them and of its row.
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
def _with_task(task: _Task, configs: Sequence[Any]) -> Iterator[None]:
    """Give layers with these configurations a task inside the block, in this thread."""
    before = _task.set(task)
    try:
        with using_own_attention(configs):
            yield
    finally:
        _task.reset(before)


# --- our name in the configuration of a model -----------------------------------------------------

_names_lock = threading.Lock()
"""Held while a configuration gets our name or its usual one again."""

# A process that is forked while another thread holds the lock would find it held for ever.
os.register_at_fork(
    before=_names_lock.acquire,
    after_in_parent=_names_lock.release,
    after_in_child=_names_lock.release,
)
_num_users: dict[int, int] = {}
"""How many blocks of `using_own_attention` a configuration is in, by its id. Models may share a
configuration, and threads a model."""


@contextmanager
def using_own_attention(configs: Sequence[Any]) -> Iterator[None]:
    """Let layers with these configurations call our attention inside the block. The last of several
    blocks that ends restores the usual names."""
    with _names_lock:
        # Attention of other kinds, such as flash attention, is not replaced.
        replaced = [
            config
            for config in configs
            if config._attn_implementation in OWN_IN_PLACE_OF or id(config) in _num_users
        ]
        for config in replaced:
            _num_users[id(config)] = _num_users.get(id(config), 0) + 1
            name = config._attn_implementation
            # In a second block it has our name already.
            config._attn_implementation_internal = OWN_IN_PLACE_OF.get(name, name)
    try:
        yield
    finally:
        with _names_lock:
            for config in replaced:
                _num_users[id(config)] -= 1
                if _num_users[id(config)] == 0:
                    del _num_users[id(config)]
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
    documents: DocumentStarts | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return attention (B, L, H, K) and its weights, or None in place of weights, as
    AttentionInterface requires. This is the function that layers call under our names. What it
    computes depends on `documents` and on the task of this thread.

    Args:
        module: The attention module of a layer.
        query, key, value: (B, heads, L, K).
        attention_mask: Added to scores, or true where a token is seen. None means causal.
        scaling: The factor of scores; None means K ** −0.5.
        documents: Where the documents of the batch begin, if attention is restricted to them.
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
        mask = _added_to_scores(attention_mask, query.dtype)
        # Unlike fused ones, most eager functions have no default of this factor.
        if scaling is None:
            scaling = module.head_dim**-0.5
        mixed, weights = eager(module, query, key, value, mask, scaling=scaling, **options)
        task.weights.append(weights)
        return mixed, None

    # Another thread has written our name, and this one runs the model as usual.
    usual = _usual_attention_of(module)
    return usual(module, query, key, value, attention_mask, scaling=scaling, **options)


def _usual_attention_of(module: Any) -> Any:
    """Return the attention function that a layer calls while its configuration does not name
    ours."""
    name = module.config._attn_implementation
    # By now the other thread may have restored the usual name.
    usual_name = REPLACED_BY_OWN.get(name, name)
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


def _added_to_scores(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as eager attention takes it: numbers that are added to scores, 0 for a token
    that is seen. The mask of the fused kernel may have truth values instead."""
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
    for more. Arguments are those of `_attend`."""
    # Counted, so that `attending_to` notices layers that did not come here.
    task.num_calls += 1
    view = task.views[layer_index]
    _check_plain_attention(mask, view.mask, options)
    k_BFGK, v_BFGK = task.distant.layers[layer_index]
    distant_k = k_BFGK[:, view.first_distant :].transpose(1, 2)
    distant_v = v_BFGK[:, view.first_distant :].transpose(1, 2)
    # None lets `attend_to_distant` build the causal bias, which is the same for all layers.
    local_bias = None if view.sees_all_earlier else mask
    return attend_to_distant(
        query, key, value, distant_k, distant_v, view.bias, scaling, local_bias
    )


def _check_plain_attention(
    mask: Tensor | None, expected_mask: Tensor, options: dict[str, Any]
) -> None:
    """Raise NotImplementedError if a layer asks for more than our attention computes, such as a cap
    of scores or another mask. The trial of a model (compatibility.py) then shows that it cannot
    share distant states."""
    unknown = [
        name
        for name, value in options.items()
        if value is not None and name not in _HARMLESS_OPTIONS
    ]
    if unknown or not _is_same_mask(mask, expected_mask):
        raise NotImplementedError(f"attention with {unknown or 'another mask'}")


def _is_same_mask(passed: Tensor | None, expected: Tensor) -> bool:
    """Return whether a model has passed its mask on to a layer unchanged, as the same tensor. If a
    device map spreads its layers, accelerate copies the mask to each device; only then are values
    compared."""
    if passed is None or passed.device == expected.device:
        return passed is expected
    return passed.dtype == expected.dtype and torch.equal(passed.to(expected.device), expected)


# transformers also builds masks by these names, so ours gets the masks of the function that it
# replaces.
for _own_name, _replaced_name in REPLACED_BY_OWN.items():
    AttentionInterface.register(_own_name, _attend)
    AttentionMaskInterface.register(_own_name, ALL_MASK_ATTENTION_FUNCTIONS[_replaced_name])
