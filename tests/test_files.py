"""Files that are whole or not there."""

import os
import time
from pathlib import Path

import pytest

from olmo_sparsity.files import age_s, follow_umask, write_atomically, writing


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_file_of_mkstemp_gets_the_mode_of_any_other(tmp_path: Path, umask: int) -> None:
    file, other = tmp_path / "weights", tmp_path / "other"
    before = os.umask(umask)
    try:
        file.touch(0o600)
        other.touch()
        follow_umask(file)
    finally:
        os.umask(before)
    assert file.stat().st_mode == other.stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"weights", "other"}


def test_processes_that_write_the_same_file_at_once_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    with writing(file) as first, writing(file) as second:
        first.write_text("first")
        second.write_text("second")
    assert file.read_text() == "first", "the one that ends last"
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    write_atomically(file, "before\n")
    half = "half \ud800"  # the second character cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, half)
    assert file.read_bytes() == b"before\n"
    assert list(tmp_path.iterdir()) == [file]


def test_the_age_of_a_file_in_a_read_only_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(path)

    os.utime(tmp_path, (time.time() - 60,) * 2)
    monkeypatch.setattr(Path, "touch", refuse)  # root may write anywhere
    assert 60 <= age_s(tmp_path) < 120
