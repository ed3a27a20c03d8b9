"""Compute the bytes that an engine holds on each process: weights, gradients, optimizer, buffers.

    state_bytes("bf16", 10**9, "ddp")                  # 18e9: held in a step, besides activations
    state_bytes("bf16", 10**9, "zero1", num_shards=8)  # 9.5e9: the optimizer is divided
    start_bytes("bf16", 10**9, "ddp")                  # 8e9: the peak while the engine is built

P parameters, N processes that divide them, s bytes of a weight as a step computes with it (2 in
bf16, 4 in fp32). The optimizer is AdamW: two moments, and with ZeRO an fp32 copy of the weights.

    engine         weights                gradients    optimizer    buffers of collectives       GB
    single, ddp    4 P (+ 2 P in bf16)    4 P          8 P          0                          18.0
    fsdp           4 P / N                4 P / N      8 P / N      what is whole for a while   3.2
    zero1          s P                    4 P          12 P / N     s P                         9.5
    zero2          s P                    4 P / N      12 P / N     s · buckets                 4.3
    zero3          s P / N                4 P / N      12 P / N     s · buckets                3.05

The last column is an example: 10^9 parameters on 8 processes in bf16, so that zero1 takes 2 + 4 +
12 / 8 + 2 GB. With `fsdp`, 0.2 · 10^9 weights are whole at a time; the largest weight of zero3 has
0.1 · 10^9 numbers.

`python -m benchmarks.memory` compares both functions with measured peaks; docs/train.md has the
rows.
"""

from __future__ import annotations

from typing import cast

from torch import nn

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import Precision
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.models.language_model import LanguageModel


def state_bytes(
    precision: Precision,
    num_parameters: int,
    engine: str = "ddp",
    num_shards: int = 1,
    gathered: int = 0,
    sums_whole_gradients: bool = False,
    largest_weight: int = 0,
) -> int:
    """Return the bytes of weights, gradients, optimizer and buffers of each process in a step.

    Args:
        num_shards: Into how many parts engines other than DDP divide the state.
        gathered: With `fsdp`, the largest number of weights that are whole at a time
            (`gathered_at_once`).
        sums_whole_gradients: With `fsdp`, whether whole gradients are added up over micro-batches.
        largest_weight: With `zero3`, the numbers of the largest weight, which no bucket divides.
    """
    if engine == "fsdp":
        num_whole_gradients = num_parameters if sums_whole_gradients else gathered
        return _fsdp_state(precision, num_parameters, num_shards, gathered, num_whole_gradients)
    if engine.startswith("zero"):
        stage = int(engine.removeprefix("zero"))
        return _zero_state(precision, num_parameters, stage, num_shards, largest_weight)
    # Weights 4, gradients 4, moments 8. With bf16 autocast keeps a cast copy of all weights.
    return num_parameters * (16 + (2 if precision == "bf16" else 0))


def _bytes_of_weight(precision: Precision) -> int:
    """Return the bytes of a weight as a step computes with it."""
    return 2 if precision == "bf16" else 4


def _fsdp_state(
    precision: Precision,
    num_parameters: int,
    num_shards: int,
    num_whole_weights: int,
    num_whole_gradients: int,
) -> int:
    """Return the bytes of a process with `fsdp`: a part of everything, 16 bytes a parameter, and
    weights and gradients that are whole for a while."""
    num_per_process = num_parameters / num_shards
    # Weights are gathered in the precision of the step, and gradients are summed in fp32.
    whole_weights = _bytes_of_weight(precision) * num_whole_weights
    return int(16 * num_per_process + whole_weights + 4 * num_whole_gradients)


def _zero_state(
    precision: Precision, num_parameters: int, stage: int, num_shards: int, largest_weight: int
) -> int:
    """Return the bytes of a process with a stage of ZeRO: 1 divides the optimizer, 2 gradients,
    too, and 3 also the weights."""
    num_per_process = num_parameters / num_shards
    weight_bytes = _bytes_of_weight(precision)
    weights = weight_bytes * (num_per_process if stage == 3 else num_parameters)
    gradients = 4 * (num_per_process if stage >= 2 else num_parameters)  # added up in fp32
    optimizer = 12 * num_per_process

    # How many numbers are in buffers of collectives. Sizes of buckets are those of
    # configs/deepspeed/*.json; a test compares them.
    if stage == 1:  # casts all gradients at once
        num_buffered = num_parameters
    elif stage == 2:  # two buckets, whose size does not depend on the model, and a copy of one
        num_buffered = 10**8 + min(num_parameters, 5 * 10**7)
    else:  # a bucket, its copy in the order of the shards, weights in use and those fetched ahead
        num_buffered = 4 * min(num_parameters, max(2**24, largest_weight))
    return int(weights + gradients + optimizer + weight_bytes * num_buffered)


def start_bytes(
    precision: Precision,
    num_parameters: int,
    engine: str = "ddp",
    num_shards: int = 1,
    largest_weight: int = 0,
) -> int:
    """Return the bytes on each device at the peak while the engine is built, before the first step.
    No optimizer has moments yet: they are made in the first step.

    Args:
        num_shards: As in `state_bytes`.
        largest_weight: With `zero3`, the numbers of the largest weight, which is whole for a while.
    """
    if engine == "fsdp":  # its part of the fp32 weights
        return int(4 * num_parameters / num_shards)
    if engine.startswith("zero"):
        return _zero_start(precision, num_parameters, engine, num_shards, largest_weight)
    if engine == "ddp":  # makes its buckets, which become the gradients, when it is built
        return 8 * num_parameters
    return 4 * num_parameters


def _zero_start(
    precision: Precision, num_parameters: int, engine: str, num_shards: int, largest_weight: int
) -> int:
    """Return the bytes on each device at the peak while DeepSpeed is initialized."""
    weight_bytes = _bytes_of_weight(precision)
    num_per_process = num_parameters / num_shards
    if engine == "zero1" and precision == "bf16":
        # DeepSpeed's BF16_Optimizer makes all gradients in fp32, and its part of the fp32 weights.
        return int((weight_bytes + 4) * num_parameters + 4 * num_per_process)
    if engine in ("zero1", "zero2"):
        # All weights are copied into one flat tensor. When the first copy is gone, this process's
        # part of the fp32 weights follows, and zeros of the same size.
        with_flat_copy = 2 * weight_bytes * num_parameters
        with_fp32_part = weight_bytes * num_parameters + 8 * num_per_process
        return int(max(with_flat_copy, with_fp32_part))
    # With zero3 a weight is made in fp32 and cast before its first shard is kept. Later, beside all
    # shards and places for their gradients, it is made again for DeepSpeed's fp32 copy.
    when_cast = weight_bytes * num_per_process + (4 + weight_bytes) * largest_weight
    when_made_again = (weight_bytes + 8) * num_per_process + 4 * largest_weight
    return int(max(when_cast, when_made_again))


def gathered_at_once(model: nn.Module, sizes: ModelConfig) -> int:
    """Return how many weights `fsdp` holds whole at a time: those outside of layers, and those of
    two layers, the one that computes and the next one, which is gathered meanwhile."""
    # By identity, as a tied unembedding is the embedding itself.
    weights_outside = {
        id(module.weight): module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    }
    unembedding, _ = cast(LanguageModel, model).unembedding
    weights_outside[id(unembedding)] = unembedding
    num_outside = sum(weight.numel() for weight in weights_outside.values())
    # The last norm, too, is counted with the layers. It is too small to matter.
    num_of_layer = (count_parameters(model) - num_outside) // sizes.n_layers
    return num_outside + min(2, sizes.n_layers) * num_of_layer
