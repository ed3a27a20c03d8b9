"""Folders that one command fills over several starts: which work they hold, and who writes now.

A file `lock` names the owner, who touches it regularly. The next start takes over the lock of a
process that has died on this machine at once, and any other one when it has watched it unchanged
for minutes. Another file, the identity, names the work.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_sparsity.base.conform import parse_json, with_crc
from olmo_sparsity.base.errors import ConfigError, DataError, UserError, refuse_half_characters
from olmo_sparsity.base.files import (
    age_s,
    is_partial,
    path_of,
    read_bounded,
    read_json,
    refuse_tilde,
    remove_partial,
    sha256_of,
    write_atomically,
    write_json,
)
from olmo_sparsity.base.progress import say

LOCK = "lock"

REFRESH_S = 20.0
"""How often an owner touches its lock."""

STALE_S = 120.0
"""A lock that was watched for so long and not touched has lost its owner. Network disks may show
changes a minute late. Clocks of two machines are never compared: one of them may be hours off."""

_SAID_AFTER_S = 2.0
"""A process that waits for a lock says so after this time."""


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock, as the lock's file names it."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    slurm_job: str | None = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID"))
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Random, so that no two owners are equal."""

    process: str | None = None
    """Tells this process from all others since the machine was started; None if unknown."""

    @staticmethod
    def here() -> Owner:
        return Owner(process=_identify_process(os.getpid()))

    @property
    def has_died_here(self) -> bool:
        """Return whether it was a process of this machine, and is certainly gone. Of a process in
        another container on this machine, which has numbers of its own, nothing is certain."""
        if self.process is None or self.host != socket.gethostname():
            return False
        machine = _identify_machine()
        is_of_this_machine = machine is not None and self.process.startswith(machine)
        return is_of_this_machine and self.process != _identify_process(self.pid)


def _identify_machine() -> str | None:
    """Return what differs after each start of the machine, and between its containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # It ends in a space: _identify_process appends a number, and has_died_here compares this
        # beginning.
        return f"{boot} {os.readlink('/proc/self/ns/pid')} "
    except OSError:  # not Linux
        return None


def _identify_process(pid: int) -> str | None:
    """Return the machine, and when the process of this number began, as numbers are used again;
    None if it does not run."""
    machine = _identify_machine()
    try:
        # The name of the program, in parentheses, may hold spaces and parentheses.
        _, _, after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields_after_name = after_name.split()
    state = fields_after_name[0]
    began = fields_after_name[19]  # in clock ticks since the machine was started
    if machine is None or state in ("Z", "X"):  # ended, and its parent has not asked for its code
        return None
    return f"{machine}{began}"


@contextmanager
def locked(folder: Path, waits: bool = False) -> Iterator[None]:
    """Hold the folder's lock. If another process holds it, wait for it with `waits`; otherwise
    raise UserError when the other process touches the lock, after REFRESH_S seconds at most."""
    path = folder / LOCK
    own = Owner.here()
    _take(path, own, waits)
    ended = threading.Event()
    refresher = threading.Thread(target=_refresh, args=(path, own, ended), daemon=True)
    refresher.start()
    try:
        yield
    finally:
        ended.set()
        refresher.join()
        if _read(path) == own:
            path.unlink(missing_ok=True)


def holder(folder: Path) -> tuple[Owner | None, bool]:
    """Return the owner of the folder's lock, and whether it seems to be alive. Of a process on
    another machine this is a guess by the clock, for display; `locked` does not rely on it."""
    owner = _read(folder / LOCK)
    if owner is None or owner.has_died_here:
        return owner, False
    return owner, abs(age_s(folder / LOCK)) <= STALE_S


class _Watch:
    """Watches a file: how long it has not changed while this process was looking, by its clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: tuple[int, bytes] | None = None
        self.since = 0.0

    def look(self) -> bool:
        """Return whether the file changed since the last look; the first look is no change."""
        previous = self.seen
        self.seen = _content_of(self.path)
        if self.seen != previous:
            self.since = time.monotonic()
        return previous is not None and self.seen is not None and self.seen != previous

    @property
    def unchanged_s(self) -> float:
        return 0.0 if self.seen is None else time.monotonic() - self.since


