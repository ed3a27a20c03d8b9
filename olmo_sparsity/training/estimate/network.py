"""Estimate the time in which the GPUs of a run send: the bytes of its collectives, divided by the
speed of the network.

NCCL sends in a ring: each process sends to the next one, and all of them at once. For 7.3B
parameters in bf16 with `fsdp`, on 64 H100s of 8 nodes, in one micro-batch:

    collective_bytes    58 GB       weights forward and backward, 2 × 14.6, and fp32 gradients, 29.2
    ring_bytes_per_s    200 GB/s    8 cards of 25 GB/s together, which is less than NVLink's 300
    sending_seconds     0.29 s      63/64 of these bytes at this speed, if nothing overlaps
"""

from __future__ import annotations

from olmo_sparsity.config.sections import Precision, RunConfig
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.meta_model import without_memory

NIC_BYTES_PER_S = 25e9
"""Bytes per second of a network card: assumed, of 200 Gbit/s."""


def sending_seconds(config: RunConfig, hardware: Hardware) -> float:
    """Return the seconds of a step in which the GPUs send, if they do not compute meanwhile."""
    training = config.training
    count = hardware.num_processes
    num_parameters = count_parameters(without_memory(config.model))
    sequences_of_process = training.batch_size // count
    # Both are 0 for a batch that is smaller than the number of processes, which no run accepts.
    num_micro_batches = max(1, sequences_of_process // (training.micro_batch_size or 1))
    num_reductions = num_micro_batches if config.engine.reduce_every_micro_batch else 1
    if sends_shards_between_nodes(config, hardware):
        return _seconds_with_shards_of_a_node(
            hardware, num_parameters, training.precision, num_micro_batches, num_reductions
        )
    passed_bytes = collective_bytes(
        config.engine.name, num_parameters, training.precision, num_micro_batches, num_reductions
    )
    # A process does not send its own part of the ring.
    return passed_bytes * (count - 1) / count / ring_bytes_per_s(hardware)


def sends_shards_between_nodes(config: RunConfig, hardware: Hardware) -> bool:
    """Return whether each of several nodes has a copy of the model, of which only shards of
    gradients are sent between nodes (`engine.shard_over=node`)."""
    is_within_node = config.engine.name == "fsdp" and config.engine.shard_over == "node"
    return is_within_node and hardware.num_nodes > 1


def _seconds_with_shards_of_a_node(
    hardware: Hardware,
    num_parameters: int,
    precision: Precision,
    num_micro_batches: int,
    num_reductions: int,
) -> float:
    """Return the seconds of a step in which the GPUs send with `engine.shard_over=node`."""
    # P parameters, s bytes each (2 in bf16, 4 in fp32), M micro-batches, of which R reduce
    # gradients, K nodes of n processes each. Each process sends
    #
    #   within its node    (2 s P M + 4 P R) (n − 1) / n    all-gathers of weights, forward and
    #                                                       backward; reduce-scatter of gradients
    #   between nodes      2 (4 P / n) (K − 1) / K          all-reduce of its shard of gradients,
    #                                                       once a step
    #
    # The n processes of a node send their shards at the same time, through all of its cards. For
    # 7.3B parameters in bf16, 8 nodes of 8 and M = 1 these are 51 GB within a node, and 6.4 GB
    # between nodes, 51 GB a node. Sharded over all 64 processes, each would send 57 GB in rings
    # that are as slow as the cards between nodes.
    per_node = hardware.processes_per_node
    num_nodes = hardware.num_nodes
    within_node = collective_bytes(
        "fsdp", num_parameters, precision, num_micro_batches, num_reductions
    )
    within_node *= (per_node - 1) / per_node
    between_nodes = 2 * (4 * num_parameters / per_node) * (num_nodes - 1) / num_nodes
    within_node_s = within_node / bytes_per_s_within_node(hardware)
    between_nodes_s = between_nodes * per_node / bytes_per_s_between_nodes(hardware)
    return within_node_s + between_nodes_s


def collective_bytes(
    engine: str,
    num_parameters: int,
    precision: Precision,
    num_micro_batches: int,
    num_reductions: int = 1,
) -> float:
    """Return the bytes that a process passes to collectives in a step, those of an all-reduce
    twice: to add numbers up, and to hand the sums on. A ring of N processes sends (N − 1)/N of
    them.

    Args:
        num_micro_batches: Micro-batches of a step, for each of which engines that shard weights
            gather them anew.
        num_reductions: With `fsdp`, how often gradients are added up over processes.
    """
    divides_moments = engine == "fsdp" or engine.startswith("zero")
    sends_in_bf16 = precision == "bf16" and divides_moments  # DDP sums gradients in fp32
    size = num_parameters * (2 if sends_in_bf16 else 4)
    if engine == "fsdp":  # weights forward and backward; gradients in fp32
        return 2 * size * num_micro_batches + 4 * num_parameters * num_reductions
    if engine == "zero1":  # an all-reduce of gradients, and the updated weights
        return 3 * size
    if engine == "zero2":  # the same, but gradients of each micro-batch
        return 2 * size * num_micro_batches + size
    if engine == "zero3":  # weights forward and backward, and gradients
        return 3 * size * num_micro_batches
    return 2 * size  # an all-reduce of gradients


def ring_bytes_per_s(hardware: Hardware) -> float:
    """Return the bytes per second that each process sends in a ring of all processes. NCCL makes a
    ring for each network card (github.com/NVIDIA/nccl/issues/495). So all cards of a node together
    carry what leaves it, and each ring is as fast as its slowest part."""
    if hardware.num_nodes == 1:
        return bytes_per_s_within_node(hardware)
    if hardware.processes_per_node == 1:  # nothing is sent within a node
        return bytes_per_s_between_nodes(hardware)
    return min(bytes_per_s_within_node(hardware), bytes_per_s_between_nodes(hardware))


def bytes_per_s_within_node(hardware: Hardware) -> float:
    """Return the bytes per second that each process sends to the next one of its node."""
    assert hardware.gpu is not None
    return 1e9 * hardware.gpu.gigabytes_per_s


def bytes_per_s_between_nodes(hardware: Hardware) -> float:
    """Return the bytes per second that all network cards of a node send together."""
    assert hardware.gpu is not None
    usual_number = hardware.processes_per_node if hardware.gpu.has_own_nic else 1
    return NIC_BYTES_PER_S * (hardware.nics_per_node or usual_number)


def describe_speed(config: RunConfig, hardware: Hardware) -> str:
    """Return the speeds at which collectives send, in words."""
    if sends_shards_between_nodes(config, hardware):
        within_node = bytes_per_s_within_node(hardware) / 1e9
        between_nodes = bytes_per_s_between_nodes(hardware) / 1e9
        return f"{within_node:.0f} GB/s a GPU within nodes and {between_nodes:.0f} a node between"
    return f"{ring_bytes_per_s(hardware) / 1e9:.0f} GB/s"
