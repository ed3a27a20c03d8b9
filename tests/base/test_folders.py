"""One process at a time writes into a folder, which holds one work; no dead one keeps it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.base import folders
from olmo_sparsity.base.errors import ConfigError, DataError, UserError
from olmo_sparsity.base.files import partial_name
from olmo_sparsity.base.folders import (
    LOCK,
    STALE_S,
    Owner,
    Pieces,
    WorkFolder,
    differences,
    holder,
    leaves,
    locked,
)
from tests.conftest import left_by_a_killed_process, until

COMPETE = """
import sys
from pathlib import Path
import tests
from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.folders import locked
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
    command, pipe = [sys.executable, "-c", COMPETE, str(folder)], subprocess.PIPE
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


def leave(folder: Path, age_s: float = STALE_S + 1, text: str | None = None) -> Path:
    """A lock as a process of before has left it."""
    path = folder / LOCK
    path.write_text(json.dumps(vars(Owner(host="n9"))) if text is None else text)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_living_owner_is_named(tmp_path: Path, other: Any) -> None:
    with pytest.raises(UserError, match=f"by process {other.pid} on "), locked(tmp_path):
        pass
    owner, alive = holder(tmp_path)
    assert owner is not None
    assert (owner.pid, alive) == (other.pid, True)


def test_a_process_that_has_died_on_this_machine_is_followed_at_once(
    tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "STALE_S", 60.0)
    other.kill()
    other.wait()
    assert not holder(tmp_path)[1]
    began = time.monotonic()
    with locked(tmp_path):
        assert time.monotonic() - began < 10
        assert holder(tmp_path)[0].pid == os.getpid()  # type: ignore[union-attr]
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
    monkeypatch.setattr(folders, "STALE_S", 60.0)
    here = Owner.here()
    assert here.process is not None
    before = here.process.rpartition(" ")[0] + " 1"
    leave(tmp_path, age_s=0, text=json.dumps(vars(here) | {"process": before}))
    with locked(tmp_path):
        assert holder(tmp_path)[0].process == here.process  # type: ignore[union-attr]


