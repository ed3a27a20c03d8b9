"""Estimate the memory of a run on each device, and choose the micro-batches that fit into it.

A run has three peaks, in its start, in its steps and in an evaluation with tasks of lm_eval. The
largest of them is what it needs. All numbers are bytes.
"""

from __future__ import annotations

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.transformers_folder import count_parameters
from olmo_sparsity.training.estimate.evaluations import bytes_in_forward
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.memory_formulas import (
    activation_bytes,
    gathered_at_once,
    start_bytes,
    state_bytes,
    without_memory,
)
from olmo_sparsity.training.optim import matrices_of_layers

MAX_MICRO_BATCH_TOKENS = 65_536
"""The largest number of tokens in a micro-batch that `auto` chooses. Larger ones gain little: the
fixed cost of a micro-batch is below 2% of a step."""


def fitting_micro_batch_size(config: RunConfig, hardware: Hardware) -> int:
    """Return the number of sequences in a micro-batch: the largest divisor of a process's share of
    the batch that is at most the configured number, or that fits into memory with `auto`."""
    training = config.training
    share = training.batch_size // hardware.num_processes
    if training.micro_batch_size is None:
        return share
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    is_auto = training.micro_batch_size == 0
    if not is_auto:
        return max((size for size in divisors if size <= training.micro_batch_size), default=1)
    fitting = [
        size
        for size in divisors
        if size * training.length <= MAX_MICRO_BATCH_TOKENS
        and _bytes_of_steps(config, hardware, size) <= hardware.usable_bytes
    ]
    return max(fitting, default=1)


def peak_bytes(config: RunConfig, hardware: Hardware, micro_batch_size: int) -> float:
    """Return the bytes on each device at the peak of the run: in its start, in its steps, or in an
    evaluation."""
    return max(
        _bytes_of_steps(config, hardware, micro_batch_size),
        bytes_in_evaluation(config, hardware),
    )


def _bytes_of_steps(config: RunConfig, hardware: Hardware, micro_batch_size: int) -> float:
    """Return the bytes on each device at the peak of the start and of steps. An evaluation takes
    the same memory with any micro-batch, so that it does not determine them."""
    state = bytes_of_state(config, hardware, micro_batch_size)
    activations = activation_bytes(
        config.model, config.training, micro_batch_size, hardware.device_type
    )
    return max(state + activations, bytes_at_start(config, hardware))


def count_shards(config: RunConfig, hardware: Hardware) -> int:
    """Return the number of parts into which an engine divides one copy of the model: with
    `engine.shard_over=node` the processes of a node, otherwise all of them."""
    if config.engine.name == "fsdp" and config.engine.shard_over == "node":
        return hardware.processes_per_node
    return hardware.num_processes


def bytes_of_state(config: RunConfig, hardware: Hardware, micro_batch_size: int = 1) -> int:
    """Return the bytes of weights, gradients and optimizer on each device."""
    model = without_memory(config.model)
    is_fsdp = config.engine.name == "fsdp"
    num_shards = count_shards(config, hardware)
    share = config.training.batch_size // hardware.num_processes
    has_several_micro_batches = micro_batch_size < share
    sums_whole_gradients = has_several_micro_batches and not config.engine.reduce_every_micro_batch
    state = state_bytes(
        config.training.precision,
        count_parameters(model),
        config.engine.name,
        num_shards,
        gathered_at_once(model, config.model),
        sums_whole_gradients=sums_whole_gradients,
        largest_weight=max(weight.numel() for weight in model.parameters()),
    )
    if config.optimizer.name == "muon":
        # Muon has one moment of a matrix, in fp32, where AdamW has two.
        in_matrices = sum(matrix.numel() for matrix in matrices_of_layers(model))
        state -= 4 * in_matrices // (num_shards if is_fsdp else 1)
    return state


def bytes_at_start(config: RunConfig, hardware: Hardware) -> int:
    """Return the bytes on each device at the peak before the first step."""
    model = without_memory(config.model)
    return start_bytes(
        config.training.precision,
        count_parameters(model),
        config.engine.name,
        count_shards(config, hardware),
        largest_weight=max(weight.numel() for weight in model.parameters()),
    )


def bytes_in_evaluation(config: RunConfig, hardware: Hardware) -> float:
    """Return the bytes on each device at the peak of an evaluation: while held-out sequences are
    read, or while tasks of lm_eval are measured, whose activations are not known. Every process
    then has a whole copy of the model in fp32 beside its state."""
    # Whole gradients, which `fsdp` adds up over micro-batches, are gone by then. So this is the
    # state of a run whose steps have a single micro-batch.
    share = config.training.batch_size // hardware.num_processes
    state = bytes_of_state(config, hardware, share)
    return state + max(bytes_in_forward(config, hardware), bytes_copied_for_tasks(config))


def bytes_copied_for_tasks(config: RunConfig) -> int:
    """Return the bytes of the copy of all weights, in fp32, on which each process measures tasks of
    lm_eval; 0 without tasks."""
    if not config.evaluation.lm_eval:
        return 0
    return 4 * count_parameters(without_memory(config.model))
