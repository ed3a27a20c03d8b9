"""Tune how glibc keeps freed main memory, for a command and never for the library.

glibc keeps freed blocks in its heap, or returns them to the system. Keeping them saves time, in
page faults; returning them saves memory. So each command chooses what it needs:

    explain, attribute, measure   keep_freed_memory
    train                         give_back_freed_memory, with large activations or sharded weights

The library never does, as the settings are those of the whole process.
"""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3
"""Number of glibc's option for the smallest block that is returned when it is freed."""


def keep_freed_memory() -> None:
    """Let glibc keep freed main memory. Returning it after each layer costs a fifth of the time of
    `explain` on CPU, in page faults."""
    import torch

    # Once a block of this size was freed, glibc keeps blocks up to this size.
    torch.empty(31 * 2**20, dtype=torch.uint8)


def give_back_freed_memory(min_bytes: int = 2**24) -> None:
    """Return freed tensors of at least `min_bytes` of main memory to the system.

    By default glibc's heap keeps those of up to 32 MiB, in holes that the next one often does not
    fit. So a process has much more memory than it uses: at 32,768 tokens 2.7 GiB, of which 0.8 are
    in use; with the shards of ZeRO-3 twice what is in use.
    """
    with contextlib.suppress(OSError, AttributeError):  # other C libraries lack it
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, min_bytes)
