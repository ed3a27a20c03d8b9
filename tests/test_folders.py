"""One launch at a time writes into a folder, which holds one work; no dead one keeps it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity import folders as lock
from olmo_sparsity.errors import ConfigError, DataError, UserError
from olmo_sparsity.folders import LOCK, Owner, WorkFolder, locked, remove_left_lock
from olmo_sparsity.io import partial_name
from olmo_sparsity.runtime import launch_id
from tests.conftest import left_by_a_killed_process

pytestmark = pytest.mark.usefixtures("no_launcher")


HOLD = """
import sys, time
from pathlib import Path
from olmo_sparsity.folders import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """Another process that has the folder."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.communicate()


def write(folder: Path, age_s: float = 0, **changes: Any) -> Path:
    """A lock as another process would have left it."""
    path = folder / LOCK
    path.write_text(json.dumps(asdict(replace(Owner.here(), **changes))))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def is_free(folder: Path) -> bool:
    try:
        with locked(folder):
            return True
    except UserError:
        return False


def test_a_living_owner_is_named_and_a_killed_one_is_followed(
    tmp_path: Path, holder: subprocess.Popen
) -> None:
    with (
        pytest.raises(
            UserError,
            match=rf"written by process {holder.pid} on .*wait until it ends, or stop it \(delete "
            r".* if it is certainly gone, or if the folder is a copy\)",
        ),
        locked(tmp_path),
    ):
        pass
    holder.kill()
    holder.wait()
    with locked(tmp_path):
        assert Owner(**json.loads((tmp_path / LOCK).read_text())).pid == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_it_is_given_back_whatever_ends_it(tmp_path: Path) -> None:
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), locked(tmp_path):
            raise error
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "age_s", "free"),
    [
        ({}, 0, False),
        ({}, 9999, False),  # alive: that it was not refreshed means nothing
        ({"started": "1"}, 0, True),  # the number went to another process
        ({"pid": 2**22 + 1}, 0, True),
        ({"slurm_job": "7"}, 0, False),  # two steps in one allocation
        ({"host": "other"}, 0, False),
        ({"host": "other"}, 9999, True),
        ({"host": "other", "slurm_job": "7"}, 0, True),  # requeued
        ({"host": "other", "slurm_job": "8"}, 0, False),
        ({"machine": "another container", "pid": 2**22 + 1}, 0, False),
    ],
    ids=str,
)
def test_when_an_owner_is_taken_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, age_s: float, free: bool
) -> None:
    path = write(tmp_path, age_s, **changes)
    before = path.read_text()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert is_free(tmp_path) == free
    assert free or path.read_text() == before


def test_a_left_lock_is_removed_and_a_held_one_is_not(tmp_path: Path) -> None:
    remove_left_lock(tmp_path)
    for changes, stays in (({"pid": 2**22 + 1}, False), ({}, True)):
        path = write(tmp_path, **changes)
        remove_left_lock(tmp_path)
        assert path.exists() == stays


@pytest.mark.parametrize("content", ['{"host": ', "[" * 100_000, '{"host": 3}', "x" * 2**17])
def test_a_lock_cut_short_by_a_kill_blocks_for_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    ages = iter([0.0, 4.9, 5.1, 5.1])  # asked once more where nobody else removes it
    monkeypatch.setattr(lock, "age_s", lambda path: next(ages))
    (tmp_path / LOCK).write_text(content)
    assert is_free(tmp_path)
    assert not list(ages)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / LOCK)
    with pytest.raises(UserError, match="lock is not a regular file; delete it"), locked(tmp_path):
        pass


def test_who_waits_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = write(tmp_path, host="other")
    looks = iter(range(3))

    def look(seconds: float) -> None:
        if next(looks) == 2:
            path.unlink()

    monkeypatch.setattr(lock, "_SAID_AFTER_S", 0)
    monkeypatch.setattr("time.sleep", look)
    with locked(tmp_path, waits=True):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"waiting: {tmp_path} is being written by process \d+ on other", line)


def test_a_time_in_the_future_does_not_keep_a_folder_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, age_s=-9999, host="other")
    with pytest.raises(UserError, match=f"delete {path} if it is certainly gone"), locked(tmp_path):
        pass
    monkeypatch.setattr(lock, "STALE_S", 0.3)
    with locked(tmp_path, waits=True):
        assert json.loads(path.read_text())["host"] != "other"


def test_the_owner_keeps_it_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "REFRESH_S", 0.02)
    earlier = tmp_path / "earlier"
    earlier.touch()
    with locked(tmp_path):
        os.utime(tmp_path / LOCK, (0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / LOCK).stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / LOCK).stat().st_mtime >= earlier.stat().st_mtime


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="lock cannot be written: No such file"),
        locked(tmp_path / "nowhere"),
    ):
        pass


COMPETE = """
import sys
from pathlib import Path
from olmo_sparsity.errors import UserError
from olmo_sparsity.folders import locked
print("ready", flush=True)
sys.stdin.readline()
try:
    with locked(Path(sys.argv[1])):
        print("has it", flush=True)
        sys.stdin.readline()
except UserError:
    print("refused", flush=True)
"""


def test_the_lock_of_one_that_followed_meanwhile_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it was away, even for an instant, a third could create one of its own."""
    dead = json.loads(write(tmp_path, started="1").read_text())
    path = write(tmp_path, since="later")
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("it is moved"))
    lock._remove(path, Owner(**dead))
    path.write_text("")  # begun a moment ago
    lock._remove(path, None)
    assert path.exists()


