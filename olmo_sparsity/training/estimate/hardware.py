"""Describe the hardware of a run: its processes, each with a device, on one or several nodes.

Hardware.here(device)               # what this machine has
Hardware.of("h100", 16, nodes=2)    # GPUs by name, which need not be here
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from olmo_sparsity.base.devices import device_name
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.gpus import UNKNOWN_TFLOPS, Gpu, find_gpu, known_gpu
from olmo_sparsity.base.launch import Launch

CUDA_CONTEXT_BYTES = 2**29
"""Bytes that CUDA itself takes on a GPU for each process, before the first tensor (about)."""

USABLE_SHARE = 0.85
"""The share of a GPU's memory that tensors can use. The rest is lost in holes between them."""

USABLE_SHARE_OF_MAIN_MEMORY = 0.5
"""The share of main memory that tensors can use in training on a CPU: other programs need it,
too."""

DISK_BYTES_PER_S = 1e9
"""Bytes that the file system writes in a second, for all processes together: assumed. A parallel
file system may write ten times as much, a shared NFS server a tenth."""

GPU_HOURS_PER_FAILURE = 50_000.0
"""GPU-hours from one failure to the next. Meta reports 419 unexpected interruptions in 54 days of
Llama 3 405B on up to 16,384 H100s, 21.2 million GPU-hours (The Llama 3 Herd of Models, 2024,
arXiv:2407.21783, section 3.3.4)."""

GPUS_PER_NODE = 8
"""The usual number of GPUs of a node, from which the number of nodes follows if none is given."""


@dataclass(frozen=True)
class Hardware:
    """The processes of a run, each with a device."""

    num_processes: int
    num_nodes: int
    usable_bytes: float
    """Bytes of its device that a process can use for tensors."""

    gpu: Gpu | None
    """The GPU of each process. None: the processes train on CPUs."""

    nics_per_node: int | None = None
    """Number of network cards of a node. None: the usual number for the GPU."""

    price: float | None = None
    """Price of a GPU-hour, in any currency. None: not known."""

    disk_bytes_per_s: float = DISK_BYTES_PER_S
    """Bytes that the file system of the run folder writes in a second, for all processes."""

    gpu_hours_per_failure: float = GPU_HOURS_PER_FAILURE
    """GPU-hours from one failure to the next: a crash, a hang, or a node that is lost."""

    @property
    def device_type(self) -> str:
        """Return the type of the devices, as PyTorch names it."""
        return "cuda" if self.gpu else "cpu"

    @property
    def has_known_speed(self) -> bool:
        """Return whether times can be predicted: for GPUs with a data sheet, not for CPUs."""
        return self.gpu is not None and self.gpu.tflops != UNKNOWN_TFLOPS

    @property
    def processes_per_node(self) -> int:
        """Return the number of processes of each node, which all have equally many."""
        return self.num_processes // self.num_nodes

    @staticmethod
    def here(device: torch.device, launch: Launch | None = None) -> Hardware:
        """Return devices like this one for the processes of a launch, by default a single one. All
        nodes are taken to have as many processes as this one."""
        launch = launch or Launch()
        num_processes = launch.world_size
        num_nodes = max(1, num_processes // launch.local_world_size)
        if device.type != "cuda":
            main_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            usable_bytes = USABLE_SHARE_OF_MAIN_MEMORY * main_memory
            return Hardware(num_processes, num_nodes, usable_bytes, None)
        # What the device has, not what its data sheet says: a slice of a GPU (MIG) has less.
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        name = device_name(device)
        gpu = find_gpu(name) or Gpu(name, UNKNOWN_TFLOPS, total_bytes / 1e9)
        usable_bytes = USABLE_SHARE * total_bytes - CUDA_CONTEXT_BYTES
        return Hardware(num_processes, num_nodes, usable_bytes, gpu)

    @staticmethod
    def of(
        name: str,
        num_gpus: int,
        nodes: int | None,
        nics_per_node: int | None = None,
        price: float | None = None,
        disk_speed: float | None = None,
        gpu_hours_per_failure: float | None = None,
    ) -> Hardware:
        """Return GPUs by their name. Raise ConfigError, which names the option of `--dry-run`, for
        GPUs that cannot be.

        Args:
            nodes: The number of nodes. None: nodes of eight GPUs.
            nics_per_node: The number of network cards of a node. None: the usual one for the GPU.
            price: The price of a GPU-hour, in any currency.
            disk_speed: GB/s of the file system. None: `DISK_BYTES_PER_S`.
            gpu_hours_per_failure: None: `GPU_HOURS_PER_FAILURE`.
        """
        gpu = known_gpu(name, "--gpu")
        options = {"--gpus": num_gpus, "--nodes": nodes, "--nics-per-node": nics_per_node}
        for option, number in options.items():
            if number is not None and number < 1:
                raise ConfigError(f"{option}={number} must be at least 1")
        if price is not None and not 0 <= price < math.inf:
            raise ConfigError(f"--gpu-hour={price} must be a price of 0 or more")
        if disk_speed is not None and not 0 < disk_speed < math.inf:
            raise ConfigError(f"--disk-speed={disk_speed} must be above 0: GB/s")
        if gpu_hours_per_failure is None:
            gpu_hours_per_failure = GPU_HOURS_PER_FAILURE
        if not 0 < gpu_hours_per_failure < math.inf:
            raise ConfigError(f"--gpu-hours-per-failure={gpu_hours_per_failure} must be above 0")
        num_nodes = nodes or math.ceil(num_gpus / GPUS_PER_NODE)
        if num_gpus % num_nodes:
            raise ConfigError(f"--gpus={num_gpus} must be a multiple of --nodes={num_nodes}")
        usable_bytes = USABLE_SHARE * gpu.gigabytes * 1e9 - CUDA_CONTEXT_BYTES
        return Hardware(
            num_processes=num_gpus,
            num_nodes=num_nodes,
            usable_bytes=usable_bytes,
            gpu=gpu,
            nics_per_node=nics_per_node,
            price=price,
            disk_bytes_per_s=DISK_BYTES_PER_S if disk_speed is None else 1e9 * disk_speed,
            gpu_hours_per_failure=gpu_hours_per_failure,
        )
