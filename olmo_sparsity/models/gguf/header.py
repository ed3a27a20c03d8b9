"""Read the header of a GGUF file: its entries, and where its tensors lie.

A file is, little-endian:

    "GGUF"  3  272  31                         version, number of tensors, number of entries
    "llama.block_count"  4  30                 each entry: its key, type (4: uint32) and value
    …
    "blk.0.attn_q.weight"  2  576 576  3  0    each tensor: its name, number of dimensions, shape,
    …                                          type (3: Q4_1), offset
    the numbers of the tensors, each at a multiple of `general.alignment` bytes

`read_header` parses all but the numbers into a `Header`, and checks that tensors fill the file
without a gap: GGUF has no checksum. format.py and tokenizer.py call it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.base.errors import DataError

REMEDY = "load the model's safetensors instead"
"""The remedy for a file that is intact, and that transformers does not read right."""

_FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The letter that `struct` has for each type of number. The types are numbered in the file."""

UINT8 = 0
_BOOL = 7
_STRING = 8
ARRAY = 9
"""Types of entries, as the file numbers them."""

DEFAULT_ALIGNMENT = 32
"""The bytes of `general.alignment` in a file that does not state it."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file, without its numbers."""

    name: str
    shape: tuple[int, ...]
    """Fastest dimension first, as in the file."""

    type: int
    """How the weights are quantized: a value of `gguf.GGMLQuantizationType`."""

    start: int
    """The index of its first byte in the file."""

    num_bytes: int

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The part of a GGUF file before its weights."""

    path: Path
    metadata: dict[str, Any]
    """Entries of the header by their keys, such as `llama.block_count`."""

    raw: dict[str, bytes]
    """The bytes of each entry, with its key. The tokenizer's arrays are left out."""

    tensors: list[Tensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry of the architecture, such as `block_count` of `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


class _Bytes:
    """A reader of a file, from its start. It raises struct.error at the end of the file. The
    letters of number types are those of `struct`: I is a number of 4 bytes, Q one of 8, both
    unsigned."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def numbers(self, letter: str, count: int) -> tuple:
        """Return the next numbers, of a type of `struct`."""
        layout = struct.Struct(f"<{count}{letter}")
        values = layout.unpack_from(self.data, self.offset)
        self.offset += layout.size
        return values

    def number(self, letter: str) -> Any:
        return self.numbers(letter, 1)[0]

    def string(self) -> str:
        """Return the next text, which begins with its length."""
        size = self.number("Q")
        # A slice would be cut at the end of the file without an error.
        if size > len(self.data) - self.offset:
            raise struct.error(f"a string of {size:,} bytes passes its end")
        start = self.offset
        self.offset += size
        return self.data[start : self.offset].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Return the value of an entry of this type: a number, a truth value, a text or a list."""
        if kind == _STRING:
            return self.string()
        if kind == _BOOL and self.data[self.offset] > 1:  # struct takes any byte for true
            raise ValueError(f"{self.data[self.offset]} is neither true nor false")
        if kind != ARRAY:
            return self.number(_FORMATS[kind])
        kind_of_items = self.number("I")
        num_items = self.number("Q")
        if kind_of_items == _STRING:
            return [self.string() for _ in range(num_items)]
        return list(self.numbers(_FORMATS[kind_of_items], num_items))


def read_header(path: Path) -> Header:
    """Return the header of a file, after checking that its tensors fill the file without a gap."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse_header(path, data)
    except struct.error as error:
        raise DataError(f"'{path}' ends too early ({error}); download it again") from None
    # Bytes that are not a header may raise any of these, such as KeyError for an unknown type.
    except (ValueError, KeyError, OSError, OverflowError, ZeroDivisionError, TypeError) as error:
        raise DataError(f"'{path}' is not a GGUF file ({error}); download it again") from None


_MAGIC = 0x46554747  # "GGUF"


class _ListedTensor(NamedTuple):
    """A tensor as the header lists it."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    """The index of its first byte, counted from the first byte of all tensors."""


def _parse_header(path: Path, data: mmap.mmap) -> Header:
    """Return the header at the beginning of a file's bytes."""
    reader = _Bytes(data)
    magic, version = reader.numbers("I", 2)
    num_tensors, num_entries = reader.numbers("Q", 2)
    if magic != _MAGIC or version not in (2, 3):
        raise ValueError("it does not begin as GGUF version 2 or 3, little-endian, does")

    metadata: dict[str, Any] = {}
    raw: dict[str, bytes] = {}
    for _ in range(num_entries):
        start = reader.offset
        key = reader.string()
        value = reader.value(reader.number("I"))
        metadata[key] = value
        if not (key.startswith("tokenizer.") and isinstance(value, list)):
            raw[key] = data[start : reader.offset]

    listed: list[_ListedTensor] = []
    for _ in range(num_tensors):
        name = reader.string()
        shape = reader.numbers("Q", reader.number("I"))
        kind = reader.number("I")
        offset = reader.number("Q")
        listed.append(_ListedTensor(name, shape, kind, offset))

    align = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    first_byte = round_up(reader.offset, align)
    return Header(path, metadata, raw, _place_tensors(listed, first_byte, align, len(data)))


def _place_tensors(
    listed: Sequence[_ListedTensor], first_byte: int, align: int, file_size: int
) -> list[Tensor]:
    """Return the tensors with the bytes of the file that they are in. Raise ValueError or
    struct.error unless each begins where the one before it ends, and the last one ends with the
    file: a damaged byte in a shape would otherwise shift the weights without an error.

    Args:
        first_byte: The index in the file of the first byte of all tensors.
        align: Each tensor begins at a multiple of this number of bytes.
    """
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    tensors: list[Tensor] = []
    end = 0
    for name, shape, kind, offset in listed:
        if kind not in sizes:
            raise ValueError(f"'{name}' has the unknown type {kind}")
        block_weights, block_bytes = sizes[kind]
        num_bytes = math.prod(shape) // block_weights * block_bytes
        if offset != end or (shape and shape[0] % block_weights):
            raise ValueError(f"'{name}' does not begin where the tensor before it ends")
        start = first_byte + offset
        if start + num_bytes > file_size:
            raise struct.error(f"'{name}' ends at byte {start + num_bytes:,}")
        tensors.append(Tensor(name, shape, kind, start, num_bytes))
        end = round_up(end + num_bytes, align)
    if first_byte + end < file_size:
        raise ValueError(f"{file_size - first_byte - end:,} bytes follow its last tensor")
    return tensors


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is at least as large as the number."""
    return -(-number // multiple) * multiple


def damaged(header: Header, problem: str) -> DataError:
    """Return the error of a file that contradicts itself or its architecture."""
    return DataError(f"'{header.path}' is damaged: {problem}; download it again")
