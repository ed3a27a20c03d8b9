"""Count the bytes that a layer keeps for its backward pass, by running it on the `meta` device,
where tensors have shapes and no numbers.

    kept_bytes(config.model, "bf16")                      # 118_800: bytes of one layer and token
    kept_bytes(config.model, "bf16", is_compiled=True)    # 102_414: fewer, 25 / 29 of them

The first are 29 vectors of the width (2,048 numbers of 2 bytes) and a few sums of norms. A table of
formulas would have to be changed with each option of a layer. PyTorch itself says which tensors it
keeps (`saved_tensors_hooks`), so nothing is forgotten. estimate/activation_memory.py multiplies the
result by layers and tokens.

Dimension key: B batch, L length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import Precision
from olmo_sparsity.config.yaml_files import to_yaml

LENGTH = 256
"""Tokens of the traced row. The bytes grow in proportion to it, and longer rows take longer."""

COMPILED_SHARE = 25 / 29
"""The bytes that a compiled layer keeps, as a share of those that it keeps without compilation. The
compiler chooses what it keeps, so this is the largest of three ratios that were counted: 25.0 of
29.0 numbers of the width (the C4 configs), 23.1 of 37.0 (a wider MLP), 37.0 of 49.0 (norms of
queries and keys)."""


def kept_bytes(sizes: ModelConfig, precision: Precision, is_compiled: bool = False) -> float:
    """Return the bytes that one layer keeps for the backward pass of each token."""
    # A layer of another architecture is counted as OLMo's with the same fields. A sliding window
    # changes what attention reads, and not what it keeps. The vocabulary has no effect on a layer,
    # so it is as small as it can be.
    layer = replace(
        sizes, architecture="olmo", sliding_window=None, n_layers=1, vocab_size=8, embedding_size=8
    )
    bytes_of_token = _trace_kept_bytes(HashableConfig(layer), precision)
    return bytes_of_token * COMPILED_SHARE if is_compiled else bytes_of_token


class HashableConfig:
    """A config that can be a key of a cache: equal if its YAML is."""

    def __init__(self, sizes: ModelConfig) -> None:
        self.sizes = sizes
        self.text = to_yaml(sizes)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashableConfig) and self.text == other.text


@cache
def _trace_kept_bytes(config: HashableConfig, precision: Precision) -> float:
    """Return the bytes that the layer of a one-layer model keeps for each token, by running it."""
    from olmo_sparsity.models.build import build_model
    from olmo_sparsity.models.rope import rotary_tables

    # By the address of the storage, as several kept tensors may be views of one.
    bytes_of_storage: dict[int, int] = {}
    kept_tensors: list[Tensor] = []  # so that no later tensor takes the address of a counted one

    def note_kept(tensor: Tensor) -> Tensor:
        kept_tensors.append(tensor)
        storage = tensor.untyped_storage()
        bytes_of_storage[storage._cdata] = storage.nbytes()
        return tensor

    # `autocast` has no kernels for tensors without numbers; _Autocast does its work.
    without_autocast = mock.patch.object(torch, "autocast", _null_autocast)
    with torch.device("meta"), without_autocast, _Autocast(precision == "bf16") as autocast:
        model: Any = build_model(config.sizes)
        positions_BL = torch.zeros((1, LENGTH), dtype=torch.long)
        tables = rotary_tables(positions_BL, model.config) if config.sizes.rope else None
        inputs = torch.zeros((1, LENGTH, config.sizes.d_model), requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note_kept, lambda tensor: tensor):
            # A layer's input is no leaf in a model either, but what the layer before has computed.
            model.blocks[0](inputs * 1, tables, None)

    # Weights, and their cast copies, are part of the state. Tables are shared by all layers.
    shared_tensors = [*model.parameters(), *autocast.cast_weights, *(tables or ())]
    for tensor in shared_tensors:
        bytes_of_storage.pop(tensor.untyped_storage()._cdata, None)
    return sum(bytes_of_storage.values()) / LENGTH


def _null_autocast(*arguments: Any, **keywords: Any) -> contextlib.AbstractContextManager:
    """Stand in for `torch.autocast`."""
    return contextlib.nullcontext()


class _Autocast(TorchFunctionMode):
    """Multiplies matrices in bf16, as autocast does, and lets attention keep the tensors that a
    fused kernel keeps."""

    def __init__(self, in_bf16: bool) -> None:
        super().__init__()
        self.in_bf16 = in_bf16
        self.cast_weights: list[Tensor] = []

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        is_attention = function is F.scaled_dot_product_attention
        if is_attention or function in (F.linear, torch.matmul):
            args = tree_map(self._cast, args)
        if is_attention:
            # The function itself would keep the scores of all pairs of tokens on `meta`, where
            # there is no fused kernel.
            return _FusedAttention.apply(*args[:3])
        return function(*args, **(kwargs or {}))

    def _cast(self, value: Any) -> Any:
        if not (self.in_bf16 and isinstance(value, Tensor) and value.dtype == torch.float32):
            return value
        cast = value.to(torch.bfloat16)
        if isinstance(value, nn.Parameter):
            self.cast_weights.append(cast)
        return cast


class _FusedAttention(torch.autograd.Function):
    """Keeps queries, keys, values and the result for a backward pass that never runs."""

    @staticmethod
    def forward(ctx: Any, *states: Tensor) -> Tensor:
        mixed = torch.empty_like(states[0])
        ctx.save_for_backward(*states, mixed)
        return mixed
