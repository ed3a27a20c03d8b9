"""Files that are whole or not there."""

from pathlib import Path

import pytest

from olmo_sparsity.files import write_atomically, writing


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
