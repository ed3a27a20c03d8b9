"""A run that dies again and again without getting on is not started for ever."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from olmo_sparsity.base import files
from olmo_sparsity.base.errors import UnreadableNowError, UserError
from olmo_sparsity.base.launch import DEATHS_FILE
from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.checkpoints.save import CheckpointContent
from olmo_sparsity.training.checkpoints.writer import CheckpointWriter
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.run_folder.attempts import (
    PROGRESS_S,
    PROGRESS_STEPS,
    Attempts,
    counted_start,
    note_saved,
)
from olmo_sparsity.training.run_folder.trainer_state import TrainerState
from tests.conftest import data_section, small_run, until
from tests.support import children

ALONE = Processes()


def die(folder: Path, first_step: int = 0, saved: int | None = None) -> None:
    """A start that goes on from a step, saves another one or none, and is never heard of again."""
    dying = counted_start(folder)
    dying.__enter__().begin(max_starts=3)
    if saved is not None:
        with CheckpointWriter(folder, CheckpointConfig(), ALONE, first_step) as writer:
            state = TrainerState(saved, 0, "")
            writer.save(CheckpointContent(state, lambda _: None, lambda _: []))
            writer.wait()


def test_a_run_that_saves_a_little_in_each_start_and_dies_is_refused(tmp_path: Path) -> None:
    """As with interval_steps=auto, which saves ten steps after each start."""
    for number in range(3):
        die(tmp_path, first_step=10 * number, saved=10 * number + 10)
    for _ in range(2):  # it stays refused
        with pytest.raises(UserError, match=r"died 3 times .* saved step is 30; .*max_starts=6"):
            die(tmp_path, first_step=30)


def test_a_start_that_gets_on_begins_the_count_anew(tmp_path: Path) -> None:
    die(tmp_path)
    die(tmp_path)
    die(tmp_path, saved=PROGRESS_STEPS)
    for _ in range(3):
        die(tmp_path, first_step=PROGRESS_STEPS)
    with pytest.raises(UserError, match="died 3 times"):
        die(tmp_path, first_step=PROGRESS_STEPS)


def test_ten_minutes_of_slow_steps_are_progress(tmp_path: Path) -> None:
    Attempts(0, 2).write(tmp_path)
    note_saved(tmp_path, step=5, resumed_step=0, trained_s=PROGRESS_S - 1)
    assert Attempts.read(tmp_path) == Attempts(5, 2)
    note_saved(tmp_path, step=6, resumed_step=0, trained_s=PROGRESS_S)
    assert Attempts.read(tmp_path) == Attempts(6, 0)


def end_with_an_error(folder: Path) -> None:
    with counted_start(folder) as count:
        count.begin(3)
        raise UserError("disk full")


def test_an_orderly_end_is_no_death_and_hides_none(tmp_path: Path) -> None:
    die(tmp_path)
    die(tmp_path)
    for _ in range(3):
        with counted_start(tmp_path) as count:
            count.begin(3)  # stopped by a signal after saving, or finished
        with pytest.raises(UserError, match="full"):
            end_with_an_error(tmp_path)
    die(tmp_path)
    with pytest.raises(UserError, match="died 3 times"):
        die(tmp_path)


def test_a_damaged_count_and_one_of_an_earlier_version_hinder_nobody(tmp_path: Path) -> None:
    for text in ("damaged", '{"died_after": 7}'):
        (tmp_path / "attempts.json").write_text(text)
        die(tmp_path)


def test_a_count_that_cannot_be_read_now_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Attempts(saved_step=300, starts=2).write(tmp_path)
    stored = Attempts.path(tmp_path).read_bytes()

    def fail(*_: object) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "attempts.json")

    monkeypatch.setattr(files, "read_bounded", fail)
    with pytest.raises(UnreadableNowError, match=r"attempts\.json cannot be read now"):
        die(tmp_path)
    assert Attempts.path(tmp_path).read_bytes() == stored


def test_progress_clears_the_deaths_that_the_job_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = tmp_path / ".deaths-1"
    monkeypatch.setenv(DEATHS_FILE, str(deaths))
    deaths.write_text("dead\n")
    note_saved(tmp_path, step=10, resumed_step=0, trained_s=1)
    assert deaths.exists()
    for step in (100, 200):
        note_saved(tmp_path, step=step, resumed_step=0, trained_s=1)
    assert not deaths.exists()


def sleep_in_the_engine() -> None:
    """Disturbs: this process never gets through the start."""
    from olmo_sparsity.training import restore

    restore.build_engine = lambda *given: time.sleep(1000)  # type: ignore[assignment]


def test_a_start_that_hangs_before_its_first_step_is_counted(
    data_folder: Path, tmp_path: Path
) -> None:
    settings = small_run(tmp_path / "run", data_section(data_folder))
    settings["engine"] = {"name": "ddp", "step_timeout_s": 2, "work_timeout_s": 3}
    job = children.start(settings, disturb={1: sleep_in_the_engine})
    assert job.wait() == [76, 76], job.texts()
    assert Attempts.read(tmp_path / "run").starts == 1
    hours = json.loads((tmp_path / "run/gpu_hours.json").read_text())["gpu_hours"]
    assert hours > 2 * 3 / 3600, "of both GPUs until the time-out"


def killed_before_it_has_saved() -> None:
    """Disturbs: this process is told to stop, and killed before its checkpoint is complete."""

    def die(*given: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    CheckpointWriter.save = die  # type: ignore[method-assign] # as a grace time that is too short
    children.signal_at_step(3, "SIGTERM")


def test_a_preemption_that_leaves_no_time_to_save_is_no_death(
    data_folder: Path, tmp_path: Path
) -> None:
    settings = small_run(tmp_path / "run", data_section(data_folder))
    settings["checkpoint"] = {"interval_steps": None}
    job = children.start(settings, 1, disturb={0: killed_before_it_has_saved})
    assert job.wait() == [-signal.SIGKILL], job.texts()
    assert Attempts.read(tmp_path / "run").starts == 0


def crash_after_a_save(folder: Path) -> None:
    """Disturbs: this process ends at its 13th step, when the checkpoint of its 10th is whole."""
    earlier = Attempts.read(folder).saved_step

    def crash() -> None:
        until(lambda: Attempts.read(folder).saved_step > earlier)
        os._exit(1)

    children.at_step(13, crash)


def test_a_training_that_dies_soon_after_its_first_save_is_started_three_times(
    data_folder: Path, tmp_path: Path
) -> None:
    settings = small_run(tmp_path / "run", data_section(data_folder))
    settings["training"]["num_steps"] = 60
    settings["training"]["max_epochs"] = 100
    settings["checkpoint"] = {"interval_steps": "auto"}
    dying = partial(crash_after_a_save, tmp_path / "run")
    ends = [children.start(settings, 1, disturb={0: dying}).wait() for _ in range(4)]
    assert ends == [[1], [1], [1], [2]]
    assert list_checkpoints(tmp_path / "run")[0].name == "step000030"
