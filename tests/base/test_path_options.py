"""Paths of options, which are checked before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.path_options import check_not_read, path_of


@pytest.mark.parametrize("path", [None, 3, b"results", "", " ", ["a"]])
def test_what_is_not_a_path_is_refused_with_the_name_of_the_argument(path: object) -> None:
    with pytest.raises(ConfigError, match=r"^out="):
        path_of("out", path)


@pytest.mark.parametrize("word", ["{}", "@{}", "name={}"])
def test_a_file_that_is_read_is_not_replaced(tmp_path: Path, word: str) -> None:
    note = tmp_path / "note.html"
    note.write_text("text")
    (tmp_path / "link.html").symlink_to(note)
    with pytest.raises(ConfigError, match=r"--html=.* would replace"):
        check_not_read("--html", str(tmp_path / "link.html"), ["demo", word.format(note)])
    check_not_read("--html", str(tmp_path / "page.html"), [word.format(note)])
    check_not_read("--html", None, [word.format(note)])
