"""Compute the memory of a process that trains by formulas: activations, and what its engine holds.

estimate.py applies them to a run. `python -m benchmarks.memory` compares them with measured peaks;
docs/train.md has both.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import cast

import torch
from torch import nn

from olmo_sparsity.config.sections import ModelConfig, Precision, TrainingConfig
from olmo_sparsity.models.build import build_model, build_transformers_model
from olmo_sparsity.models.huggingface import HuggingFaceLM
from olmo_sparsity.models.losses import LanguageModel, rows_per_chunk
from olmo_sparsity.models.transformers_folder import count_parameters
from olmo_sparsity.training.activations import Fields, kept_bytes


def activation_bytes(
    sizes: ModelConfig, training: TrainingConfig, micro_batch_size: int, device: str = "cpu"
) -> float:
    """Return the bytes of activations at the peak of a step: those that are kept for the backward
    pass, and those that the loss needs for a chunk of logits."""
    rows = micro_batch_size * training.length
    size = 2 if training.precision == "bf16" else 4
    width_bytes = rows * sizes.d_model * size  # of one number for each token and coordinate
    vocab_size = sizes.embedding_size or sizes.vocab_size
    chunk = min(rows, rows_per_chunk(vocab_size, torch.device(device), training.compile))
    loss = chunk * vocab_size * (2 * size if training.compile else 4 * 4)
    # Before the first layer and after the last one: embedding, last norm, and their gradients.
    ends = 10 * width_bytes
    of_layer = rows * kept_bytes(sizes, training.precision, training.compile)
    budget = training.activation_memory_budget
    if budget is not None and budget < 1.0:
        # The compiler shares out what is between a layer's input and all of its activations.
        input_bytes = rows * sizes.d_model * 4
        kept_by_layer = input_bytes + budget * (of_layer - input_bytes)
        return kept_by_layer * sizes.n_layers + ends + max(loss, 1.4 * of_layer)
    recomputed = num_recomputed(sizes, training)
    kept = of_layer * (sizes.n_layers - recomputed) + ends
    if recomputed == 0:
        return kept + loss
    inputs = recomputed * rows * sizes.d_model * 4  # the residual stream is in fp32
    # A layer that is computed again also holds its gradients.
    return kept + inputs + max(loss, 1.4 * of_layer)


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
    parameters: int,
    engine: str = "ddp",
    count: int = 1,
    gathered: int = 0,
    sums_whole_gradients: bool = False,
) -> int:
    """Return the bytes of weights, gradients and optimizer of each of `count` processes.
    docs/train.md has a table.

    gathered: With `fsdp`, the largest number of weights that are whole at a time.
    sums_whole_gradients: With `fsdp`, whether whole gradients are added up over micro-batches.
    """
    size = 2 if precision == "bf16" else 4
    part = parameters / count
    if engine == "fsdp":
        whole_gradients = 4 * parameters if sums_whole_gradients else 4 * gathered
        return int(16 * part + size * gathered + whole_gradients)
    stage = int(engine[-1]) if engine.startswith("zero") else 0
    if stage == 0:  # bf16 adds a cast copy of the weights
        return parameters * (16 + (2 if precision == "bf16" else 0))
    weights = size * (part if stage == 3 else parameters)
    gradients = 4 * (part if stage >= 2 else parameters)  # added up in fp32
    # The numbers in buffers of collectives, as configs/deepspeed/*.json sets them. ZeRO-1 casts all
    # gradients at once. ZeRO-2 has two buckets, whose size does not depend on the model, and a copy
    # of one. ZeRO-3 has a bucket, its copy in the order of the shards, weights in use and those
    # fetched ahead.
    buckets = {2: 10**8 + min(parameters, 5 * 10**7), 3: min(4 * parameters, 2**26)}
    in_use = size * buckets.get(stage, parameters)
    return int(weights + gradients + 12 * part + in_use)


def start_bytes(
    precision: Precision,
    parameters: int,
    engine: str = "ddp",
    count: int = 1,
    largest_weight: int = 0,
) -> int:
    """Return the bytes on each device at the peak while the engine is built, before the first step.

    largest_weight: With `zero3`, the numbers of the largest weight, which is whole for a while.
    """
    size = 2 if precision == "bf16" else 4
    part = parameters / count
    # DeepSpeed makes Adam's moments in the first step.
    if engine == "zero1" and precision == "bf16":  # by another optimizer, with all gradients
        return int((size + 4) * parameters + 4 * part)
    if engine in ("zero1", "zero2"):
        # All weights are copied into one flat tensor; their fp32 part, and one of zeros, follow.
        return int(max(2 * size * parameters, size * parameters + 8 * part))
    if engine == "zero3":
        # A weight is made in fp32 and cast before its first shard is kept. Later, beside all shards
        # and places for their gradients, it is made again for DeepSpeed's fp32 copy.
        made_first = size * part + (4 + size) * largest_weight
        made_again = (size + 8) * part + 4 * largest_weight
        return int(max(made_first, made_again))
    if engine == "fsdp":
        return int(4 * part)
    # DDP makes its buckets, which become the gradients, when it is built.
    return 8 * parameters if engine == "ddp" else 4 * parameters


def gathered_at_once(model: nn.Module, sizes: ModelConfig) -> int:
    """Return how many weights `fsdp` holds whole at a time: those outside of layers, and those of
    two layers, the one that computes and the next one."""
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    unembedding, _ = cast(LanguageModel, model).unembedding
    tables[id(unembedding)] = unembedding
    outside = sum(weight.numel() for weight in tables.values())
    layer = (count_parameters(model) - outside) // sizes.n_layers
    return outside + min(2, sizes.n_layers) * layer


def without_memory(sizes: ModelConfig) -> nn.Module:
    """Return a model on the `meta` device, which has shapes and no numbers. It is built once."""
    return _built(Fields(sizes))


@cache
def _built(fields: Fields) -> nn.Module:
    sizes = fields.sizes
    with torch.device("meta"):
        if sizes.architecture != "olmo":
            return HuggingFaceLM(build_transformers_model(sizes), is_tried=False)
        return build_model(replace(sizes))
