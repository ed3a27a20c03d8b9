"""List the GPUs that are known by name, with the numbers by which times and memory are predicted.

    find_gpu("NVIDIA A100-SXM4-40GB").tflops     # 312: "A100 40GB"
    find_gpu("a100 40")                          # the same, as a user writes it
    find_gpu("NVIDIA H100 MIG 1g.10gb")          # None: a slice of a GPU has another speed
    known_gpu("h100 40", "--gpu")                # ConfigError: an H100 has 80 GB

The dry runs of training and of `measure` ask here. Imports nothing of ours but errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from olmo_sparsity.base.errors import ConfigError

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
    # Users write "a100 40", data sheets "A100 40GB".
    words |= {f"{word}GB" for word in words if word.isdigit()}
    # The name of a slice has that of the whole GPU in it.
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
    # "h100 40" would otherwise be taken for an H100, which has twice as much.
    sizes = re.findall(r"\b(\d+)(?:GB)?\b", name.upper())
    if sizes and int(sizes[0]) != gpu.gigabytes:
        raise ConfigError(f"{option}={name}: {gpu.name} has {gpu.gigabytes:.0f} GB")
    return gpu
