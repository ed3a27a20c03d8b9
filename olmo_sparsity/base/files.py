"""Write files atomically, and read them with bounds.

A killed process leaves no half-written file under its final name. `writing` yields a temporary name
next to the file and renames it at the end; `write_atomically` and `write_json` do so for a text:

    with writing(Path("table.parquet")) as partial:  # table.parquet.1a2b3c4d.tmp
        frame.to_parquet(partial)

A reader therefore sees the old file or the new one. Files with the temporary name that a killed
process has left are removed by `remove_partial`, at the next start.

Imports no torch, and pyarrow only inside functions.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from olmo_sparsity.base.conform import parse_json
from olmo_sparsity.base.errors import ConfigError, DataError, UserError, one_line

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

T = TypeVar("T")

ABANDONED_S = 3600.0
"""No write pauses so long: an older partial file was left by a killed process."""

LARGEST_JSON = 2**26
"""Bytes of the largest file that is read at once."""


# --- write ----------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a unique name next to `path` to write a file or folder to, then rename it to `path`. Of
    several processes that write the same file at once, the last one wins. A link to a file stays,
    and the file that it names is written."""
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
    """Turn the error of a failed write into a UserError that names the file. The errors of Python's
    `write` do not name it, and those of safetensors have the number of the error only in their
    message. Errors of reading another file pass through."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None)
        if number is None:
            in_message = re.search(r"\(os error (\d+)\)", str(error))
            number = int(in_message[1]) if in_message else None
        filename = getattr(error, "filename", None)
        is_another_file = filename and not str(filename).startswith(str(partial or path))
        if number is None or is_another_file:
            raise
        failure = UserError(
            f"{path} cannot be written: {os.strerror(number)}; free space (or raise a limit), or "
            "write to another place"
        )
        failure.errno = number
        raise failure from None


def publish(partial: Path, final: Path) -> None:
    """Sync a finished file or folder and give it its final name."""
    # Without the first sync, a power cut can leave the new name with empty content.
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
    """Give a file the mode of any new one: some libraries use mkstemp, so that only the owner
    can read."""
    path.chmod(_stat_of_new(path).st_mode & 0o777)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is whole or not there."""
    with writing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is whole or not there."""
    write_atomically(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write safetensors to the name of a partial file, and sync them. `publish` cannot: it may run
    on another machine, and only the machine that wrote a file can flush it."""
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
    for path in filter(is_partial, folder.iterdir()):
        # In a folder that is being written, only the latest file may be young.
        youngest = min(age_s(file) for file in (path, *path.rglob("*")))
        if youngest > ABANDONED_S:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder; one that is not there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def age_s(path: Path) -> float:
    """Return how many seconds ago a file was changed, by the clock of the disk, as those of
    machines may differ. 0 if the file is gone."""
    try:
        now = _stat_of_new(path).st_mtime
    except OSError:  # read-only
        now = time.time()
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _stat_of_new(path: Path) -> os.stat_result:
    """Return time and mode of a file created next to `path` now."""
    probe = partial_name(path)
    try:
        probe.touch()
        return probe.stat()
    finally:
        probe.unlink(missing_ok=True)


# --- check a path that a user has passed ----------------------------------------------------------


def path_of(name: str, path: object) -> Path:
    """Return a path that a user has passed as the argument `name`; raise ConfigError for what is no
    path, or a blank one, which would mean the current folder."""
    if isinstance(path, bytes) or not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{name}={path!r:.60} must be a path, a string or pathlib.Path")
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{name}={text!r:.60} is blank; pass the path of a file or folder")
    return Path(text)


def check_suffix(name: str, path: str | os.PathLike[str], *suffixes: str) -> None:
    """Raise ConfigError if a file to be written has none of the suffixes; `name` is the option."""
    if path_of(name, path).suffix not in suffixes:
        raise ConfigError(f"{name}={path} must end in {' or '.join(suffixes)}")


def check_no_tilde(name: str, path: str | None) -> None:
    """Raise ConfigError if a path to be written begins with ~. A shell replaces it only where a
    word begins, so not in `--out=~/results`, and a folder named ~ would be made. `name` is the
    option."""
    if path is not None and path.startswith("~"):
        full = os.path.expanduser(path)
        raise ConfigError(f"{name}={path}: ~ is not replaced here; write the whole path, {full}")


def check_not_read(name: str, path: str | None, inputs: Iterable[str]) -> None:
    """Raise ConfigError if a file to be written is one that the command reads, which would be
    lost. `name` is the option; `inputs` are words of other options: FILE, @FILE or NAME=FILE."""
    if path is None or not os.path.exists(path):
        return
    for word in inputs:
        for file in (word, word.removeprefix("@"), word.partition("=")[2]):
            if os.path.exists(file) and os.path.samefile(file, path):
                problem = f"{name}={path} would replace {file}, which is read"
                raise ConfigError(f"{problem}; write to another file")


# --- read -----------------------------------------------------------------------------------------


def read_bounded(path: Path, max_bytes: int = LARGEST_JSON) -> bytes:
    """Return the content of a file that is read at once. Raises OSError."""
    check_bounded(path, max_bytes)
    with path.open("rb") as file:
        return file.read(max_bytes)


def check_bounded(path: Path, max_bytes: int) -> None:
    """Raise OSError for a pipe or device, which may never end, and for what would fill the
    memory."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if status.st_size > max_bytes:
        reason = f"it has {status.st_size:,} bytes, above the {max_bytes:,} that are read"
        raise OSError(errno.EFBIG, reason, str(path))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """Return the content of a JSON file as `kind`; raise DataError with the remedy if it does not
    conform."""
    try:
        return parse_json(read_bounded(path), kind)
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = one_line(error)
    raise DataError(f"{path}: {reason}; {remedy}")


def read_parquet(path: Path, remedy: str) -> pa.Table:
    """Return a Parquet table; raise DataError with the remedy if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read ({one_line(error)}); {remedy}") from None
