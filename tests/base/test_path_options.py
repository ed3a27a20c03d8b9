"""Paths of options, which are checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.path_options import check_not_read, check_output_path, path_of


@pytest.mark.parametrize("path", [None, 3, b"results", "", " ", ["a"]])
def test_what_is_not_a_path_is_refused_with_the_name_of_the_argument(path: object) -> None:
    with pytest.raises(ConfigError, match=r"^out="):
        path_of("out", path)


@pytest.mark.parametrize("check", [path_of, check_output_path])
@pytest.mark.parametrize("path", ["a" * 256, "é" * 128, f"results/{'a' * 256}/page.html"])
def test_a_name_longer_than_disks_store_is_refused_with_the_limit(
    check: Callable[[str, str], object], path: str
) -> None:
    wanted = r"^--out=.*… has a name of 256 bytes, and disks store 255 at most; pass a shorter one$"
    with pytest.raises(ConfigError, match=wanted):
        check("--out", path)


def test_the_longest_name_that_disks_store_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)
    path.touch()  # the disk agrees
    assert path_of("out", path) == path


@pytest.mark.parametrize("word", ["{}", "@{}", "name={}"])
def test_a_file_that_is_read_is_not_replaced(tmp_path: Path, word: str) -> None:
    note = tmp_path / "note.html"
    note.write_text("text")
    (tmp_path / "link.html").symlink_to(note)
    with pytest.raises(ConfigError, match=r"--html=.* would replace"):
        check_not_read("--html", str(tmp_path / "link.html"), ["demo", word.format(note)])
    check_not_read("--html", str(tmp_path / "page.html"), [word.format(note)])
    check_not_read("--html", None, [word.format(note)])
