"""Choose the device, and say what it can: its peak speed, fast dtypes, memory, threads.

Imports torch only inside functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.launch import read_launch

if TYPE_CHECKING:
    import torch


# --- the device of this process -------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a GPU, or `cpu`."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def choose_device(
    name: str, choose_gpu: Callable[[int], int] | None = None, setting: str = "device"
) -> torch.device:
    """Return the device of this name, and raise ConfigError if it cannot be used.

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
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{setting}={name} cannot be used ({reason}); set it to auto or cpu"
        ) from None
    return device


# --- GPUs that are known by name ------------------------------------------------------------------


PCIE_GIGABYTES_PER_S = 20.0
"""The gigabytes that a GPU without NVLink sends to another one of its machine in a second."""


UNKNOWN_TFLOPS = 0.0
"""The speed of a GPU that is not in the list: its memory counts, and no time is predicted."""


@dataclass(frozen=True)
class Gpu:
    """The numbers of a kind of GPU, by which times and memory are predicted."""

    name: str
    tflops: float
    """The peak speed of dense matrix products in bf16, in 10^12 operations a second, from the data
    sheet; or `UNKNOWN_TFLOPS`."""

    gigabytes: float
    """The size of its memory."""

    gigabytes_per_s: float = PCIE_GIGABYTES_PER_S
    """The gigabytes that one of several GPUs of a machine sends to the next in a ring in a second.
    They are assumed to be two thirds of what NVLink's data sheet says."""

    has_own_nic: bool = False
    """Whether machines usually have a network card for each of these GPUs: assumed."""


# `find_gpu` takes the first that matches, so "H100 PCIe" comes before "H100".
GPUS = [
    Gpu("GB200", 2500, 186, 600, has_own_nic=True),
    Gpu("B200", 2250, 180, 600, has_own_nic=True),
    Gpu("GH200", 989, 96, 300, has_own_nic=True),
    Gpu("H200 NVL", 835, 141),
    Gpu("H200", 989, 141, 300, has_own_nic=True),
    Gpu("H100 PCIe", 756, 80),
    Gpu("H100 NVL", 835, 94),
    Gpu("H100", 989, 80, 300, has_own_nic=True),
    Gpu("H800 PCIe", 756, 80),
    Gpu("H800", 989, 80, 130, has_own_nic=True),
    Gpu("A100 40GB PCIe", 312, 40),
    Gpu("A100 40GB", 312, 40, 200, has_own_nic=True),
    Gpu("A100 PCIe", 312, 80),
    Gpu("A100", 312, 80, 200, has_own_nic=True),
    Gpu("A800", 312, 80, 130, has_own_nic=True),
    Gpu("A30", 165, 24),
    Gpu("A40", 150, 48),
    Gpu("A10", 125, 24),
    Gpu("L40S", 362, 48),
    Gpu("L40", 181, 48),
    Gpu("L4", 121, 24),
]


def find_gpu(device_name: str) -> Gpu | None:
    """Return the GPU that a name of the vendor or of a user means, such as "NVIDIA A100-SXM4-40GB"
    or "a100 40". Return None if it is not in the list, or a slice of a GPU (MIG), which has another
    speed."""
    words = set(re.split(r"\W+", device_name.upper()))
    words |= {f"{word}GB" for word in words if word.isdigit()}
    if "MIG" in words:
        return None
    for gpu in GPUS:
        if words >= set(gpu.name.upper().split()):
            return gpu
    return None


def known_gpu(name: str, option: str, *, or_else: str = "") -> Gpu:
    """Return the GPU that a user has named with an option. Raise ConfigError, with all known names,
    if it is not known. `or_else`: what else the option accepts, for the message."""
    gpu = find_gpu(name)
    if gpu is None:
        names = ", ".join(known.name for known in GPUS)
        raise ConfigError(f"{option}={name} must be {or_else}one of {names}")
    sizes = re.findall(r"\b(\d+)(?:GB)?\b", name.upper())
    if sizes and int(sizes[0]) != gpu.gigabytes:
        raise ConfigError(f"{option}={name}: {gpu.name} has {gpu.gigabytes:.0f} GB")
    return gpu


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device multiplies matrices of this dtype in hardware. A CPU that does not
    takes 6 to 50 times as long as with fp32."""
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
    """Inside, PyTorch uses one thread for a small model on the CPU, unless OMP_NUM_THREADS is
    set."""
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
