"""Choose the device of this process, and how its memory is given back.

Place in the flow: beneath models, training and tasks.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import torch

from olmo_sparsity.errors import ConfigError
from olmo_sparsity.process.launch import read_launch


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def choose_device(
    name: str, own_gpu: Callable[[int], int] | None = None, setting: str = "device"
) -> torch.device:
    """A GPU always has its index: torch.cuda.set_device refuses a device without. `own_gpu`: of so
    many GPUs, the one of this process; by default, processes may share them."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        # Launchers make all GPUs of the machine visible to a process, or only its own.
        seen = torch.cuda.device_count()
        name = f"cuda:{own_gpu(seen) if own_gpu else read_launch().local_rank % seen}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{setting}={name} cannot be used: {reason}; set it to auto or cpu"
        ) from None
    return device


NATIVE = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}
"""Abilities of a CPU, of which one is enough to multiply in this dtype (PyTorch's names). Those
of ARM are left out: whether PyTorch uses them differs from system to system."""


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices of this dtype are multiplied in hardware. A CPU that does not takes 6 to 50
    times as long as with fp32."""
    if device.type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported()
    if device.type != "cpu" or dtype not in NATIVE:
        return True
    abilities: dict = getattr(torch.cpu, "get_capabilities", dict)()
    return any(abilities.get(name) for name in NATIVE[dtype])


LARGE = 2**24
"""Bytes of a tensor."""


def give_back_large_tensors() -> None:
    """Main memory of tensors of at least `LARGE` returns to the system as soon as they are freed.
    glibc's heap keeps those up to 32 MiB, in holes that the next one often does not fit. Costs new
    pages for each tensor, so it is for processes that need the memory."""
    m_mmap_threshold = -3
    with contextlib.suppress(OSError, AttributeError):  # other C libraries lack it
        ctypes.CDLL(None).mallopt(m_mmap_threshold, LARGE)
