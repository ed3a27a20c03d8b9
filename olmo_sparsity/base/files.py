"""Write files atomically, and read them with bounds.

A killed process leaves no half-written file under its final name. `writing` yields a temporary name
next to the file and renames it at the end; `write_atomically` and `write_json` do so for a text:

    with writing(Path("table.parquet")) as partial:  # table.parquet.1a2b3c4d.tmp
        frame.to_parquet(partial)

A reader therefore sees the old file or the new one. Files with the temporary name that a killed
process has left are removed by `remove_partial`, at the next start.

path_options.py checks the paths of options before. Imports no torch, and pyarrow only inside
functions.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from olmo_sparsity.base.errors import DataError, UnreadableNowError, UserError, one_line
from olmo_sparsity.base.json_text import parse_json

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

T = TypeVar("T")

ABANDONED_S = 3600.0
"""The age from which a partial file was left by a killed process: no write pauses so long."""

LONGEST_WRITTEN_NAME = 242
"""The largest number of bytes of the name of a file that `writing` writes: 255, which disks store,
less the 13 that `partial_name` appends."""

LARGEST_JSON = 2**26
"""The largest number of bytes of a file that is read at once."""


# --- write ----------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a unique name next to `path`, to which the caller writes a file or folder, then rename
    it to `path`. If several processes write the same file at once, that of the last one stays. If
    `path` is a link to a file, it stays a link, and that file is replaced."""
    if path.is_symlink() and not path.is_dir():
        path = path.resolve()
    partial = partial_name(path)
    try:
        with naming_written_file(path, partial):
            yield partial
            publish(partial, path)
    finally:
        _remove(partial)


