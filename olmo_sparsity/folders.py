"""Folders that one command fills over several starts: which work they hold, and who writes now.

A file `lock` names the owner. Creating it fails if it exists, also on network disks, where flock(2)
often does nothing. A killed owner leaves it behind, so the next launch takes the folder over if the
owner is gone:

    on the same machine     no such process exists, or its PID now belongs to another one
    on another machine      it was the same SLURM job, which was requeued;
                            or the file, which a running owner refreshes, is old

Another file, the identity, names the work. A folder with files and without an identity is
rejected, and so is a start with other settings. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.conform import parse_json, with_crc
from olmo_sparsity.errors import ConfigError, UserError
from olmo_sparsity.io import (
    STALE_S,
    age_s,
    is_partial,
    partial_name,
    read_bounded,
    read_json,
    remove_partial,
    sha256_of,
    write_atomically,
)
from olmo_sparsity.runtime import launch_id, machine_id, process_start, read_launch, say

LOCK = "lock"
REFRESH_S = 30.0
_WRITTEN_WITHIN_S = 5.0
"""An unreadable lock is being written; after so long, its writer was killed."""

_FIRST_COMES_WITHIN_S = 120.0
_SAID_AFTER_S = 2.0


@dataclass(frozen=True)
class Owner:
    host: str
    machine: str
    """See `machine_id`."""

    pid: int
    started: str | None
    """See `process_start`."""

    launch: str
    slurm_job: str | None
    since: str

    @staticmethod
    def here() -> Owner:
        return Owner(
            host=socket.gethostname(),
            machine=machine_id(),
            pid=os.getpid(),
            started=process_start(os.getpid()),
            launch=launch_id(),
            slurm_job=os.environ.get("SLURM_JOB_ID"),
            since=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )


@contextlib.contextmanager
def locked(folder: Path, waits: bool = False) -> Iterator[None]:
    """Raise while another launch has the folder, or wait for it with `waits`. Rank 0 holds the lock
    for its launch, so it must be the last to leave; other ranks wait until it has the lock."""
    path, own = folder / LOCK, Owner.here()
    if read_launch().rank > 0:
        _wait_for_first(path, own)
        yield
        return
    _take(path, own, waits)
    ended = threading.Event()
    refresher = threading.Thread(target=_refresh, args=(path, ended), daemon=True)
    refresher.start()
    try:
        yield
    finally:
        ended.set()
        refresher.join()
        if _read(path) == own:
            path.unlink(missing_ok=True)


def remove_left_lock(folder: Path) -> None:
    """Remove the lock of a finished folder if its last owner was killed. It may be read-only."""
    owner, alive = holder(folder)
    if owner is not None and not alive:
        with contextlib.suppress(OSError):
            _remove(folder / LOCK, owner)


def holder(folder: Path) -> tuple[Owner | None, bool]:
    """The owner of the folder's lock, and whether it is alive."""
    path = folder / LOCK
    owner = _read(path)
    return owner, owner is not None and not _is_gone(owner, path, Owner.here())


def _take(path: Path, own: Owner, waits: bool) -> None:
    said_at = time.monotonic() + _SAID_AFTER_S
    seen, since = None, time.monotonic()
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            owner = _read(path)
            if (now := _time_of(path)) != seen:
                seen, since = now, time.monotonic()
            unchanged_s = time.monotonic() - since
            alive = owner is not None and not _is_gone(owner, path, own, unchanged_s)
            if owner is not None and alive and not waits:
                raise _in_use(path, owner) from None
            if owner is None and path.exists() and not path.is_file():
                raise UserError(f"{path} is not a regular file; delete it") from None
            if alive or (owner is None and age_s(path) < _WRITTEN_WITHIN_S):
                if owner is not None and time.monotonic() > said_at:
                    say(f"waiting: {_in_use(path, owner)}")
                    said_at = math.inf
                time.sleep(0.1)
                continue
            _remove(path, owner)
            continue
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(json.dumps(asdict(own), indent=1))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise UserError(f"{path} cannot be written: {error.strerror}") from None
        return


