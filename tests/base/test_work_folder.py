"""A folder holds one work, which goes on at the next start; files of other work stay."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from olmo_sparsity.base.errors import ConfigError, DataError, UserError
from olmo_sparsity.base.files import partial_name
from olmo_sparsity.base.work_folder import Pieces, WorkFolder
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
    (folder.path / "lock").touch()
    os.utime(folder.path / "lock", (0, 0))
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


def test_a_folder_of_another_command_is_said_in_one_sentence(tmp_path: Path) -> None:
    WorkFolder(tmp_path, "out", "identity.json", own_key="data").identify({"data": "x", "seed": 1})
    questions = WorkFolder(tmp_path, "out", "identity.json", own_key="questions")
    with pytest.raises(ConfigError) as caught:
        questions.identify({"questions": "y", "seed": 1})
    expected = f"out={tmp_path} holds the results of another command; name a new folder"
    assert str(caught.value) == expected
