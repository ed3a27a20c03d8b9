"""Texts, and files of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import zstandard

TEXTS = ["One, two;\n“three”.", "NA", '\tfour\n five, "six" seven\n', "eight\nnine"]


def c4_line(text: str) -> bytes:
    return lines([{"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://a.org"}])


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def packed(path: str | Path, content: bytes) -> None:
    """Write a file, compressed as its name says."""
    suffix = Path(path).suffix
    if suffix == ".gz":
        content = gzip.compress(content)
    elif suffix == ".zst":  # two frames, as parallel compressors write them
        half = len(content) // 2
        content = b"".join(zstandard.compress(c) for c in (content[:half], content[half:]))
    Path(path).write_bytes(content)
