"""Find the layers of a model, ours or one of transformers, and the part that each weight is in."""

from __future__ import annotations

from typing import Any

from torch import nn

from olmo_sparsity.models.huggingface.model import HuggingFaceLM


def layers_of(model: Any) -> list[nn.Module]:
    """Return the layers of the model, in order."""
    return model.layers if isinstance(model, HuggingFaceLM) else model.blocks


def parts_of(model: Any) -> dict[str, list[nn.Parameter]]:
    """Return the weights of each block, of the embeddings and of the unembedding, by name of the
    part. Tied weights are those of the embeddings. All others, such as the last norm, are
    `other`."""
    part_of_weight = {}
    for number, layer in enumerate(layers_of(model)):
        for weight in layer.parameters():
            part_of_weight[id(weight)] = f"block_{number}"
    for weight in model.unembedding:
        part_of_weight[id(weight)] = "unembedding"
    is_ours = not isinstance(model, HuggingFaceLM)
    embedding = model.transformer.wte if is_ours else model.embedding
    part_of_weight[id(embedding.weight)] = "embedding"
    parts: dict[str, list[nn.Parameter]] = {}
    for weight in model.parameters():
        parts.setdefault(part_of_weight.get(id(weight), "other"), []).append(weight)
    return parts
