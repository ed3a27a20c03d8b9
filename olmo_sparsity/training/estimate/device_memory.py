"""Estimate the memory of a run on each device, and choose the micro-batches that fit into it.

    hardware = Hardware.of("h100", 8, nodes=1)
    fitting_micro_batch_size(config, hardware)          # 16 sequences at a time, of c4_1b
    device_memory_of(config, hardware, 16).total_bytes  # 47.4 GiB

A run takes most in one of three phases: its start, its steps, or an evaluation. It needs the
largest of the three, not their sum, as each frees its memory before the next:

    start         weights, and copies of them that an engine makes while it is built
    steps         state (weights, gradients, optimizer) + activations of a micro-batch
    evaluation    state + activations of a forward pass, or a copy of the model for lm_eval

A GPU has CUDA's own memory, too. It is not part of the peak, which is compared with
`Hardware.usable_bytes`: these bytes are already without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.training.estimate.activation_memory import activation_bytes
from olmo_sparsity.training.estimate.evaluations import bytes_in_forward
from olmo_sparsity.training.estimate.hardware import CUDA_CONTEXT_BYTES, Hardware
from olmo_sparsity.training.estimate.meta_model import without_memory
from olmo_sparsity.training.estimate.state_memory import gathered_at_once, start_bytes, state_bytes
from olmo_sparsity.training.optimizer.optim import matrices_of_layers

MAX_MICRO_BATCH_TOKENS = 65_536
"""The largest number of tokens in a micro-batch that `auto` chooses. Larger ones gain little: the
fixed cost of a micro-batch is below 2% of a step."""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a run on each device, in bytes."""

    state_bytes: int
    """Weights, gradients and optimizer."""

    activation_bytes: float
    """What the peak of a step adds to the state."""

    start_bytes: int
    """The peak of the start, before the first step."""

    evaluation_bytes: float
    """The peak of an evaluation, with the state."""

    cuda_bytes: int
    """What CUDA takes for itself; 0 on a CPU."""

    @property
    def step_bytes(self) -> float:
        """Return the peak of a step."""
        return self.state_bytes + self.activation_bytes

    @property
    def peak_bytes(self) -> float:
        """Return the peak of all tensors of the run."""
        return max(self.step_bytes, self.start_bytes, self.evaluation_bytes)

    @property
    def total_bytes(self) -> float:
        """Return the peak of the process, as `nvidia-smi` would show it."""
        return self.peak_bytes + self.cuda_bytes


def device_memory_of(config: RunConfig, hardware: Hardware, micro_batch_size: int) -> DeviceMemory:
    """Return the memory of a run with micro-batches of this size."""
    return DeviceMemory(
        state_bytes=bytes_of_state(config, hardware, micro_batch_size),
        activation_bytes=activation_bytes(
            config.model, config.training, micro_batch_size, hardware.device_type
        ),
        start_bytes=bytes_at_start(config, hardware),
        evaluation_bytes=bytes_in_evaluation(config, hardware),
        cuda_bytes=CUDA_CONTEXT_BYTES if hardware.gpu else 0,
    )


def fitting_micro_batch_size(config: RunConfig, hardware: Hardware) -> int:
    """Return the number of sequences in a micro-batch: the largest divisor of a process's share of
    the batch that is at most the configured number, or that fits into memory with `auto`."""
    training = config.training
    sequences_of_process = training.batch_size // hardware.num_processes
    if training.micro_batch_size is None:  # all sequences of the process at once
        return sequences_of_process
    # Divisors, as DeepSpeed takes micro-batches of one size alone.
    divisors = [
        size for size in range(1, sequences_of_process + 1) if sequences_of_process % size == 0
    ]
    is_auto = training.micro_batch_size == 0
    if is_auto:
        fitting = [size for size in divisors if _fits_in_step(config, hardware, size)]
    else:
        fitting = [size for size in divisors if size <= training.micro_batch_size]
    # If not even one sequence fits, a size is needed all the same, to say how much is missing.
    return max(fitting, default=1)


def _fits_in_step(config: RunConfig, hardware: Hardware, micro_batch_size: int) -> bool:
    """Return whether a micro-batch is one that `auto` may choose: small enough for the memory of
    start and steps, and not larger than is of use. An evaluation takes the same memory with any
    micro-batch, so it does not count here; where it alone is too large, `check_fits` says so."""
    training = config.training
    if micro_batch_size * training.length > MAX_MICRO_BATCH_TOKENS:
        return False
    state = bytes_of_state(config, hardware, micro_batch_size)
    activations = activation_bytes(config.model, training, micro_batch_size, hardware.device_type)
    return max(state + activations, bytes_at_start(config, hardware)) <= hardware.usable_bytes


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
    sequences_of_process = config.training.batch_size // hardware.num_processes
    has_several_micro_batches = micro_batch_size < sequences_of_process
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
        # Muon has one moment of a matrix, in fp32, where AdamW has two. Other engines that shard do
        # not take Muon, which needs whole matrices.
        num_in_matrices = sum(matrix.numel() for matrix in matrices_of_layers(model))
        state -= 4 * num_in_matrices // (num_shards if is_fsdp else 1)
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
    """Return the bytes on each device at the peak of an evaluation. It is there while held-out
    sequences are read, or while tasks of lm_eval are measured: every process then has a whole copy
    of the model in fp32 beside its state. (Activations of the tasks are not known.)"""
    # Whole gradients, which `fsdp` adds up over micro-batches, are gone by then. So this is the
    # state of a run whose steps have a single micro-batch.
    sequences_of_process = config.training.batch_size // hardware.num_processes
    state = bytes_of_state(config, hardware, micro_batch_size=sequences_of_process)
    return state + max(bytes_in_forward(config, hardware), bytes_copied_for_tasks(config))


def bytes_copied_for_tasks(config: RunConfig) -> int:
    """Return the bytes of the copy of all weights, in fp32, on which each process measures tasks of
    lm_eval; 0 without tasks."""
    if not config.evaluation.lm_eval:
        return 0
    return 4 * count_parameters(without_memory(config.model))
