"""Read and write files: atomically, as checked JSON, as Parquet rows, with a manifest.

A killed process leaves no partial file. Imports no torch, and pyarrow only inside functions.
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
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from olmo_sparsity.base.conform import parse_json
from olmo_sparsity.base.errors import (
    ConfigError,
    DataError,
    UnreadableNowError,
    UserError,
    one_line,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

T = TypeVar("T")

ABANDONED_S = 3600.0
"""No write pauses so long: an older partial file was left by a killed process."""


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
        raise UserError(
            f"{path} cannot be written: {os.strerror(number)}; free space (or raise a limit), or "
            "write to another place"
        ) from None


def partial_name(path: Path) -> Path:
    """Return a name next to `path` that no other process uses, for a file that is not finished."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def is_partial(path: Path) -> bool:
    """Return whether a process is writing the file, or was killed while writing it."""
    return re.search(r"\.[0-9a-f-]{8,}\.tmp$", path.name) is not None


def remove_partial(folder: Path) -> None:
    """Remove the partial files of killed processes, but not of running ones."""
    for path in filter(is_partial, folder.iterdir()):
        # Of a folder that is being written, only the latest file may be young.
        youngest = min(age_s(file) for file in (path, *path.rglob("*")))
        if youngest > ABANDONED_S:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def age_s(path: Path) -> float:
    """Return how long ago a file was changed, by the clock of the disk, as those of machines may
    differ. 0 if the file is gone."""
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


def refuse_suffix(name: str, path: str | os.PathLike[str], *suffixes: str) -> None:
    """Raise ConfigError if a file to be written has none of the suffixes; `name` is the option."""
    if Path(path).suffix not in suffixes:
        raise ConfigError(f"{name}={path} must end in {' or '.join(suffixes)}")


def refuse_tilde(name: str, path: str | None) -> None:
    """Raise ConfigError if a path to be written begins with ~. A shell replaces it only where a
    word begins, so not in `--out=~/results`, and a folder named ~ would be made. `name` is the
    option."""
    if path is not None and path.startswith("~"):
        full = os.path.expanduser(path)
        raise ConfigError(f"{name}={path}: ~ is not replaced here; write the whole path, {full}")


def path_of(name: str, path: object) -> Path:
    """Return a path that a user has passed as the argument `name`; raise ConfigError for what is no
    path, or a blank one, which would mean the current folder."""
    if isinstance(path, bytes) or not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{name}={path!r:.60} must be a path, a string or pathlib.Path")
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{name}={text!r:.60} is blank; pass the path of a file or folder")
    return Path(text)


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
    """Give a file the mode of any new one: some libraries use mkstemp, so that only the owner
    can read."""
    path.chmod(_stat_of_new(path).st_mode & 0o777)


def read_bounded(path: Path, most: int = 2**26) -> bytes:
    """Return the content of a file that is read at once. Raises OSError."""
    check_bounded(path, most)
    with path.open("rb") as file:
        return file.read(most)


def check_bounded(path: Path, most: int) -> None:
    """Raise OSError for a pipe or device, which may never end, and for what would fill the
    memory."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if status.st_size > most:
        reason = f"it has {status.st_size:,} bytes, above the {most:,} that are read"
        raise OSError(errno.EFBIG, reason, str(path))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stays_inside(name: object) -> bool:
    """Return whether a name in a manifest is inside its folder. (Links are allowed: the hub's cache
    consists of them, and whoever creates one can read its target.)"""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


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


# --- manifests ------------------------------------------------------------------------------------


MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Listed:
    """What a manifest says of a file."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class _Manifest:
    files: dict[str, Listed]


@contextmanager
def writing_folder(final: Path) -> Iterator[Path]:
    """Yield a folder to write into, then add a manifest and rename it to `final`."""
    with writing(final) as partial:
        partial.mkdir()
        yield partial
        write_manifest(partial)


def write_manifest(
    folder: Path,
    names: Collection[str] | None = None,
    known: Mapping[str, Listed] = MappingProxyType({}),
) -> None:
    """List all files below the folder, or those named, with size and hash. It is written after
    them, so a folder with a manifest is complete. `known`: files that another process has
    hashed."""
    paths = folder.rglob("*") if names is None else (folder / name for name in names)
    listed = {}
    for path in sorted(paths):
        if path.is_file() and path.name != MANIFEST:
            name = path.relative_to(folder).as_posix()
            listed[name] = known.get(name) or list_file(path)
    write_json(folder / MANIFEST, asdict(_Manifest(listed)))


def list_file(path: Path) -> Listed:
    """Return what a manifest says of a file."""
    return Listed(sha256_of(path), path.stat().st_size)


def verify_manifest(
    folder: str | Path, only: Collection[str] | None = None, skip: str = ""
) -> str | None:
    """Describe what is damaged in a folder; return None if it is intact.

    Raise UnreadableNowError if that cannot be found out now.

    `only`: the files to verify; `skip`: the beginning of the names of files that are not verified.
    Analysis needs no optimizer state, which is most of the bytes."""
    folder = Path(folder)
    try:
        files = parse_json(read_bounded(folder / MANIFEST), _Manifest).files
    except (OSError, ValueError) as error:
        refuse_unreadable(folder / MANIFEST, error)
        return f"{MANIFEST} is not a readable list of files"
    if only is not None:
        names = sorted(only)
    else:
        names = sorted(name for name in files if not skip or not name.startswith(skip))
    for name in names:
        if name not in files:
            return f"{MANIFEST} does not list {name}"
        if not stays_inside(name):
            return f"{MANIFEST} names '{name}', which is outside of the folder"
    return verify_files(folder, {name: files[name] for name in names})


def verify_files(
    folder: Path, files: Mapping[str, Listed], hashes: Callable[[str], bool] = lambda name: True
) -> str | None:
    """Describe a wrong size of a file, or wrong content of one that `hashes` chooses."""

    def problem_of(name: str) -> str | None:
        path = folder / name
        listed = files[name]
        try:
            if not path.is_file():
                return f"{name} is missing"
            size = path.stat().st_size
            if size != listed.bytes:
                return (
                    f"{name} has {size:,} bytes, {MANIFEST} says {listed.bytes:,}: "
                    "truncated or overwritten"
                )
            if hashes(name) and sha256_of(path) != listed.sha256:
                return f"{name} does not have the SHA-256 that {MANIFEST} gives"
        except OSError as error:
            refuse_unreadable(path, error)
            return f"{name} cannot be read: {error.strerror}"
        return None

    # A core hashes 0.5 to 2 GB/s, and hashing releases Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = pool.map(problem_of, files)
        return next(filter(None, problems), None)


_DAMAGED = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,  # this and the next are of `read_bounded`
    errno.EFBIG,
}
"""Errors that say what is there. All others (permission, stale handle, failing disk, …) may be gone
when the file is read again."""


def refuse_unreadable(path: Path, error: Exception) -> None:
    """Raise UnreadableNowError unless the error shows that the file is missing or another one."""
    if isinstance(error, OSError) and error.errno not in _DAMAGED:
        raise UnreadableNowError(path, error.strerror or error) from None


def read_parquet(path: Path, remedy: str) -> pa.Table:
    """Return a Parquet table; raise DataError with the remedy if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read ({one_line(error)}); {remedy}") from None
