"""Files that are whole or not there, at whatever moment a process is killed. No torch here."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A name to write to, beside `path`; what stands there at the end becomes `path`. Nobody else
    has that name, so of several processes that write the same file at once, the last one wins."""
    partial = partial_name(path)
    try:
        yield partial
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def partial_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def is_partial(path: Path) -> bool:
    """Whether a killed process may have left it, half written."""
    return re.search(r"\.[0-9a-f]{12}\.tmp$", path.name) is not None


def remove_partial(folder: Path) -> None:
    """To be called by the one process that writes into the folder."""
    for path in folder.iterdir():
        if is_partial(path) and path.is_file():
            path.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    with writing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


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


def follow_umask(path: Path) -> None:
    """Give a file the mode of any new one: some libraries write through mkstemp, whose files nobody
    else may read."""
    probe = partial_name(path)
    try:
        probe.touch()
        path.chmod(probe.stat().st_mode & 0o777)
    finally:
        probe.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stays_inside(name: object) -> bool:
    """Whether a name out of a manifest is one of a file in its folder. (A link there may lead
    elsewhere: the hub's cache is made of them, and whoever sets one can read what it leads to.)"""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
