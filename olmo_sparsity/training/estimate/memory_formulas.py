"""Compute the memory of a process that trains by formulas: activations, and what its engine holds.

    state_bytes("bf16", 10**9, "ddp")                     # 18e9: 16 bytes, and 2 of a cast copy
    state_bytes("bf16", 10**9, "zero1", num_shards=64)    # fewer, as the optimizer is divided
    activation_bytes(config.model, config.training, 8)    # for 8 sequences at a time

device_memory.py applies them to a run. `python -m benchmarks.memory` compares them with measured
peaks; docs/train.md has both.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import cast

import torch
from torch import nn

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import Precision, TrainingConfig
from olmo_sparsity.models.build import build_model, build_transformers_model
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.language_model import LanguageModel
from olmo_sparsity.models.losses import rows_per_chunk
from olmo_sparsity.training.activations import HashableConfig, kept_bytes

RESIDUAL_BYTES = 4
"""Bytes of a number of the residual stream, which is in fp32 with each precision."""

PEAK_OF_RECOMPUTED_LAYER = 1.4
"""The peak of a layer that is computed again, as a multiple of the activations that it keeps: it
holds its gradients, too."""


def activation_bytes(
    sizes: ModelConfig, training: TrainingConfig, micro_batch_size: int, device: str = "cpu"
) -> float:
    """Return the bytes of activations at the peak of a step: those that are kept for the backward
    pass, and those that the loss needs for a chunk of logits. The peak is either in the loss, or
    later, in a layer that is computed again.

    Args:
        sizes: The section `model`.
        training: The section `training`.
        micro_batch_size: Sequences in a micro-batch, each of `training.length` tokens.
        device: The type of the device, on which the size of a chunk of logits depends.
    """
    num_tokens = micro_batch_size * training.length
    number_bytes = 2 if training.precision == "bf16" else 4  # of an activation

    # What each part keeps, in bytes. Before the first layer and after the last one are embedding,
    # last norm, and their gradients.
    width_bytes = num_tokens * sizes.d_model * number_bytes
    outside_bytes = 10 * width_bytes
    layer_bytes = num_tokens * kept_bytes(sizes, training.precision, training.compile)
    layer_input_bytes = num_tokens * sizes.d_model * RESIDUAL_BYTES

    # Logits of a chunk and their gradients; without compilation four tensors of them, in fp32.
    vocab_size = sizes.embedding_size or sizes.vocab_size
    chunk = rows_per_chunk(vocab_size, torch.device(device), training.compile)
    num_logits = min(num_tokens, chunk) * vocab_size
    bytes_of_logit = 2 * number_bytes if training.compile else 4 * 4
    loss_bytes = num_logits * bytes_of_logit

    budget = training.activation_memory_budget
    if budget is not None and budget < 1.0:
        # The compiler shares out what is between a layer's input and all of its activations.
        kept_by_layer = layer_input_bytes + budget * (layer_bytes - layer_input_bytes)
        kept = kept_by_layer * sizes.n_layers + outside_bytes
        return kept + max(loss_bytes, PEAK_OF_RECOMPUTED_LAYER * layer_bytes)

    num_again = num_recomputed(sizes, training)
    kept = layer_bytes * (sizes.n_layers - num_again) + outside_bytes
    if num_again == 0:
        return kept + loss_bytes
    # Layers that are computed again keep their input alone, until their turn comes. Then the loss
    # is done, so the peak is in one of the two.
    inputs = num_again * layer_input_bytes
    return kept + inputs + max(loss_bytes, PEAK_OF_RECOMPUTED_LAYER * layer_bytes)


def num_recomputed(sizes: ModelConfig, training: TrainingConfig) -> int:
    """Return the number of layers whose forward pass is computed again in the backward pass."""
    if not training.activation_checkpointing:
        return 0
    return -(-sizes.n_layers // training.checkpoint_every)


def share_recomputed(sizes: ModelConfig, training: TrainingConfig) -> float:
    """Return the share of the layers' forward pass that is computed twice, at most. A compiler that
    keeps half of the activations computes the cheaper operations again: less than half of the
    time."""
    if training.activation_memory_budget is not None:
        return 1.0 - training.activation_memory_budget
    return num_recomputed(sizes, training) / sizes.n_layers


def state_bytes(
    precision: Precision,
    num_parameters: int,
    engine: str = "ddp",
    num_shards: int = 1,
    gathered: int = 0,
    sums_whole_gradients: bool = False,
    largest_weight: int = 0,
) -> int:
    """Return the bytes of weights, gradients and optimizer of each process, which engines other
    than DDP divide into `num_shards` parts. docs/train.md has a table.

    Args:
        gathered: With `fsdp`, the largest number of weights that are whole at a time.
        sums_whole_gradients: With `fsdp`, whether whole gradients are added up over micro-batches.
        largest_weight: With `zero3`, the numbers of the largest weight, which no bucket divides.
    """
    number_bytes = 2 if precision == "bf16" else 4  # of weights, as they are computed with
    part = num_parameters / num_shards
    # AdamW holds the weights and two moments in fp32, 12 bytes a parameter, and gradients take 4.
    if engine == "fsdp":
        whole_gradients = 4 * num_parameters if sums_whole_gradients else 4 * gathered
        return int(16 * part + number_bytes * gathered + whole_gradients)
    if not engine.startswith("zero"):  # bf16 adds a cast copy of the weights
        return num_parameters * (16 + (2 if precision == "bf16" else 0))

    # ZeRO-1 divides the optimizer, ZeRO-2 gradients, too, and ZeRO-3 also the weights.
    stage = int(engine.removeprefix("zero"))
    weights = number_bytes * (part if stage == 3 else num_parameters)
    gradients = 4 * (part if stage >= 2 else num_parameters)  # added up in fp32
    # The numbers in buffers of collectives, as configs/deepspeed/*.json sets them. ZeRO-1 casts all
    # gradients at once. ZeRO-2 has two buckets, whose size does not depend on the model, and a copy
    # of one. ZeRO-3 has a bucket, its copy in the order of the shards, weights in use and those
    # fetched ahead.
    num_buffered = {
        1: num_parameters,
        2: 10**8 + min(num_parameters, 5 * 10**7),
        3: 4 * min(num_parameters, max(2**24, largest_weight)),
    }
    return int(weights + gradients + 12 * part + number_bytes * num_buffered[stage])


def start_bytes(
    precision: Precision,
    num_parameters: int,
    engine: str = "ddp",
    num_shards: int = 1,
    largest_weight: int = 0,
) -> int:
    """Return the bytes on each device at the peak while the engine is built, before the first step.

    Args:
        largest_weight: With `zero3`, the numbers of the largest weight, which is whole for a while.
    """
    size = 2 if precision == "bf16" else 4  # bytes of a weight, as it is computed with
    part = num_parameters / num_shards
    # DeepSpeed makes Adam's moments in the first step.
    if engine == "zero1" and precision == "bf16":  # by another optimizer, with all gradients
        return int((size + 4) * num_parameters + 4 * part)
    if engine in ("zero1", "zero2"):
        # All weights are copied into one flat tensor; their fp32 part, and one of zeros, follow.
        return int(max(2 * size * num_parameters, size * num_parameters + 8 * part))
    if engine == "zero3":
        # A weight is made in fp32 and cast before its first shard is kept. Later, beside all shards
        # and places for their gradients, it is made again for DeepSpeed's fp32 copy.
        made_first = size * part + (4 + size) * largest_weight
        made_again = (size + 8) * part + 4 * largest_weight
        return int(max(made_first, made_again))
    if engine == "fsdp":
        return int(4 * part)
    if engine == "ddp":  # makes its buckets, which become the gradients, when it is built
        return 8 * num_parameters
    return 4 * num_parameters


def gathered_at_once(model: nn.Module, sizes: ModelConfig) -> int:
    """Return how many weights `fsdp` holds whole at a time: those outside of layers, and those of
    two layers, the one that computes and the next one."""
    # By identity, as a tied unembedding is the embedding itself.
    weights_outside = {
        id(module.weight): module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    }
    unembedding, _ = cast(LanguageModel, model).unembedding
    weights_outside[id(unembedding)] = unembedding
    num_outside = sum(weight.numel() for weight in weights_outside.values())
    num_of_layer = (count_parameters(model) - num_outside) // sizes.n_layers
    return num_outside + min(2, sizes.n_layers) * num_of_layer


def without_memory(sizes: ModelConfig) -> nn.Module:
    """Return a model on the `meta` device, which has shapes and no numbers. It is built once."""
    return _build_once(HashableConfig(sizes))


@cache
def _build_once(config: HashableConfig) -> nn.Module:
    """Return a model on the `meta` device, the same one for equal configs."""
    sizes = config.sizes
    with torch.device("meta"):
        if sizes.architecture != "olmo":
            return HuggingFaceLM(build_transformers_model(sizes), is_tried=False)
        return build_model(replace(sizes))
