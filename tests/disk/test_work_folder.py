"""A folder that is filled over several starts holds one work, and that of nobody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from olmo_sparsity.disk.files import partial_name
from olmo_sparsity.disk.lock import LOCK
from olmo_sparsity.disk.work_folder import WorkFolder
from olmo_sparsity.errors import ConfigError, DataError, UserError
from tests.conftest import left_by_a_killed_process

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
    with pytest.raises(ConfigError, match="is a file; name a folder"):
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


def test_other_settings_are_refused_by_name(folder: WorkFolder) -> None:
    folder.create()
    first = folder.identify(SETTINGS)
    assert folder.identify(SETTINGS) == first
    message = r"out=.*work holds work with windows\.short=16 \(now 8\); name a new folder"
    with pytest.raises(ConfigError, match=message):
        folder.identify(SETTINGS | {"windows": {"long": 64, "short": 8}})
    assert folder.identify(SETTINGS | {"new": 1}, lambda stored: stored | {"new": 1}) == first
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
