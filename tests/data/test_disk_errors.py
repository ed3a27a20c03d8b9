"""Token files on a network disk that is away for a moment."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity.base import retry
from olmo_sparsity.base.errors import DataError, UnreadableNowError
from olmo_sparsity.data.token_files import FileState, TokenFile

NUM_TRIES = 3


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenFile:
    """A file of the tokens 0 to 99, read by a process that tries again at once."""
    monkeypatch.setattr(retry, "RETRY_AFTER_S", (0.0,) * (NUM_TRIES - 1))
    path = tmp_path / "train-00000.tokens.uint16"
    np.arange(100, dtype="<u2").tofile(path)
    return TokenFile(path, np.dtype("<u2"), FileState.of(path))


def fail(monkeypatch: pytest.MonkeyPatch, call: str, number: int, num_times: int) -> list[int]:
    """Let a call of the system fail with this error so many times. Return the descriptors of all
    reads."""
    really: Callable = getattr(os, call)
    num_failed = 0
    descriptors: list[int] = []

    def failing(*given: int) -> object:
        nonlocal num_failed
        if call == "pread":
            descriptors.append(given[0])
        if num_failed < num_times:
            num_failed += 1
            raise OSError(number, os.strerror(number))
        return really(*given)

    monkeypatch.setattr(os, call, failing)
    return descriptors


@pytest.mark.parametrize("call", ["open", "pread", "fstat"])
def test_a_read_that_a_disk_refuses_for_a_moment_is_tried_again(
    token_file: TokenFile,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail(monkeypatch, call, errno.EIO, NUM_TRIES - 1)
    assert token_file.read(10, 3).tolist() == [10, 11, 12]
    said = capsys.readouterr().err
    assert said.count(f"{token_file.path}: [Errno 5] Input/output error; trying again") == 2


def test_a_handle_that_the_disk_no_longer_knows_is_opened_again(
    token_file: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert token_file.read(0, 2).tolist() == [0, 1]
    really_open = os.open
    opened: list[int] = []

    def counted(*given: object) -> int:
        opened.append(really_open(*given))  # type: ignore[arg-type] # handed on
        return opened[-1]

    monkeypatch.setattr(os, "open", counted)
    fail(monkeypatch, "pread", errno.ESTALE, 1)
    assert token_file.read(98, 2).tolist() == [98, 99]
    assert len(opened) == 1


def test_a_disk_that_stays_away_ends_the_run_such_that_a_new_start_may_help(
    token_file: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "pread", errno.ESTALE, NUM_TRIES)
    with pytest.raises(UnreadableNowError, match=r"cannot be read now \(Stale file handle\)"):
        token_file.read(0, 1)


def test_a_file_that_is_gone_is_not_waited_for(token_file: TokenFile) -> None:
    token_file.path.unlink()
    with pytest.raises(DataError, match="No such file or directory; restore it") as error:
        token_file.read(0, 1)
    assert not isinstance(error.value, UnreadableNowError)
