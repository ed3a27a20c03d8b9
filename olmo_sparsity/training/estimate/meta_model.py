"""Build the model of a run without memory, to count its parameters and FLOPs.

    model = without_memory(config.model)     # 7.3B parameters take no memory, and milliseconds
    count_parameters(model)                  # 7_298_011_136

It is on PyTorch's `meta` device, where tensors have shapes and no numbers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import nn

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.build import build_model, build_transformers_model
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.training.estimate.kept_bytes import HashableConfig


def without_memory(sizes: ModelConfig) -> nn.Module:
    """Return the model that a section `model` describes, on the `meta` device. Equal sections get
    the same model, as one line of a dry run asks for it a dozen times."""
    return _build_once(HashableConfig(sizes))


@cache
def _build_once(config: HashableConfig) -> nn.Module:
    """Return a new model on the `meta` device."""
    sizes = config.sizes
    with torch.device("meta"):
        if sizes.architecture != "olmo":
            # `build_model` would run a model of transformers on a text, to check that it can be
            # measured. Without numbers it cannot run.
            return HuggingFaceLM(build_transformers_model(sizes), is_tried=False)
        # A copy, as the caller may change its own, and the model is kept.
        return build_model(replace(sizes))
