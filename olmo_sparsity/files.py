"""Files that are whole or not there, at whatever moment a process is killed. No torch here."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text, encoding="utf-8")
    publish(partial, path)


def publish(partial: Path, final: Path) -> None:
    """A finished file or folder takes its real name."""
    sync(partial)
    partial.replace(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Onto the disk; of a folder, its list of names: else no rename survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