def _content_of(path: Path) -> tuple[int, bytes] | None:
    """Return time of modification and content of a file; None if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return path.stat().st_mtime_ns, file.read(2**16)
    return None


def _take(path: Path, own: Owner, waits: bool) -> None:
    """Create the lock as soon as it has no living owner."""
    lock = _Watch(path)
    claim = _Watch(path.with_name(f"{LOCK}.next"))
    said_at = time.monotonic() + _SAID_AFTER_S
    while not _create(path, json.dumps(vars(own), indent=1)):
        owner_is_alive = lock.look()  # only a living owner changes its lock
        if owner_is_alive and not waits:
            raise UserError(_in_use(path))
        owner = _read(path)
        has_died = owner is not None and owner.has_died_here
        if has_died or lock.unchanged_s > STALE_S:
            _remove_dead(lock, claim)
        if time.monotonic() > said_at:
            say(f"waiting: {_in_use(path)}")
            said_at = math.inf
        time.sleep(0.1)


def _create(path: Path, text: str) -> bool:
    """Create a file, and return whether it did not exist. Only one of several processes does."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except FileExistsError:
        if not path.is_file() and path.exists():
            raise UserError(f"{path} is not a regular file; delete it") from None
        return False
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return True


def _remove_dead(lock: _Watch, claim: _Watch) -> None:
    """Remove the lock as it was seen. Of all that find it dead, only the one that creates
    `lock.next`, the claim, looks again and removes, so that nobody takes away the lock of a
    successor."""
    if not _create(claim.path, uuid.uuid4().hex):
        claim.look()
        if claim.unchanged_s > STALE_S:  # its process was killed before it could delete it
            claim.path.unlink(missing_ok=True)
        return
    if lock.seen is not None and _content_of(lock.path) == lock.seen:
        lock.path.unlink(missing_ok=True)
    claim.path.unlink(missing_ok=True)


def _refresh(path: Path, own: Owner, ended: threading.Event) -> None:
    """Touch the lock. A process that was stopped for minutes may find it taken over, and ends."""
    while not ended.wait(REFRESH_S):
        owner = _read(path)
        if owner is not None and owner != own:
            say(f"{path} was taken over by process {owner.pid} on {owner.host}: this one ends")
            os.kill(os.getpid(), signal.SIGINT)
            return
        with contextlib.suppress(OSError):
            os.utime(path)


def _in_use(path: Path) -> str:
    """Return the message that a folder is locked, and by whom."""
    owner = _read(path)
    who = "another"
    if owner is not None:
        who = f"process {owner.pid} on {owner.host}, since {owner.since}"
    return f"{path.parent} is being written by {who}; wait until it ends, or stop it"


def _read(path: Path) -> Owner | None:
    """Return the owner that a lock names; None if it names none, or is being written."""
    try:
        return parse_json(read_bounded(path, 2**16), Owner)
    except (OSError, ValueError):
        return None


# --- the work that a folder holds -----------------------------------------------------------------


@dataclass(frozen=True)
class WorkFolder:
    """A folder that holds one work, which a file in it, the identity, names by its settings."""

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
            names = f"other files ({', '.join(others[:3])}) and no {self.identity_name}"
            raise ConfigError(f"{self.setting}={self.path} holds {names}; name a new folder")

    def create(self, *inner: str) -> None:
        """Create the folder and those inside it, without what killed processes left."""
        path_of(self.setting, self.path)
        refuse_tilde(self.setting, str(self.path))
        refuse_half_characters(str(self.path), self.setting)  # Parquet's library needs UTF-8
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
        """Store the settings in the identity file at the first start, and raise ConfigError at a
        later one if they differ. Return the SHA-256 of that file, which results store, so that a
        result copied from another folder is noticed.

        complete: Brings stored settings of earlier versions to today's keys.
        versions: Versions of packages, which are stored, too. A line names those that differ.
        """
        if not self.identity.exists():
            stated = dict(settings)
            if versions:
                stated["versions"] = dict(versions)
            write_json(self.identity, with_crc(stated))
        # Read in any case: another process may have written it just now.
        stored = read_json(self.identity, dict, "restore it, or name a new folder")
        stored_versions = stored.pop("versions", None)
        if versions and stored_versions:
            others = differences(stored_versions, dict(versions))
            if others:
                say(
                    f"{self.path} was begun with {', '.join(others)}: numbers of two versions may "
                    "differ by rounding"
                )
        changed = differences(complete(stored), dict(settings))
        refuse_changes(f"{self.setting}={self.path}", changed)
        return sha256_of(self.identity)


