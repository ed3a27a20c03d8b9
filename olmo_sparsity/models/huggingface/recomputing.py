"""Compute layers of transformers again in a backward pass, so that only their inputs are kept.

    training       `checkpoint_layers`, once: every n-th layer of a model, from then on
    evaluation     `recomputing_layers`, a context: all layers, in one forward pass

huggingface/model.py calls both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_layers(model: Any, body: nn.Module, every: int) -> None:
    """Let every n-th layer of a model be computed again in the backward passes of training.

    Args:
        model: The model of transformers.
        body: The part of it that has the layers.
        every: n.
    """
    # Early releases of transformers 5 have the second name.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers has set this attribute in all layers, and each layer reads its own.
    for layer_index, layer in enumerate(layers_of(body)):
        layer.gradient_checkpointing = layer_index % every == 0


@contextmanager
def recomputing_layers(body: nn.Module) -> Iterator[None]:
    """Let layers keep only their inputs for a backward pass inside the block. The backward pass
    computes the rest again."""
    # By `forward`, as the attribute of transformers has an effect in training mode only.
    with ExitStack() as stack:
        for layer in layers_of(body):
            stack.callback(setattr, layer, "forward", layer.forward)
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        yield


def layers_of(body: nn.Module) -> list[Any]:
    """Return the layers of a model, from the first to the last. In all families they inherit from
    one class of transformers, which lets them be computed again."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in body.modules() if isinstance(module, GradientCheckpointingLayer)]
