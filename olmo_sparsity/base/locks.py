"""Let one process at a time write into a folder, on disks that several machines share.

`locked` is the entry. The owner of a folder is named by a file `lock` in it (lock_owner.py), which
it touches every 20 seconds. A process that finds the file does one of four things:

    its owner has certainly died on this machine   remove it, at once
    it is touched while this process looks on      give up, or wait with `waits`
    it stays unchanged for two minutes             remove it: its owner was killed elsewhere
    otherwise                                      look again

This is our own because no library does it: some look only for dead processes of the same machine,
so that a job that SLURM has moved to another node would wait for ever, and on some network disks
`flock` holds within one machine only (docs/development.md compares them).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.files import age_s, read_bounded, unwritable
from olmo_sparsity.base.json_text import parse_json
from olmo_sparsity.base.lock_owner import Owner
from olmo_sparsity.base.progress import say

LOCK = "lock"
"""Name of the file that names the owner of a folder."""

CLAIM = "lock.next"
"""Name of the file of the one process that may remove a dead lock."""

REFRESH_S = 20.0
"""How often an owner touches its lock."""

STALE_S = 120.0
"""A lock that was watched for so long and not touched has lost its owner. Network disks may show
changes a minute late. Clocks of two machines are never compared: one of them may be hours off."""

POLL_S = 0.1
"""How often a waiting process looks at the lock."""

ANNOUNCE_AFTER_S = 2.0
"""A process that waits for a lock says so after this time."""

LARGEST_LOCK = 2**16
"""Bytes. A lock has a few hundred; more are not read, whatever somebody has put there."""


@contextmanager
def locked(folder: Path, waits: bool = False) -> Iterator[None]:
    """Hold the folder's lock. If another process holds it, wait for it with `waits`; otherwise
    raise UserError when the other process touches the lock, after REFRESH_S seconds at most."""
    path = folder / LOCK
    this_process = Owner.here()
    _acquire(path, this_process, waits)

    _held[path] = this_process
    ended = threading.Event()
    refresher = threading.Thread(target=_refresh, args=(path, this_process, ended), daemon=True)
    refresher.start()
    try:
        yield
    finally:
        ended.set()
        refresher.join()
        _held.pop(path, None)
        # Another process may have taken the lock over, if this one was stopped for minutes.
        if _read_owner(path) == this_process:
            path.unlink(missing_ok=True)


_held: dict[Path, Owner] = {}
"""This process as the owner of each lock that it holds, by the path of the lock."""


def _acquire(path: Path, this_process: Owner, waits: bool) -> None:
    """Create the lock as soon as it has no living owner."""
    lock = _Watch(path)
    claim = _Watch(path.with_name(CLAIM))
    announce_at = time.monotonic() + ANNOUNCE_AFTER_S
    while not _create(path, json.dumps(vars(this_process), indent=1)):
        owner_is_alive = lock.look()  # only a living owner changes its lock
        if owner_is_alive and not waits:
            raise UserError(_describe_use(path))

        owner = _read_owner(path)
        has_died_here = owner is not None and owner.has_died_here
        if has_died_here or lock.unchanged_s > STALE_S:
            _remove_dead(lock, claim)

        if time.monotonic() > announce_at:
            say(f"waiting: {_describe_use(path)}")
            announce_at = math.inf  # once
        time.sleep(POLL_S)


def _create(path: Path, text: str) -> bool:
    """Create a file, and return whether it did not exist. Only one of several processes does."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        if not path.is_file() and path.exists():
            raise UserError(f"{path} is not a regular file; delete it") from None
        return False
    except OSError as error:
        raise unwritable(path, error.errno) from None
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError as error:
        # Without an owner it would be a lock that the next start waits for.
        path.unlink(missing_ok=True)
        raise unwritable(path, error.errno) from None
    return True


def _refresh(path: Path, this_process: Owner, ended: threading.Event) -> None:
    """Touch the lock until `ended`. A process that was stopped for minutes may find that another
    one has taken it over: then it ends, as two would write into one folder."""
    while not ended.wait(REFRESH_S):
        owner = _read_owner(path)
        if owner is not None and owner != this_process:
            say(f"{path} was taken over by process {owner.pid} on {owner.host}: this one ends")
            os.kill(os.getpid(), signal.SIGINT)
            return
        # A disk that is away for a moment is no reason to end a run of days.
        with contextlib.suppress(OSError):
            os.utime(path)


