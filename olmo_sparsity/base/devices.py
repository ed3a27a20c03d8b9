"""Choose the device of a process, and say what it can: fast dtypes, peak memory, threads.

    choose_device("auto")     # cuda:1 for the second process of a machine with GPUs; or cpu
    multiplies(torch.device("cpu"), torch.bfloat16)     # False on many CPUs: there fp32 is faster

gpus.py has the speed and memory of GPUs by name. Imports torch only inside functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.launch import read_launch

if TYPE_CHECKING:
    import torch


def choose_device(
    name: str, choose_gpu: Callable[[int], int] | None = None, setting: str = "device"
) -> torch.device:
    """Return the device of this name. Raise ConfigError if it cannot be used.

    Args:
        name: Such as cpu, cuda or cuda:1. auto is a GPU if there is one.
        choose_gpu: Returns the index of this process's GPU, given the number of GPUs. By default
            processes are spread over them, and several may share one.
        setting: The option that names the device, for messages.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"

    # torch.cuda.set_device rejects a device without an index.
    if name == "cuda" and torch.cuda.is_available():
        # Launchers make all GPUs of the machine visible to a process, or only its own.
        num_gpus = torch.cuda.device_count()
        if choose_gpu is not None:
            index = choose_gpu(num_gpus)
        else:
            index = read_launch().local_rank % num_gpus
        name = f"cuda:{index}"

    try:
        device = torch.device(name)
        # A device that does not work is noticed only when something is put on it.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{setting}={name} cannot be used ({reason}); set it to auto or cpu"
        ) from None
    return device


# --- what it can ----------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a GPU, or `cpu`."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device multiplies matrices of this dtype in hardware. A CPU that does not
    do so takes 6 to 50 times as long as with fp32."""
    import torch

    if device.type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported()
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    # PyTorch's names. Names of ARM are left out: whether it uses them differs between systems.
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    capabilities: dict = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(f"{unit}_{kind}") for unit in ("avx512", "amx"))


def release_freed_memory() -> None:
    """Give freed main memory back to the system. Otherwise glibc keeps it in holes of its heap,
    which tensors of another length do not fit."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries lack it
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process so far, in GiB: that of the GPU, or main memory for a
    CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # in KiB on Linux


SMALL = 2 * 10**6
"""The number of parameters below which a model is small. Its threads mostly wait for each other:
next to other work a model of 0.56M parameters took seven times the CPU time with two threads."""


@contextlib.contextmanager
def threads_for(num_parameters: int) -> Iterator[None]:
    """Let PyTorch use one thread for a small model on the CPU inside the block, unless
    OMP_NUM_THREADS is set."""
    import torch

    num_threads = torch.get_num_threads()
    if num_parameters >= SMALL or num_threads == 1 or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
