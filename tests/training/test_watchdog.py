"""A time-out ends the process, whatever the disk does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from olmo_sparsity.base.launch import EXIT_LOST_PROCESS
from olmo_sparsity.config.sections import EngineConfig
from olmo_sparsity.training import watchdog
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.watchdog import Watchdog


@pytest.fixture
def exit_codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    # The thread of the watchdog would end this process, too.
    monkeypatch.setattr(Watchdog, "_watch", lambda self: None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    return codes


def test_a_disk_that_hangs_does_not_keep_a_process_from_ending(
    tmp_path: Path,
    exit_codes: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk_is_back = threading.Event()
    monkeypatch.setattr(Watchdog, "_write_stacks", lambda self, task: disk_is_back.wait())
    monkeypatch.setattr(watchdog, "DISK_PATIENCE_S", 0.1)
    ended = Watchdog(tmp_path, EngineConfig(), Processes())
    ended._end(ended.task)
    disk_is_back.set()
    assert exit_codes == [EXIT_LOST_PROCESS]
    assert "takes no stacks; the same command goes on" in capsys.readouterr().err


def test_the_folder_is_unlocked_before_the_process_ends(
    tmp_path: Path, exit_codes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    unlocked: list[bool] = []
    ended = Watchdog(tmp_path, EngineConfig(), Processes(), lambda: unlocked.append(True))
    ended._end(ended.task)
    assert (unlocked, exit_codes) == ([True], [EXIT_LOST_PROCESS])
    assert list(tmp_path.glob("stacks/*/process00000.txt"))
    assert "the start took more than engine.work_timeout_s=" in capsys.readouterr().err
