"""Estimate the time in which the GPUs of a run send: the bytes of its collectives, divided by the
speed of the network.

NCCL sends in a ring: each process sends to the next one, and all of them at once.
"""

from __future__ import annotations

from olmo_sparsity.config.sections import Precision, RunConfig
from olmo_sparsity.models.transformers_folder import count_parameters
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.memory_formulas import without_memory

NIC_BYTES_PER_S = 25e9
"""Bytes per second of a network card: assumed, of 200 Gbit/s."""


def sending_seconds(config: RunConfig, hardware: Hardware) -> float:
    """Return the seconds of a step in which the GPUs send, if they do not compute meanwhile."""
    training = config.training
    count = hardware.num_processes
    sequences_of_process = training.batch_size // count
    num_micro_batches = max(1, sequences_of_process // (training.micro_batch_size or 1))
    passed_bytes = collective_bytes(
        config.engine.name,
        count_parameters(without_memory(config.model)),
        training.precision,
        num_micro_batches,
        num_reductions=num_micro_batches if config.engine.reduce_every_micro_batch else 1,
    )
    # A process does not send its own part of the ring.
    return passed_bytes * (count - 1) / count / ring_bytes_per_s(hardware)


def collective_bytes(
    engine: str,
    num_parameters: int,
    precision: Precision,
    num_micro_batches: int,
    num_reductions: int = 1,
) -> float:
    """Return the bytes that a process passes to collectives in a step, those of an all-reduce
    twice. A ring of N processes sends (N − 1)/N of them. `num_reductions`: with `fsdp`, how often
    gradients are added up over processes."""
    is_sharded = engine == "fsdp" or engine.startswith("zero")
    size = num_parameters * (2 if precision == "bf16" and is_sharded else 4)
    if engine == "fsdp":  # weights forward and backward; gradients in fp32
        return 2 * size * num_micro_batches + 4 * num_parameters * num_reductions
    if engine == "zero1":  # an all-reduce of gradients, and the updated weights
        return 3 * size
    if engine == "zero2":
        return 2 * size * num_micro_batches + size
    if engine == "zero3":  # weights forward and backward, and gradients
        return 3 * size * num_micro_batches
    return 2 * size  # an all-reduce of gradients


def ring_bytes_per_s(hardware: Hardware) -> float:
    """Return the bytes per second that each process sends in a ring of all processes. NCCL makes a
    ring for each network card (github.com/NVIDIA/nccl/issues/495). So all cards of a node together
    carry what leaves it, and each ring is as fast as its slowest part."""
    assert hardware.gpu is not None
    within_node = 1e9 * hardware.gpu.gigabytes_per_s
    if hardware.num_nodes == 1:
        return within_node
    per_node = hardware.processes_per_node
    num_nics = hardware.nics_per_node or (per_node if hardware.gpu.has_own_nic else 1)
    between_nodes = NIC_BYTES_PER_S * num_nics
    return between_nodes if per_node == 1 else min(within_node, between_nodes)
