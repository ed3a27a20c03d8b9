"""Measure how fast the processes of a job sum numbers, and fail if they are slower than expected.

    srun … python -m olmo_sparsity.training.processes.all_reduce [--least GB/s]
    16 processes, 21.40 GB/s each (InfiniBand or RoCE; at least 12.5)

slurm/accept.sbatch runs it within a node and between nodes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from olmo_sparsity.base.devices import device_name
from olmo_sparsity.base.gpus import PCIE_GIGABYTES_PER_S, find_gpu
from olmo_sparsity.training.processes.device import own_device
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.process_group import connect

MIN_SHARE = 0.5
"""Smallest share of the speed that `train --dry-run` assumes for a link. A cluster with less is
slower than its dry run says."""

INFINIBAND_GIGABYTES_PER_S = 25.0
"""GB/s of a card of 200 Gbit/s, which NCCL uses even for a single GPU."""

MIN_OVER_TCP = 0.5
"""Smallest GB/s over TCP: about half of what ten-gigabit Ethernet carries."""

MIN_ON_CPU = 0.02
"""Smallest GB/s of gloo. Processes on CPUs only try a job out."""

NUM_REPETITIONS = 5


def main(words: Sequence[str]) -> int:
    """Measure, print a line, and return the exit code: 1 if the speed is too low."""
    parser = argparse.ArgumentParser(description="Measure an all-reduce of all processes.")
    parser.add_argument("--least", type=float, help="GB/s below which this fails; 0: never")
    options = parser.parse_args(words)
    with connect() as processes:
        device = own_device("auto", processes)
        speed = measure_speed(device, processes)
        if not processes.is_first:
            return 0
        link = find_link(device, processes)
        min_speed = link.min_gigabytes_per_s if options.least is None else options.least
        print(
            f"{processes.world_size} processes, {speed:.2f} GB/s each ({link.name}; at least "
            f"{min_speed:g})",
            flush=True,
        )
        return int(speed < min_speed)


def measure_speed(device: torch.device, processes: Processes) -> float:
    """Return the GB/s that each process sends, as in a ring: the median of some repetitions."""
    # 256 MiB on a GPU, more than the gradients of a DDP bucket, so that latency hardly counts.
    numbers = torch.ones(2**26 if device.type == "cuda" else 2**20, device=device)
    seconds = []
    for _ in range(1 + NUM_REPETITIONS):
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    # A ring of N processes sends (N − 1)/N of the numbers twice: to add them up, to hand them on.
    world_size = processes.world_size
    sent_bytes = 2 * (world_size - 1) / world_size * numbers.nbytes
    after_connecting = seconds[1:]  # the first one also opens connections
    return sent_bytes / statistics.median(after_connecting) / 1e9


class Link(NamedTuple):
    """The connection between the processes."""

    name: str
    min_gigabytes_per_s: float
    """The smallest speed that it should have."""


def find_link(device: torch.device, processes: Processes) -> Link:
    """Return the connection between the processes, of which the slowest part counts."""
    if device.type != "cuda":
        return Link("gloo", MIN_ON_CPU)
    if processes.world_size == processes.local_world_size:
        gpu = find_gpu(device_name(device))
        speed = gpu.gigabytes_per_s if gpu else PCIE_GIGABYTES_PER_S
        name = "NVLink" if speed > PCIE_GIGABYTES_PER_S else "PCIe"
        return Link(name, MIN_SHARE * speed)
    if has_infiniband():
        return Link("InfiniBand or RoCE", MIN_SHARE * INFINIBAND_GIGABYTES_PER_S)
    return Link("TCP", MIN_OVER_TCP)


def has_infiniband() -> bool:
    """Return whether this node has a card that NCCL uses without TCP."""
    cards = Path("/sys/class/infiniband")
    return cards.is_dir() and any(cards.iterdir())


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(exit_code)  # threads of gloo may wait for each other for ever