def test_two_processes_of_a_machine_do_not_look_at_a_dead_owner_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, started="1")
    other = threading.Thread(target=lock.remove_left_lock, args=(tmp_path,))
    with lock._alone_in(tmp_path):
        other.start()
        other.join(0.3)
        assert other.is_alive()
        assert path.exists()
    other.join()
    assert not path.exists()


def test_of_many_that_find_a_dead_owner_one_follows(tmp_path: Path) -> None:
    write(tmp_path, started="1")
    command, pipe = [sys.executable, "-c", COMPETE, str(tmp_path)], subprocess.PIPE
    many: list[Any] = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(6)
    ]
    assert [child.stdout.readline() for child in many] == ["ready\n"] * 6
    for child in many:
        print(file=child.stdin, flush=True)
    assert sorted(child.stdout.readline() for child in many) == ["has it\n"] + ["refused\n"] * 5
    for child in many:
        child.communicate()
    assert list(tmp_path.iterdir()) == []


# --- several processes of one launch --------------------------------------------------------------

TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
SRUN = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


def test_all_processes_of_a_launch_are_one_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_FIRST_COMES_WITHIN_S", 0.3)
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in (names | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    with locked(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with locked(tmp_path):
            pass
        assert (tmp_path / LOCK).exists(), "the first one's"
        monkeypatch.setenv("MASTER_PORT", "29501")  # another launch
        with pytest.raises(UserError, match=f"process {os.getpid()}"), locked(tmp_path):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(UserError, match=f"process {os.getpid()}"), locked(tmp_path):
            pass
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="not created by rank 0"), locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("common", "own", "other"),
    [
        (TORCHRUN, {"RANK": "1", "LOCAL_RANK": "1"}, {"MASTER_PORT": "2"}),
        (TORCHRUN, {"RANK": "1"}, {"TORCHELASTIC_RUN_ID": "abc"}),
        (SRUN, {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, {"SLURM_STEP_ID": "1"}),
        (
            SRUN,
            # What training sets for DeepSpeed once the processes have met.
            {"SLURM_PROCID": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"},
            {"SLURM_RESTART_COUNT": "1"},
        ),
    ],
)
def test_launches_by_what_each_launcher_sets(
    common: dict, own: dict, other: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*given: dict) -> str:
        with monkeypatch.context() as patch:
            for name, value in [pair for part in given for pair in part.items()]:
                patch.setenv(name, value)
            return launch_id()

    first = own | {name: "0" for name in own if name in ("RANK", "SLURM_PROCID")}
    assert ask(common, first) == ask(common, own)
    assert ask(common, first, other) != ask(common, first)


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
    with (
        pytest.raises(ConfigError, match=rf"out=.*work holds other files \({first}\) and no sett"),
        folder.opened("trials"),
    ):
        pass
    assert {path.name for path in folder.path.iterdir()} == {first, "job.log"}
    with pytest.raises(ConfigError, match="is a file; pass a folder"):
        WorkFolder(other, "out").create()


def test_what_a_start_leaves_that_is_killed_at_once_is_no_hindrance(folder: WorkFolder) -> None:
    (folder.path / "trials").mkdir(parents=True)
    (folder.path / LOCK).touch()
    os.utime(folder.path / LOCK, (0, 0))
    left_by_a_killed_process(folder.identity).touch()
    with folder.opened("trials"):
        folder.identify(SETTINGS)
    left_by_a_killed_process(folder.path / "trials" / "rope_seed1.json").touch()
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
    message = r"out=.*work holds work with windows\.short=16 \(now 8\); name a new folder"
    with pytest.raises(ConfigError, match=message):
        folder.identify(SETTINGS | {"windows": {"long": 64, "short": 8}})
    assert folder.identify(SETTINGS | {"new": 1}, lambda stored: stored | {"new": 1}) == first
    folder.identity.unlink()
    folder.identify(SETTINGS, versions={"torch": "2.12", "transformers": None})
    assert not capsys.readouterr().err
    folder.identify(SETTINGS, versions={"torch": "2.13", "transformers": None})
    assert "was begun with torch=2.12 (now 2.13): numbers" in capsys.readouterr().err
    text = folder.identity.read_text()
    folder.identity.write_text(text.replace("64", "65"))
    with pytest.raises(DataError, match=r"settings\.json: it is not what was written"):
        folder.identify(SETTINGS)


def test_one_path_in_several_spellings_is_one_setting(
    folder: WorkFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    folder.create()
    first = folder.identify({"model": "runs/a", "texts": ["b/1", "b/2"]})
    spelled = {"model": f"{tmp_path}/runs/a", "texts": ["./b/1", "b//2"]}
    assert folder.identify(spelled) == first
    for other in ({"model": "runs/b"}, {"texts": ["b/1", "c/2"]}, {"texts": ["b/1"]}):
        with pytest.raises(ConfigError, match=f"holds work with {next(iter(other))}="):
            folder.identify(spelled | other)
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ConfigError, match="holds work with model=runs/a"):
        folder.identify(spelled)


def test_one_process_at_a_time_has_it(folder: WorkFolder) -> None:
    with (
        folder.opened(),
        pytest.raises(UserError, match=f"is being written by process {os.getpid()}"),
        folder.opened(),
    ):
        pass
    assert not (folder.path / LOCK).exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"out=.*file/work cannot be written: Not a directory"):
        WorkFolder(tmp_path / "file" / "work", "out").create()
