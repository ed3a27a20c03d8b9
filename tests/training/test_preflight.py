"""Before the first step: disks, shards, run folder, and a run that dies again and again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.training.checkpoint import CheckpointWriter, TrainerState
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.preflight import attempt, check_room, check_shared
from tests.conftest import MakeConfig

ALONE = Processes()


def test_a_disk_without_room_for_the_checkpoints_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(num_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))

    def check(**kept: Any) -> None:
        check_room(Path("/"), CheckpointConfig(interval_steps=2, **kept), 10**6, 0, num_steps=6)

    needed = 3 * 10**6 * 12  # two that are kept, one being written
    free(needed)
    check()
    for num_bytes, kept in ((needed - 1, {}), (needed, {"keep_steps": [1, 3]})):
        free(num_bytes)
        with pytest.raises(UserError, match=r"run_folder=/: .*checkpoint\.keep=2"):
            check(**kept)
    config = make_config()
    free(10**6)
    with pytest.raises(UserError, match="run_folder="):
        train(config)
    assert not (Path(config.run_folder) / "metrics.jsonl").exists()


def test_a_disk_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    class SecondOfTwo(Processes):
        def gather(self, value: Any) -> list[Any]:
            return ["token", value] if isinstance(value, str) else [None, value]

        def agree(self) -> Any:
            return contextlib.nullcontext()

    second = SecondOfTwo(rank=1, world_size=2)
    with pytest.raises(UserError, match="run_folder="):
        check_shared(tmp_path, second, patience_s=0.2)
    (tmp_path / ".seen-by-all-token").touch()
    check_shared(tmp_path, second, patience_s=0.2)


def die(folder: Path, saved: int | None = None) -> None:
    """A start that saves a step or none, and is never heard of again."""
    dying = attempt(folder, 3, ALONE)
    dying.__enter__()
    if saved is not None:
        with CheckpointWriter(folder, CheckpointConfig(), ALONE) as writer:
            writer.save(TrainerState(saved, 0, ""), lambda _: None, lambda _: [])
            writer.wait()


def test_a_run_that_dies_before_each_checkpoint_is_refused_whatever_it_has_logged(
    tmp_path: Path,
) -> None:
    """Each start reaches another step; the fourth after a save is not begun."""
    for saved in (7, None, None, 9, None, None, None):
        die(tmp_path, saved)
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 10 + os.urandom(1)[0]}))
    for _ in range(2):  # it stays refused
        with pytest.raises(UserError, match=r"died 3 times .* after step 9; .*max_starts=6"):
            die(tmp_path)
    (tmp_path / "attempts.json").write_text("damaged")
    die(tmp_path)


def test_what_an_earlier_version_noted_of_its_attempts_hinders_nobody(tmp_path: Path) -> None:
    (tmp_path / "attempts.json").write_text('{"died_after": 7}')
    die(tmp_path)


def test_an_orderly_end_is_no_death(tmp_path: Path) -> None:
    for _ in range(5):
        with attempt(tmp_path, 3, ALONE):
            pass  # stopped by a signal after saving, or finished
        with pytest.raises(UserError, match="full"), attempt(tmp_path, 3, ALONE):
            raise UserError("disk full")