# --- take the lock of a dead owner ----------------------------------------------------------------


def _remove_dead(lock: _Watch, claim: _Watch) -> None:
    """Remove the lock as it was at the last look.

    Several processes may find it dead at once, and one may already have created the next lock when
    another comes to remove. So only the process that creates the file `lock.next`, the claim, looks
    again and removes."""
    if not _create(claim.path, uuid.uuid4().hex):
        claim.look()
        if claim.unchanged_s > STALE_S:  # its process was killed before it could delete it
            claim.path.unlink(missing_ok=True)
        return
    if lock.is_as_at_last_look:
        lock.path.unlink(missing_ok=True)
    claim.path.unlink(missing_ok=True)


class _FileState(NamedTuple):
    """A file at one moment, by which a change is noticed."""

    modified_ns: int
    content: bytes


class _Watch:
    """Watches a file: how long it has not changed while this process was looking, by its clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_state: _FileState | None = None
        """The file at the last look; None if it was not there, or no look was taken."""

        self.unchanged_since = 0.0
        """When the file was first seen in this state, by time.monotonic."""

    def look(self) -> bool:
        """Return whether the file changed since the last look; the first look is no change."""
        previous_state = self.last_state
        self.last_state = _read_state(self.path)
        is_same = self.last_state == previous_state
        if not is_same:
            self.unchanged_since = time.monotonic()
        # A file that appears or goes is not one that its owner has touched.
        was_there = previous_state is not None and self.last_state is not None
        return was_there and not is_same

    @property
    def unchanged_s(self) -> float:
        """Return for how long the file has not changed; 0 if it is not there."""
        return 0.0 if self.last_state is None else time.monotonic() - self.unchanged_since

    @property
    def is_as_at_last_look(self) -> bool:
        """Return whether the file is there, as it was at the last look."""
        return self.last_state is not None and _read_state(self.path) == self.last_state


def _read_state(path: Path) -> _FileState | None:
    """Return the state of a file; None if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return _FileState(path.stat().st_mtime_ns, file.read(LARGEST_LOCK))
    return None


# --- see who holds a lock -------------------------------------------------------------------------


def check_not_taken_over(folder: Path) -> None:
    """Raise UserError if this process has locked the folder, and another one has taken it over
    since, as after this one was stopped for minutes. Then it must not write there."""
    path = folder / LOCK
    this_process = _held.get(path)
    owner = _read_owner(path)
    if this_process is not None and owner is not None and owner != this_process:
        raise UserError(
            f"{folder} was taken over by process {owner.pid} on {owner.host} while this one was "
            "stopped: nothing more is written there"
        )


@dataclass(frozen=True)
class Holder:
    """What can be seen of the process that holds a folder's lock."""

    owner: Owner
    seems_alive: bool
    """False if it has certainly died on this machine, or its lock was not touched for STALE_S
    seconds. For display alone: the second is by the clock of the disk, and `locked` does not rely
    on it."""


def find_holder(folder: Path) -> Holder | None:
    """Return the process that holds the folder's lock; None if there is no lock, or none that
    names its owner."""
    path = folder / LOCK
    owner = _read_owner(path)
    if owner is None:
        return None
    is_fresh = abs(age_s(path)) <= STALE_S
    return Holder(owner, seems_alive=is_fresh and not owner.has_died_here)


def _describe_use(path: Path) -> str:
    """Return the message that a folder is locked, and by whom."""
    owner = _read_owner(path)
    writer = "another"
    if owner is not None:
        writer = f"process {owner.pid} on {owner.host}, since {owner.since}"
    return f"{path.parent} is being written by {writer}; wait until it ends, or stop it"


def _read_owner(path: Path) -> Owner | None:
    """Return the owner that a lock names; None if it names none, or is being written."""
    try:
        return parse_json(read_bounded(path, LARGEST_LOCK), Owner)
    except (OSError, ValueError):
        return None
