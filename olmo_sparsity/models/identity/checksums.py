"""Identify tensors and plain values of a model in memory.

    checksum(weight)                     32 bytes; a tensor on a GPU stays there
    is_plain({"eps": 1e-5, "n": [1]})    True: its repr identifies it
    is_plain(torch.nn.Linear(1, 1))      False: its repr leaves out its weights

model_identity.py and replaced_code.py call them. Checksums are stored with results, so a change of
how they are computed would make every stored result one of another model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

WORDS_PER_ROW = 509
"""The number of words of 8 bytes in a row of the matrix whose sums identify a tensor. Stored
checksums depend on it, so it stays. It was chosen when only rows were summed: it is a prime, which
divides no usual width, so that rows of the matrix were no rows of the weight, whose sums an
exchange of columns does not change. Since columns are summed, too, any number notices that."""


def is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers, texts and None only, so that its repr identifies
    it in any process. The repr of other objects may hold their address, which differs between
    processes, or leave out what they hold."""
    if isinstance(value, Mapping):
        return all(is_plain(key) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, int | float | str)


def checksum(tensor: Any) -> bytes:
    """Return a checksum of a tensor's bytes. It does not depend on shape and dtype, which
    `_settings` in model_identity.py compares.

    The bytes are arranged as words of 8 bytes in a matrix. The checksum is the SHA-256 of the sums
    of its columns and of its rows, and of the bytes that do not fill a row:

        word   word   …  word        → sum of the row
        word   word   …  word        → sum of the row
          ↓      ↓         ↓
        sums of the columns            so that two words which change places are noticed, too

    The sums are computed on the tensor's device. Hashing all bytes would copy a model on a GPU to
    the host in each call.
    """
    if hasattr(tensor, "__tensor_flatten__"):  # of another library, such as a quantized one
        # It holds plain tensors, and a context of shapes and options.
        names, context = tensor.__tensor_flatten__()
        inner = b"".join(checksum(getattr(tensor, name)) for name in names)
        return hashlib.sha256(inner + repr(context).encode()).digest()

    plain = tensor.detach().as_subclass(Tensor)
    # A view of all bytes, without a copy where the tensor is contiguous.
    bytes_N = plain.contiguous().flatten().view(torch.uint8)
    if bytes_N.storage_offset() % 8:  # words must begin at multiples of their size
        bytes_N = bytes_N.clone()

    end = len(bytes_N) - len(bytes_N) % (8 * WORDS_PER_ROW)
    words = bytes_N[:end].view(torch.int64).view(-1, WORDS_PER_ROW)

    # Sums of integers that overflow wrap around, and are the same in any order.
    digest = hashlib.sha256()
    for hashed in (words.sum(0), words.sum(1), bytes_N[end:]):
        digest.update(hashed.cpu().numpy().data)
    return digest.digest()
