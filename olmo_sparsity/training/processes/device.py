"""Choose the device of a training process and its precision, and make its kernels deterministic.

    device = own_device(config.training.device, processes)    # cuda:3 for the fourth of a node
    choose_precision("auto", device)                          # bf16
    be_deterministic()                                        # for training.deterministic

start.py, setup/resolve.py and engines/engine.py call them, in this order.
"""

from __future__ import annotations

import os

import torch

from olmo_sparsity.base.devices import choose_device, multiplies
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.sections import Precision
from olmo_sparsity.training.processes.distributed import Processes


def own_device(name: str, processes: Processes) -> torch.device:
    """Return the device of this process, which it shares with no other process."""

    def choose_gpu(num_visible: int) -> int:
        return own_gpu(num_visible, processes)

    device = choose_device(name, choose_gpu, "training.device")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def own_gpu(num_visible: int, processes: Processes) -> int:
    """Return the number of this process's GPU. Launchers make all GPUs of the machine visible to a
    process, or only its own."""
    if num_visible == 1:
        return 0
    if processes.local_rank >= num_visible:
        raise ConfigError(
            f"this machine runs {processes.local_world_size} processes, but PyTorch sees "
            f"{num_visible} GPUs; launch as many processes as GPUs, or request more GPUs"
        )
    return processes.local_rank


def be_deterministic() -> None:
    """Let PyTorch take deterministic kernels, or raise where it has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    # This fills new tensors, to find reads of unset memory: slow, and needed only for debugging.
    # PyTorch makes it a property of the module while it runs, which mypy does not see.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_precision(name: Precision, device: torch.device) -> Precision:
    """Return bf16 or fp32. `auto` becomes bf16 if the device multiplies it in hardware."""
    if name != "auto":
        return name
    return "bf16" if multiplies(device, torch.bfloat16) else "fp32"
