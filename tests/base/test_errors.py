"""Names that come from outside reach the terminal as text."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from olmo_sparsity.base.errors import DataError, check_encodable, printable, unreadable
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.command.cli import main

ORDERS = "a\x1b]0;title\x07\x1b[2J\r\n\x9b31m\u202eb\udcff"


def test_printable_leaves_text_as_it_is() -> None:
    assert printable("loss − 1.5 … 'naïve' 日本語 🙂") == "loss − 1.5 … 'naïve' 日本語 🙂"
    assert printable(ORDERS) == r"a\x1b]0;title\x07\x1b[2J\r\n\x9b31m\u202eb\udcff"


@pytest.mark.parametrize(
    "words", [["train", ORDERS], ["losses", ORDERS], ["losses", "x", f"--{ORDERS}"]]
)
def test_names_reach_the_terminal_as_text(words: list[str], capsys: pytest.CaptureFixture) -> None:
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(words) == 2
    said = capsys.readouterr().err
    assert r"\x1b]0;title" in said
    assert printable(said.replace("\n", "")) == said.replace("\n", "")


def test_names_in_progress_are_text_too(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "LOG_EVERY_S", 0)
    with Progress("training", 2, "steps") as progress:
        progress.update(1, trial=ORDERS)
        progress.note(ORDERS)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(r"\x1b[2J" in line for line in lines)


def test_half_of_a_surrogate_pair_is_named_with_its_place() -> None:
    check_encodable("naïve 日本語 🙂 \ufffd", "text")
    with pytest.raises(DataError, match=r"^prompt: '\\udcff', its character 3, is half of a"):
        check_encodable("ab\udcff", "prompt")


def test_a_file_that_its_owner_alone_may_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    assert "write or download it again" in str(unreadable(path, OSError("bad header")))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read everything
    found = unreadable(path, FileNotFoundError("No such file"))
    assert re.search(r"cannot be read now \(permission denied\)", str(found))
