"""One process at a time writes into a folder, and no dead one keeps it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.base import locks
from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.lock_owner import Owner
from olmo_sparsity.base.locks import LOCK, STALE_S, Holder, find_holder, locked
from tests.conftest import until


def test_a_lock_that_a_full_disk_does_not_take_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start would wait for its owner, of which it says nothing."""

    def fail(descriptor: int, *_: object) -> None:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", fail)
    with (
        pytest.raises(UserError, match="lock cannot be written: No space") as error,
        locked(tmp_path),
    ):
        pytest.fail("it is not locked")
    assert error.value.errno == errno.ENOSPC, "by which a job is requeued"
    assert list(tmp_path.iterdir()) == []


COMPETE = """
import sys
from pathlib import Path
import tests
from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.locks import locked
print("ready", flush=True)
sys.stdin.readline()
try:
    with locked(Path(sys.argv[1])):
        print("has it", flush=True)
        sys.stdin.readline()
except UserError as error:
    print(error, flush=True)
"""


def start(folder: Path) -> Any:
    """Another process that will take the folder's lock when it gets a line."""
    command = [sys.executable, "-c", COMPETE, str(folder)]
    pipe = subprocess.PIPE
    child: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Any]:
    """Another process that has the folder."""
    child = start(tmp_path)
    print(file=child.stdin, flush=True)
    assert child.stdout.readline() == "has it\n"
    yield child
    child.kill()
    child.communicate()


def holder_of(folder: Path) -> Holder:
    """The process that holds the folder's lock, which there is."""
    holder = find_holder(folder)
    assert holder is not None
    return holder


def leave(folder: Path, age_s: float = STALE_S + 1, text: str | None = None) -> Path:
    """A lock as a process of before has left it."""
    path = folder / LOCK
    path.write_text(json.dumps(vars(Owner(host="n9"))) if text is None else text)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_living_owner_is_named(tmp_path: Path, other: Any) -> None:
    with pytest.raises(UserError, match=f"by process {other.pid} on "), locked(tmp_path):
        pass
    holder = holder_of(tmp_path)
    assert holder.owner.pid == other.pid
    assert holder.seems_alive


def test_a_process_that_has_died_on_this_machine_is_followed_at_once(
    tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "STALE_S", 60.0)
    other.kill()
    other.wait()
    assert not holder_of(tmp_path).seems_alive
    began = time.monotonic()
    with locked(tmp_path):
        assert time.monotonic() - began < 10
        assert holder_of(tmp_path).owner.pid == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changed",
    [{"host": "n9"}, {"process": "another start of the machine 1"}, {"process": None}],
    ids=lambda changed: str(*changed.values()),
)
def test_a_dead_process_of_which_nothing_is_certain_is_watched_first(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    """Of another machine, of another container, or of an earlier version of this package."""
    with subprocess.Popen(["true"]) as gone:
        pass
    owner = vars(Owner.here()) | {"pid": gone.pid} | changed
    leave(tmp_path, text=json.dumps(owner))
    began = time.monotonic()
    with locked(tmp_path):
        assert time.monotonic() - began > STALE_S


def test_a_number_that_another_process_has_now_is_not_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "STALE_S", 60.0)
    here = Owner.here()
    assert here.process is not None
    before = here.process.rpartition(" ")[0] + " 1"
    leave(tmp_path, age_s=0, text=json.dumps(vars(here) | {"process": before}))
    with locked(tmp_path):
        assert holder_of(tmp_path).owner.process == here.process


@pytest.mark.parametrize("ahead_s", [9999, -9999])
def test_a_clock_that_is_set_takes_no_lock_from_a_living_owner(
    tmp_path: Path, other: Any, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the owner touches it again."""
    monkeypatch.setattr(locks, "STALE_S", 60.0)
    os.kill(other.pid, signal.SIGSTOP)
    os.utime(tmp_path / LOCK, (time.time() - ahead_s,) * 2)
    threading.Timer(0.5, os.kill, (other.pid, signal.SIGCONT)).start()
    with pytest.raises(UserError, match=f"by process {other.pid}"), locked(tmp_path):
        pass


@pytest.mark.parametrize("ahead_s", [7200, -7200])
def test_an_owner_whose_clock_is_two_hours_off_keeps_its_lock(
    tmp_path: Path, ahead_s: float
) -> None:
    """On another machine, which touches the lock with its own clock."""
    leave(tmp_path, -ahead_s)
    ended = threading.Event()

    def refresh() -> None:
        while not ended.wait(0.5 * STALE_S):
            os.utime(tmp_path / LOCK, (time.time() + ahead_s,) * 2)

    owner = threading.Thread(target=refresh)
    owner.start()
    try:
        with pytest.raises(UserError, match=r"is being written by .* on n9"), locked(tmp_path):
            pass
    finally:
        ended.set()
        owner.join()


@pytest.mark.accept
@pytest.mark.parametrize(
    ("text", "age_s"),
    [
        *((None, age_s) for age_s in (9999, STALE_S / 2, -9999)),
        *((text, 9999) for text in ('{"host": ', "[" * 100_000, '{"host": 3}', "x" * 2**17)),
    ],
)
def test_a_left_lock_blocks_until_it_was_watched(
    tmp_path: Path, text: str | None, age_s: float, capsys: pytest.CaptureFixture
) -> None:
    """Also one cut short by a kill, and whatever its clock says."""
    leave(tmp_path, age_s, text)
    if text is None:
        assert holder_of(tmp_path).seems_alive == (abs(age_s) < STALE_S)
    else:
        assert find_holder(tmp_path) is None, "it names no owner"
    began = time.monotonic()
    with locked(tmp_path):
        took = time.monotonic() - began
    assert took >= STALE_S
    assert took > locks.ANNOUNCE_AFTER_S or not capsys.readouterr().err


def test_the_owner_keeps_it_fresh_and_ends_when_it_has_lost_it(tmp_path: Path) -> None:
    def lose_it() -> None:
        with locked(tmp_path):
            os.utime(tmp_path / LOCK, (0, 0))
            until(lambda: (tmp_path / LOCK).stat().st_mtime > 0)
            leave(tmp_path, age_s=0)
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        lose_it()
    assert holder_of(tmp_path).owner.host == "n9", "the successor's"


def test_only_one_removes_a_dead_lock_and_never_a_successors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = locks._Watch(leave(tmp_path))
    lock.look()
    claim = locks._Watch(tmp_path / "lock.next")
    claim.path.touch()
    os.utime(claim.path, (0, 0))
    locks._remove_dead(lock, claim)
    assert lock.path.exists(), "another one is looking, whatever its clock says"
    monkeypatch.setattr(locks, "STALE_S", 0.0)
    locks._remove_dead(lock, claim)
    assert not claim.path.exists(), "it was killed"
    os.utime(lock.path)
    locks._remove_dead(lock, claim)
    assert lock.path.exists(), "it is a successor's"
    lock.look()
    locks._remove_dead(lock, claim)
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_find_a_dead_owner_one_follows(tmp_path: Path) -> None:
    leave(tmp_path)
    many = [start(tmp_path) for _ in range(5)]
    for child in many:
        print(file=child.stdin, flush=True)
    said = sorted(child.stdout.readline() for child in many)
    assert said.count("has it\n") == 1
    assert sum("is being written" in line for line in said) == 4
    for child in many:
        child.communicate()
    assert list(tmp_path.iterdir()) == []
