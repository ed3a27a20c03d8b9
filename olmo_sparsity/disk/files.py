"""Write files and folders atomically, so that a killed process leaves no partial ones. No torch."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from olmo_sparsity.errors import ConfigError, UserError
from olmo_sparsity.process.launch import machine_id, process_start

STALE_S = 180.0
"""A file that another machine has not touched for so long has lost its process."""


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a unique name beside `path` to write a file or folder to, then rename it to `path`. Of
    several processes that write the same file at once, the last one wins."""
    partial = partial_name(path)
    try:
        with naming(path, partial):
            yield partial
            publish(partial, path)
    finally:
        _remove(partial)


@contextmanager
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Name a file that cannot be written: the errors of `write` do not, and those of safetensors
    have the number of the error in their message only."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None)
        if not isinstance(error, OSError) and (found := re.search(_RUST_ERROR, str(error))):
            number = int(found[1])
        named = getattr(error, "filename", None)
        if number is None or (named and not str(named).startswith(str(partial or path))):
            raise
        raise UserError(
            f"{path} cannot be written: {os.strerror(number)}; free space (or raise a limit), or "
            "write to another place"
        ) from None


_RUST_ERROR = r"\(os error (\d+)\)"


def partial_name(path: Path) -> Path:
    """The name holds machine and process, to recognize files that killed processes left."""
    started = process_start(os.getpid()) or "0"
    mark = f"{_machine()}-{os.getpid()}-{started}-{uuid.uuid4().hex[:8]}"
    return path.with_name(f"{path.name}.{mark}.tmp")


_PARTIAL = re.compile(r"\.([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{8}\.tmp$")


def is_partial(path: Path) -> bool:
    """Whether a process is writing it, or was killed while writing."""
    return _PARTIAL.search(path.name) is not None


def remove_partial(folder: Path) -> None:
    """Remove the partial files of killed processes, but not of running ones."""
    for path in folder.iterdir():
        match = _PARTIAL.search(path.name)
        if match is None:
            continue
        machine, pid, started = match.groups()
        if machine == _machine() and started != "0":
            gone = process_start(int(pid)) != started
        else:
            gone = age_s(path) > STALE_S
        if gone:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def age_s(path: Path) -> float:
    """By the clock of the disk, as machines may differ. 0 if the file is gone."""
    try:
        now = _stat_of_new(path).st_mtime
    except OSError:  # read-only
        now = time.time()
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _stat_of_new(path: Path) -> os.stat_result:
    """Time and mode of a file created beside `path` now."""
    probe = partial_name(path)
    try:
        probe.touch()
        return probe.stat()
    finally:
        probe.unlink(missing_ok=True)


def _machine() -> str:
    return hashlib.sha256(machine_id().encode()).hexdigest()[:8]


def write_atomically(path: Path, text: str) -> None:
    with writing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def refuse_suffix(name: str, path: str | os.PathLike[str], *suffixes: str) -> None:
    if Path(path).suffix not in suffixes:
        raise ConfigError(f"{name}={path} must end in {' or '.join(suffixes)}")


def publish(partial: Path, final: Path) -> None:
    """Sync a finished file or folder and give it its final name."""
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    partial.replace(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Flush to disk; for a folder its list of names, without which no rename survives a power
    cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def follow_umask(path: Path) -> None:
    """Give a file the mode of any new one: some libraries use mkstemp, whose files only the owner
    can read."""
    path.chmod(_stat_of_new(path).st_mode & 0o777)


def read_bounded(path: Path, most: int = 2**26) -> bytes:
    """The content of a file that is read at once. Raises OSError."""
    check_bounded(path, most)
    with path.open("rb") as file:
        return file.read(most)


def check_bounded(path: Path, most: int) -> None:
    """Refuse a pipe or device, which may never end, and what would fill the memory."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if status.st_size > most:
        reason = f"it has {status.st_size:,} bytes, above the {most:,} that are read"
        raise OSError(errno.EFBIG, reason, str(path))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stays_inside(name: object) -> bool:
    """Whether a name in a manifest is inside its folder. (Links are allowed: the hub's cache
    consists of them, and whoever creates one can read its target.)"""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