@contextmanager
def naming_written_file(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Turn the error of a failed write into a UserError that names the file. Python's own errors of
    `write` do not name it. Errors of another file, which is read meanwhile, pass through.

    Args:
        path: The file that is written, for the message.
        partial: The name under which it is written, if that is another one.
    """
    try:
        yield
    except Exception as error:
        number = _error_number(error)
        filename = getattr(error, "filename", None)
        is_another_file = filename and not str(filename).startswith(str(partial or path))
        if number is None or is_another_file:
            raise
        raise unwritable(path, number) from None


def unwritable(place: object, number: int | None) -> UserError:
    """Return the error for a file or folder that cannot be written.

    Args:
        place: Names the file or folder, for the message.
        number: The system's number of the error, by which retry.py knows whether it may pass.
            None: it is not known.
    """
    if number == errno.ENAMETOOLONG:
        remedy = f"pass a name of at most {LONGEST_WRITTEN_NAME} bytes"
    elif number in _ERRORS_OF_LIMITS:
        remedy = "free space (or raise a limit), or write to another place"
    else:
        remedy = "write to another place"
    reason = "unknown error" if number is None else os.strerror(number)
    failure = UserError(f"{place} cannot be written: {reason}; {remedy}")
    failure.errno = number
    return failure


_ERRORS_OF_LIMITS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE)
"""The errors of a full disk or quota, of the largest size of a file, and of too many open files."""


def _error_number(error: Exception) -> int | None:
    """Return the errno of an error; None if it is not an error of the operating system."""
    number = getattr(error, "errno", None)
    if number is not None:
        return int(number)
    # safetensors, which is written in Rust, has the number in the message alone.
    in_message = re.search(r"\(os error (\d+)\)", str(error))
    return int(in_message[1]) if in_message else None


def publish(partial: Path, final: Path) -> None:
    """Sync a finished file or folder and give it its final name."""
    # Without the first sync, a power cut can leave the new name with empty content.
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    partial.replace(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Flush a file to disk. For a folder, flush its list of names, without which no rename in it
    survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def follow_umask(path: Path) -> None:
    """Give a file the permissions of any new file. Some libraries create files with mkstemp, which
    only their owner can read."""
    path.chmod(_stat_of_new(path).st_mode & 0o777)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file such that a reader sees all of it or none."""
    with writing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file such that a reader sees all of it or none."""
    write_atomically(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write safetensors to the name of a partial file, and sync them. `publish` cannot do it later:
    it may run on another machine, and only the machine that wrote a file can flush it."""
    from safetensors.torch import save_file

    save_file(tensors, str(path), metadata=metadata)
    follow_umask(path)
    sync(path)


# --- partial files --------------------------------------------------------------------------------


def partial_name(path: Path) -> Path:
    """Return a name next to `path` that no other process uses, for a file that is not finished."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def is_partial(path: Path) -> bool:
    """Return whether a process is writing the file, or was killed while writing it."""
    return re.search(r"\.[0-9a-f-]{8,}\.tmp$", path.name) is not None


def remove_partial(folder: Path) -> None:
    """Remove the partial files of killed processes, but not of running ones."""
    partial_paths = list(filter(is_partial, folder.iterdir()))
    if not partial_paths:
        return
    now = _time_on_disk(folder)
    for path in partial_paths:
        # In a folder that is being written, only the latest file may be young.
        latest = max(_change_time(inner, now) for inner in (path, *paths_inside(path)))
        if now - latest > ABANDONED_S:
            _remove(path)


def paths_inside(folder: Path) -> Iterator[Path]:
    """Yield all files and folders inside a folder, at any depth, but those that another process
    removes or renames meanwhile."""
    # Path.rglob raises FileNotFoundError for them: a process of a measurement died when another one
    # finished a part of it.
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(parent, name)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there and can be removed."""
    # Not `path.is_dir()`, which raises for a name that is too long.
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    # A read-only disk refuses this even for a file that does not exist. That error would replace
    # the error of the write, which names the file that the user knows.
    with suppress(OSError):
        path.unlink(missing_ok=True)


def age_s(path: Path) -> float:
    """Return how many seconds ago a file was changed; 0 if it is gone."""
    now = _time_on_disk(path.parent)
    return now - _change_time(path, now)


def _change_time(path: Path, if_gone: float) -> float:
    """Return when a file or folder was changed; `if_gone` if another process has removed it."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return if_gone


def _time_on_disk(folder: Path) -> float:
    """Return the time by the clock of the disk that holds a folder. It may be another machine's."""
    try:
        return _stat_of_new(folder / "clock").st_mtime
    except OSError:  # read-only
        return time.time()


def _stat_of_new(path: Path) -> os.stat_result:
    """Return the status of a file that is created next to `path` now, for its time and its mode."""
    probe = partial_name(path)
    try:
        probe.touch()
        return probe.stat()
    finally:
        probe.unlink(missing_ok=True)


# --- read -----------------------------------------------------------------------------------------


def read_bounded(path: Path, max_bytes: int = LARGEST_JSON) -> bytes:
    """Return the content of a file. Raise OSError if it cannot be read, or is too large to be read
    at once."""
    check_bounded(path, max_bytes)
    with path.open("rb") as file:
        return file.read(max_bytes)


def check_bounded(path: Path, max_bytes: int) -> None:
    """Raise OSError for a pipe or device, which may never end, and for a file that is too large."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if status.st_size > max_bytes:
        reason = f"it has {status.st_size:,} bytes, above the {max_bytes:,} that are read"
        raise OSError(errno.EFBIG, reason, str(path))


_ERRORS_OF_DAMAGE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,  # `read_bounded`: it is a pipe or a device
    errno.EFBIG,  # `read_bounded`: it is too large
}
"""Errors that say what is on the disk. All others (permission, stale handle, failing disk, …) may
be gone when the file is read again, so that no work may be thrown away because of them."""


def check_readable_now(path: Path, error: Exception) -> None:
    """Raise UnreadableNowError unless the error shows that the file is missing or another one."""
    if isinstance(error, OSError) and error.errno not in _ERRORS_OF_DAMAGE:
        raise UnreadableNowError(path, error.strerror or error, error.errno) from None


def open_standard_input() -> BinaryIO:
    """Return standard input as bytes; raise DataError if the shell has closed it."""
    try:
        # The command gives the number of a closed stream to /dev/null, for writing.
        is_closed = fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    except OSError:
        is_closed = True
    if is_closed:
        raise DataError("standard input is closed; pass a file, or redirect one to it with <")
    return open(0, "rb", closefd=False)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """Return the content of a JSON file as a value of type `kind`. Raise DataError if it is
    missing, damaged or of another type, and UnreadableNowError if it cannot be read now. `remedy`:
    what to do about damage, for the message; it may be empty."""
    try:
        return parse_json(read_bounded(path), kind)
    except OSError as error:
        check_readable_now(path, error)
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = one_line(error)
    ending = f"; {remedy}" if remedy else ""
    raise DataError(f"{path}: {reason}{ending}")


def read_parquet(path: Path, remedy: str) -> pa.Table:
    """Return the table of a Parquet file. Raise DataError if it cannot be read. `remedy`: what to
    do then, for the message."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read ({one_line(error)}); {remedy}") from None
