"""A time-out ends the process, whatever the disk does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from olmo_sparsity.base.launch import EXIT_LOST_PROCESS
from olmo_sparsity.config.sections import EngineConfig
from olmo_sparsity.training.processes import watchdog
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.stacks import Stacks
from olmo_sparsity.training.processes.watchdog import Watchdog


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
    monkeypatch.setattr(Stacks, "write", lambda self, task: disk_is_back.wait())
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


# --- limits of steps and of disks -----------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock.now_s)
    return clock


class Clock:
    """A clock that a test sets."""

    now_s = 1000.0


def unwatched(folder: Path) -> Watchdog:
    """A watchdog whose tasks nobody watches."""
    return Watchdog(folder, EngineConfig(), Processes())


@pytest.mark.usefixtures("no_launcher")
def test_a_step_may_take_five_times_as_long_as_the_longest_one_so_far(
    tmp_path: Path, clock: Clock
) -> None:
    watched = unwatched(tmp_path)
    watched.first_step_s = 200
    watched.expect_step(2)
    assert watched.task.limit_s == 5 * 200, "the first step alone is known"
    clock.now_s += 100
    watched.expect_step(3)
    assert watched.task.limit_s == 5 * 100, "the first one compiled kernels"
    assert "500 s, 5 times the longest step, and engine.step_timeout_s=300" in watched.task.limit
    clock.now_s += 904
    watched.expect("the evaluation")
    clock.now_s += 1700
    watched.expect_step(4)
    assert watched.task.limit_s == EngineConfig().work_timeout_s, "at which connections give up"


@pytest.mark.usefixtures("no_launcher")
def test_short_steps_keep_their_limit(tmp_path: Path, clock: Clock) -> None:
    watched = unwatched(tmp_path)
    for step in range(2, 5):
        watched.expect_step(step)
        clock.now_s += 2
    assert watched.task.limit_s == EngineConfig().step_timeout_s
    assert watched.task.limit == "engine.step_timeout_s=300"


@pytest.mark.usefixtures("no_launcher")
def test_a_wait_for_a_disk_has_more_time_and_takes_none_of_the_step(
    tmp_path: Path, clock: Clock
) -> None:
    watched = unwatched(tmp_path)
    watched.expect_step(2)
    before = watched.task
    clock.now_s += 10
    with watched.disk_work("reading the batch of step 3"):
        assert watched.task.limit_s == EngineConfig().work_timeout_s
        clock.now_s += 1000
    assert watched.task == before._replace(deadline=before.deadline + 1000)
    watched.expect_step(3)
    assert watched.longest_step_s == 10