def _time_of(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _is_gone(owner: Owner, path: Path, own: Owner, unchanged_s: float = 0) -> bool:
    """`unchanged_s`: for how long the file has kept its time. A time in the future, by a wrong
    clock, makes no age."""
    here = (owner.host, owner.machine) == (own.host, own.machine)
    if here and own.started is not None:
        return process_start(owner.pid) != owner.started
    if owner.slurm_job is not None and owner.slurm_job == own.slurm_job:
        return True
    return max(age_s(path), unchanged_s) > STALE_S


def _remove(path: Path, owner: Owner | None) -> None:
    """Remove the lock of a dead owner. Of the processes of a machine one at a time looks and
    removes, so that none takes away the lock of one that has followed. On a network disk a process
    of another machine may still come between; a lock that it has written is put back."""
    moved = partial_name(path)
    with _alone_in(path.parent), contextlib.suppress(FileNotFoundError):
        if _read(path) != owner or (owner is None and age_s(path) < _WRITTEN_WITHIN_S):
            return
        path.rename(moved)
        if _read(moved) == owner:
            moved.unlink()
        else:
            moved.rename(path)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a disk without flock
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _wait_for_first(path: Path, own: Owner) -> None:
    deadline = time.monotonic() + _FIRST_COMES_WITHIN_S
    while True:
        owner = _read(path)
        if owner is not None and owner.launch == own.launch:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if owner is not None:
        raise _in_use(path, owner)
    raise UserError(
        f"{path} was not created by rank 0 of this launch within {_FIRST_COMES_WITHIN_S:.0f} s; "
        "see the message of rank 0"
    )


def _in_use(path: Path, owner: Owner) -> UserError:
    job = f", SLURM job {owner.slurm_job}" if owner.slurm_job else ""
    return UserError(
        f"{path.parent} is being written by process {owner.pid} on {owner.host}{job}, since "
        f"{owner.since}; wait until it ends, or stop it (delete {path} if it is "
        "certainly gone, or if the folder is a copy)"
    )


def _refresh(path: Path, ended: threading.Event) -> None:
    while not ended.wait(REFRESH_S):
        with contextlib.suppress(OSError):
            os.utime(path)


def _read(path: Path) -> Owner | None:
    try:
        return parse_json(read_bounded(path, 2**16), Owner)
    except (OSError, ValueError):
        return None


# --- the work that a folder holds -----------------------------------------------------------------


@dataclass(frozen=True)
class WorkFolder:
    path: Path
    setting: str
    """Name of the option: run_folder, out, …"""

    identity_name: str = "settings.json"

    @property
    def identity(self) -> Path:
        return self.path / self.identity_name

    def refuse_others(self) -> None:
        """Reject a folder with files of other work, which this one would spoil."""
        if self.path.is_file():
            raise ConfigError(f"{self.setting}={self.path} is a file; pass a folder")
        others = [path.name for path in sorted(self.path.glob("[!.]*")) if not _may_precede(path)]
        # Looked for last, as another process may begin just now.
        if others and not self.identity.exists():
            raise ConfigError(
                f"{self.setting}={self.path} holds other files ({', '.join(others[:3])}) and no "
                f"{self.identity_name}; name a new folder"
            )

    def create(self, *inner: str) -> None:
        """Create the folder and those inside it, without what killed processes left."""
        self.refuse_others()
        for folder in (self.path, *(self.path / name for name in inner)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                where = f"{self.setting}={self.path} cannot be written"
                raise UserError(f"{where}: {error.strerror}") from None
            remove_partial(folder)

    @contextmanager
    def opened(self, *inner: str) -> Iterator[None]:
        """Create it, and hold it alone."""
        self.create(*inner)
        with locked(self.path):
            yield

    def identify(
        self,
        settings: Mapping[str, Any],
        complete: Callable[[dict[str, Any]], dict[str, Any]] = lambda stored: stored,
        versions: Mapping[str, str | None] | None = None,
    ) -> str:
        """Write the identity, or reject other settings than it states, which `complete` completes.
        Returns its SHA-256: files that state it are of this work, and not copied from another.
        `versions` of packages are stated, too; where they differ, a line says so."""
        if not self.identity.exists():
            stated = dict(settings) | ({"versions": dict(versions)} if versions else {})
            text = json.dumps(with_crc(stated), ensure_ascii=False, indent=2)
            write_atomically(self.identity, text + "\n")
        # Read in any case: another process may have written it just now.
        stored = read_json(self.identity, dict, "restore it, or name a new folder")
        before = stored.pop("versions", None)
        if versions and before and (others := differences(before, dict(versions))):
            said = f"{self.path} was begun with {', '.join(others)}"
            say(f"{said}: numbers of two versions may differ by rounding")
        changed = differences(complete(stored), dict(settings))
        refuse_changes(f"{self.setting}={self.path}", changed)
        return sha256_of(self.identity)


def _may_precede(path: Path) -> bool:
    """Whether it may be in a folder before its identity: a log, or what a start leaves that is
    killed at once."""
    if path.is_dir():
        return is_partial(path) or all(inner.is_dir() for inner in path.rglob("*"))
    return is_partial(path) or path.name == LOCK or path.suffix in (".log", ".out", ".err")


def refuse_changes(folder: str, changed: Sequence[str]) -> None:
    if changed:
        raise ConfigError(
            f"{folder} holds work with {', '.join(changed)}; name a new folder, or delete that one "
            "to start over"
        )


# --- settings that differ -------------------------------------------------------------------------


def leaves(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All dotted keys with their values; an empty section is a value, and so is a plain list."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            for number, one in enumerate(value):
                yield from leaves(one, f"{prefix}{key}[{number}].")
        else:
            yield f"{prefix}{key}", value


def differences(then: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[str]:
    """Each key with a changed value, for a message."""
    old, new = dict(leaves(then)), dict(leaves(now))
    return [
        f"{key}={old.get(key)} (now {new.get(key)})"
        for key in sorted({*old, *new})
        if not _same(old.get(key), new.get(key))
    ]


def _same(then: Any, now: Any) -> bool:
    """One path has several spellings: `runs/a`, `./runs/a`, and with the folder before it."""
    if isinstance(then, str) and isinstance(now, str) and "/" in then + now:
        return os.path.abspath(then) == os.path.abspath(now)
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return all(map(_same, then, now))
    return bool(then == now)