@pytest.mark.parametrize("ahead_s", [9999, -9999])
def test_a_clock_that_is_set_takes_no_lock_from_a_living_owner(
    tmp_path: Path, other: Any, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the owner touches it again."""
    monkeypatch.setattr(folders, "STALE_S", 60.0)
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
    owner, alive = holder(tmp_path)
    assert (owner is None) == (text is not None)
    assert alive == (text is None and abs(age_s) < STALE_S)
    began = time.monotonic()
    with locked(tmp_path):
        took = time.monotonic() - began
    assert took >= STALE_S
    assert took > folders._SAID_AFTER_S or not capsys.readouterr().err


def test_the_owner_keeps_it_fresh_and_ends_when_it_has_lost_it(tmp_path: Path) -> None:
    def lose_it() -> None:
        with locked(tmp_path):
            os.utime(tmp_path / LOCK, (0, 0))
            until(lambda: (tmp_path / LOCK).stat().st_mtime > 0)
            leave(tmp_path, age_s=0)
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        lose_it()
    assert holder(tmp_path)[0].host == "n9", "the successor's"  # type: ignore[union-attr]


def test_only_one_removes_a_dead_lock_and_never_a_successors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = folders._Watch(leave(tmp_path))
    lock.look()
    claim = folders._Watch(tmp_path / "lock.next")
    claim.path.touch()
    os.utime(claim.path, (0, 0))
    folders._remove_dead(lock, claim)
    assert lock.path.exists(), "another one is looking, whatever its clock says"
    monkeypatch.setattr(folders, "STALE_S", 0.0)
    folders._remove_dead(lock, claim)
    assert not claim.path.exists(), "it was killed"
    os.utime(lock.path)
    folders._remove_dead(lock, claim)
    assert lock.path.exists(), "it is a successor's"
    lock.look()
    folders._remove_dead(lock, claim)
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


# --- the work that a folder holds -----------------------------------------------------------------

SETTINGS = {"seed": 3, "windows": {"long": 64, "short": 16}, "name": "é"}


@pytest.fixture
def folder(tmp_path: Path) -> WorkFolder:
    return WorkFolder(tmp_path / "work", "out")


@pytest.mark.parametrize("name", ["a.txt", "manifest.json", "deep/er/a.txt", "poetry.lock"])
def test_files_of_others_are_refused_and_stay(folder: WorkFolder, name: str) -> None:
    other = folder.path / name
    other.parent.mkdir(parents=True)
    other.touch()
    (folder.path / "job.log").touch()
    first = name.split("/")[0]
    with pytest.raises(ConfigError, match=rf"out=.*\({first}\).* settings\.json"), folder.opened():
        pass
    assert {path.name for path in folder.path.iterdir()} == {first, "job.log"}
    with pytest.raises(ConfigError, match="is a file"):
        WorkFolder(other, "out").create()
    with pytest.raises(UserError, match=r"out=.*: Not a directory"):
        WorkFolder(other / "work", "out").create()


def test_a_folder_whose_name_is_not_utf_8_is_refused_before_anything_is_done(
    tmp_path: Path,
) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(DataError, match=r"^out: '\\udcff', its character \d+, is half"):
        WorkFolder(folder, "out").create()
    assert not folder.exists()
    with pytest.raises(ConfigError, match="out=~/x: ~ is not replaced here"):
        WorkFolder(Path("~/x"), "out").create()


def test_what_a_start_leaves_that_is_killed_at_once_is_no_hindrance(folder: WorkFolder) -> None:
    (folder.path / "trials").mkdir(parents=True)
    leave(folder.path, text="")
    (folder.path / "lock.next").touch()
    os.utime(folder.path / "lock.next", (0, 0))
    left_by_a_killed_process(folder.identity)
    with folder.opened("trials"):
        folder.identify(SETTINGS)
        with pytest.raises(UserError, match=f"by process {os.getpid()}"), folder.opened():
            pass
    left_by_a_killed_process(folder.path / "trials" / "rope_seed1.json")
    alive = partial_name(folder.path / "trials" / "ppc_seed1.json")
    alive.touch()
    with folder.opened("trials"):
        names = {str(path.relative_to(folder.path)) for path in folder.path.rglob("*.*")}
        assert names == {"settings.json", f"trials/{alive.name}"}


def test_other_settings_are_refused_by_name(
    folder: WorkFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.create()
    first = folder.identify(SETTINGS)
    assert folder.identify(SETTINGS) == first
    with pytest.raises(ConfigError, match=r"out=.*work .* windows\.short=16 \(now 8\)"):
        folder.identify(SETTINGS | {"windows": {"long": 64, "short": 8}})
    assert folder.identify(SETTINGS | {"new": 1}, lambda stored: stored | {"new": 1}) == first
    folder.identity.unlink()
    folder.identify(SETTINGS, versions={"torch": "2.12", "transformers": None})
    assert not capsys.readouterr().err
    folder.identify(SETTINGS, versions={"torch": "2.13", "transformers": None})
    assert "torch=2.12 (now 2.13)" in capsys.readouterr().err
    folder.identity.write_text(folder.identity.read_text().replace("64", "65"))
    with pytest.raises(DataError, match=r"settings\.json"):
        folder.identify(SETTINGS)


@pytest.mark.parametrize("names", [[0, 2, 10, 9_999_999], ["step000001", "step000120"]])
def test_a_piece_is_read_again_unless_it_is_damaged_or_of_something_else(
    names: list[int | str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pieces = Pieces(tmp_path)
    for name in names:
        assert pieces.read(name, "a text") is None
        pieces.write(name, "a text", {"number": name})
    assert [pieces.read(name, "a text") for name in names] == [{"number": name} for name in names]
    assert pieces.read(names[0], "another text") is None
    files = sorted(tmp_path.iterdir())
    assert [json.loads(file.read_text())["number"] for file in files] == names
    files[0].write_text(files[0].read_text().replace("0", "3"))
    assert pieces.read(names[0], "a text") is None
    assert files[0].name in capsys.readouterr().err


def test_differences_are_found_at_the_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One path in several spellings is one value."""
    nested = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}, {"e": 3}], "f": [1, 2], "g": []}
    flat = {"a.b": 1, "a.c": {}, "d[0].e": 2, "d[1].e": 3, "f": [1, 2], "g": []}
    assert dict(leaves(nested)) == flat
    assert differences(nested, nested) == []
    changed = {"a": {"b": 1, "c": {"x": 0}}, "d": [{"e": 2}], "f": [1, 3], "g": []}
    found = [re.split("[= ]", line)[0] for line in differences(nested, changed)]
    assert found == ["a.c", "a.c.x", "d[1].e", "f"]
    monkeypatch.chdir(tmp_path)
    paths = {"model": "runs/a", "texts": ["b/1", "b/2"]}
    assert not differences(paths, {"model": f"{tmp_path}/runs/a", "texts": ["./b/1", "b//2"]})
    for other in ({"model": "runs/b"}, {"texts": ["b/1", "c/2"]}, {"texts": ["b/1"]}):
        assert len(differences(paths, paths | other)) == 1
