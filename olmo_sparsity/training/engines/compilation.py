"""Compile a model for training: as one graph, or each layer by itself.

    compile_model(model)    # 12 layers: one graph of the model; 16 or more: one graph of a layer

`torch.compile` compiles in the first call of each shape of input. engine.py calls this once, before
DDP or `fully_shard` wrap the model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config as functorch_config

from olmo_sparsity.models.document_attention import keep_out_of_graphs
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.training.engines.model_parts import layers_of

COMPILED_BY_BLOCK = 16
"""Number of layers from which each layer is compiled by itself. One graph of all of them takes a
minute of a core, in place of seconds; and DDP and ZeRO would send no gradients before the last ones
are computed."""


def compile_model(
    model: Any, activation_memory_budget: float | None = None, each_layer: bool = False
) -> None:
    """Compile the model, with one graph for each shape: of training, its stages, evaluations.

    `dynamic=False` keeps PyTorch from making a graph for any shape when it sees a second one. That
    graph rounds differently, and whether it is used would depend on where a run begins."""
    # By default 8, after which further shapes would silently run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    # For the whole process, as the compiler reads it at each new shape: 1 is PyTorch's default.
    budget = 1.0 if activation_memory_budget is None else activation_memory_budget
    functorch_config.activation_memory_budget = budget
    if budget < 1.0:
        # In a graph of all layers, what is computed again would be there for all of them at once.
        each_layer = True
    if isinstance(model, HuggingFaceLM):
        model.keep_own_attention()
    keep_out_of_graphs()

    layers = layers_of(model)
    is_long = len(layers) >= COMPILED_BY_BLOCK and not isinstance(model, HuggingFaceLM)
    if each_layer or is_long:
        for layer in layers:  # which share one graph
            layer.forward = torch.compile(layer.forward, dynamic=False)
    else:
        model.hidden = torch.compile(model.hidden, dynamic=False)
