"""One launch at a time writes into a folder. No torch here.

Place in the flow: the ground under whatever fills a folder that a second start could fill as well.

A file `lock` names the owner. Making it fails where it exists, on network disks too, where flock(2)
often does nothing. But a killed owner leaves it behind, so the next start looks for the owner, and
takes the folder over where it is gone:

    on the same machine     no such process, or another one that was given its number
    on another machine      the same job of SLURM, which runs in one place only: it was requeued;
                            else the file, which a living owner refreshes, has become old
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from olmo_sparsity.errors import UserError
from olmo_sparsity.files import STALE_S, age_s, partial_name
from olmo_sparsity.launch import launch_id, machine_id, process_start, read_launch

LOCK = "lock"
REFRESH_S = 30.0
_WRITTEN_WITHIN_S = 5.0
"""An unreadable lock is one that is being written; after so long, one whose writer was killed."""

_FIRST_COMES_WITHIN_S = 120.0


@dataclass(frozen=True)
class Owner:
    host: str
    machine: str
    """Its boot and its namespace of processes, within which a number means one process."""

    pid: int
    started: str | None
    """When the process began, in the kernel's own count. None where there is no /proc."""

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
    """Refused while another launch has the folder, or, with `waits`, put off until it has ended.
    The first process of a launch holds it for all of them, so it must be the last to leave; the
    others may ask too, and wait for the first."""
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


def holder(folder: Path) -> tuple[Owner | None, bool]:
    """Who has the folder, or had it when it died; and whether that launch is alive."""
    path = folder / LOCK
    owner = _read(path)
    return owner, owner is not None and not _is_gone(owner, path, Owner.here())


def _take(path: Path, own: Owner, waits: bool) -> None:
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            owner = _read(path)
            alive = owner is not None and not _is_gone(owner, path, own)
            if owner is not None and alive and not waits:
                raise _in_use(path, owner) from None
            if alive or (owner is None and age_s(path) < _WRITTEN_WITHIN_S):
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


def _is_gone(owner: Owner, path: Path, own: Owner) -> bool:
    here = (owner.host, owner.machine) == (own.host, own.machine)
    if here and own.started is not None:
        return process_start(owner.pid) != owner.started
    if owner.slurm_job is not None and owner.slurm_job == own.slurm_job:
        return True
    return age_s(path) > STALE_S


def _remove(path: Path, owner: Owner | None) -> None:
    """Of several that find the same dead owner, one gets its file; whoever gets another's instead,
    made since, puts it back."""
    grave = partial_name(path)
    with contextlib.suppress(FileNotFoundError):
        path.rename(grave)
        if _read(grave) == owner:
            grave.unlink()
        else:
            grave.rename(path)


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
        f"{path} was not made by the first process of this launch within "
        f"{_FIRST_COMES_WITHIN_S:.0f} s; its own message says why"
    )


def _in_use(path: Path, owner: Owner) -> UserError:
    job = f", SLURM job {owner.slurm_job}" if owner.slurm_job else ""
    return UserError(
        f"{path.parent} is being written by process {owner.pid} on {owner.host}{job}, since "
        f"{owner.since}; wait until it ends, or stop it (if it is gone for certain, delete {path})"
    )


def _refresh(path: Path, ended: threading.Event) -> None:
    while not ended.wait(REFRESH_S):
        with contextlib.suppress(OSError):
            os.utime(path)


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
