"""Find the layers of a model, ours or one of transformers, and the part that each weight is in.

    layers_of(model)    # [block 0, block 1]
    parts_of(model)     # {"embedding": [W], "block_0": [W, W, …], "block_1": […], "other": [W]}
    replace_parameters(model, {id(old_weight): new_weight, …})

Engines compile and shard layer by layer; the log of gradient norms has a number for each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from olmo_sparsity.models.huggingface.model import HuggingFaceLM


def layers_of(model: Any) -> list[nn.Module]:
    """Return the layers of the model, in order."""
    return model.layers if isinstance(model, HuggingFaceLM) else model.blocks


def parts_of(model: Any) -> dict[str, list[nn.Parameter]]:
    """Return the weights of each block (`block_0`), of the embeddings and of the unembedding, by
    name of the part. All others, such as the last norm, are `other`."""
    part_of_weight = {}
    for layer_index, layer in enumerate(layers_of(model)):
        for weight in layer.parameters():
            part_of_weight[id(weight)] = f"block_{layer_index}"
    for weight in model.unembedding:  # its matrix, and its bias or None
        part_of_weight[id(weight)] = "unembedding"
    # After the unembedding, as tied weights count as embeddings.
    is_ours = not isinstance(model, HuggingFaceLM)
    embedding = model.transformer.wte if is_ours else model.embedding
    part_of_weight[id(embedding.weight)] = "embedding"

    # In the order of the model.
    parts: dict[str, list[nn.Parameter]] = {}
    for weight in model.parameters():
        parts.setdefault(part_of_weight.get(id(weight), "other"), []).append(weight)
    return parts


def replace_parameters(model: nn.Module, replacements: Mapping[int, nn.Parameter]) -> None:
    """Replace each parameter of a model. Tied weights are one parameter of several modules, and
    stay one.

    Args:
        replacements: The new parameters, by the `id` of the old ones.
    """
    for module in model.modules():
        # Not `named_parameters`, which names a tied weight once.
        for name, weight in module._parameters.items():
            module._parameters[name] = None if weight is None else replacements[id(weight)]