def _may_precede(path: Path) -> bool:
    """Return whether a file or folder may be there before the identity: a log, or what a start
    leaves that is killed at once."""
    if path.is_dir():
        return is_partial(path) or all(inner.is_dir() for inner in path.rglob("*"))
    is_lock = path.name in (LOCK, f"{LOCK}.next")
    return is_lock or is_partial(path) or path.suffix in (".log", ".out", ".err")


def refuse_changes(folder: str, changed: Sequence[str]) -> None:
    """Raise ConfigError if settings differ from those of the work in a folder."""
    if changed:
        raise ConfigError(f"{folder} holds work with {', '.join(changed)}; name a new folder")


@dataclass(frozen=True)
class Pieces:
    """Results of a long task, a JSON file each, so that the next start computes only those that are
    missing, damaged, or made from something else than now (`source_id`)."""

    folder: Path

    def read(self, name: int | str, source_id: str) -> dict[str, Any] | None:
        """Return the content of a piece; None if it must be computed."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = read_json(path, dict, "it is computed again")
        except DataError as error:
            say(str(error))
            return None
        stored_id = content.pop("of", None)
        return content if stored_id == source_id else None

    def write(self, name: int | str, source_id: str, content: Mapping[str, Any]) -> None:
        """Store a piece. `source_id`: what it is made from."""
        text = json.dumps(with_crc({"of": source_id, **content}), allow_nan=False)
        write_atomically(self._path(name), text)

    def _path(self, name: int | str) -> Path:
        return self.folder / f"{name:0>7}.json"


# --- settings that differ -------------------------------------------------------------------------


def leaves(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all dotted keys with their values; an empty section is a value, and so is a plain
    list."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        elif _is_list_of_sections(value):
            for number, section in enumerate(value):
                yield from leaves(section, f"{prefix}{key}[{number}].")
        else:
            yield f"{prefix}{key}", value


def _is_list_of_sections(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, Mapping) for item in value)


def differences(then: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[str]:
    """Return each key with a changed value, for a message."""
    old = dict(leaves(then))
    new = dict(leaves(now))
    return [
        f"{key}={old.get(key)} (now {new.get(key)})"
        for key in sorted({*old, *new})
        if not _same(old.get(key), new.get(key))
    ]


def _same(then: Any, now: Any) -> bool:
    """Return whether two values are equal. One path has several spellings: `runs/a`, `./runs/a`,
    and with the folder before it."""
    if isinstance(then, str) and isinstance(now, str) and "/" in then + now:
        return os.path.abspath(then) == os.path.abspath(now)
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return all(map(_same, then, now))
    return bool(then == now)


# --- the cache of downloaded and converted models ---------------------------------------------


def cache_folder() -> Path:
    """Return `OLMO_SPARSITY_CACHE`, or `olmo-sparsity` in `XDG_CACHE_HOME` or ~/.cache."""
    own = os.environ.get("OLMO_SPARSITY_CACHE")
    if own:
        return Path(own)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "olmo-sparsity"


def make_folder(folder: Path) -> None:
    """Create a folder of the cache; the error says how to choose another one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remedy = "set OLMO_SPARSITY_CACHE to a folder for models"
        raise UserError(f"{folder} cannot be written ({error.strerror}); {remedy}") from None
