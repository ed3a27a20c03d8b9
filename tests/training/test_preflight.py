"""Before the first step: disks, shards, run folder, and a run that dies again and again."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from olmo_sparsity.errors import UserError
from olmo_sparsity.training import preflight
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.preflight import attempt, check_room, check_shared
from tests.conftest import MakeConfig

ALONE = Processes()


# --- before the first step ------------------------------------------------------------------------


def test_a_disk_without_room_for_the_checkpoints_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(num_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))

    config = make_config()
    needed = 3 * 10**6 * 12  # two that are kept, one being written
    free(needed)
    check_room(Path("/"), config, 10**6, step=0)
    free(needed - 1)
    with pytest.raises(UserError, match=r"0\.03 GiB free, .* need 0\.03 .*keep=2"):
        check_room(Path("/"), config, 10**6, step=0)
    config = make_config(checkpoint__keep_steps=[1, 3])
    free(needed)
    with pytest.raises(UserError, match=r"need 0\.06 .*keep=2, 2 to stay forever"):
        check_room(Path("/"), config, 10**6, step=0)
    free(10**6)
    with pytest.raises(UserError, match="run_folder="):
        train(config)
    assert not (Path(config.run_folder) / "metrics.jsonl").exists()


def test_checkpoints_are_as_large_as_the_check_assumes(trained: Path) -> None:
    (*_, last) = (trained / "checkpoints").iterdir()
    written = sum(path.stat().st_size for path in last.rglob("*.safetensors"))
    parameters = 37_024
    assert 0 <= written - parameters * preflight.BYTES_PER_PARAMETER < 10_000, "headers"


def test_an_unusable_run_folder_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run_folder=.*file/run cannot be written"):
        train(make_config(run_folder=str(tmp_path / "file" / "run")))


def test_a_disk_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    class SecondOfTwo(Processes):
        def gather(self, value: Any) -> list[Any]:
            return ["token", value] if isinstance(value, str) else [None, value]

        def agree(self) -> Any:
            return contextlib.nullcontext()

    second = SecondOfTwo(rank=1, world_size=2)
    with pytest.raises(UserError, match="what process 0 writes there cannot be seen"):
        check_shared(tmp_path, second, patience_s=0.2)
    (tmp_path / ".seen-by-all-token").touch()
    check_shared(tmp_path, second, patience_s=0.2)


# --- a run that dies again and again --------------------------------------------------------------


def die(folder: Path, start: int, reached: int) -> None:
    """A start that logs up to a step and is never heard of again."""
    dying = attempt(folder, start, ALONE)
    dying.__enter__()
    rows = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, reached + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows))


def test_dying_twice_at_the_same_step_is_enough(tmp_path: Path) -> None:
    die(tmp_path, 0, 7)
    die(tmp_path, 0, 7)
    for _ in range(2):  # it stays refused
        with pytest.raises(UserError, match=r"from step 0 and died 2 times after step 7"):
            die(tmp_path, 0, 7)
    (tmp_path / "attempts.json").unlink()  # as the message says
    die(tmp_path, 0, 7)


def test_dying_in_different_places_is_given_more_patience(tmp_path: Path) -> None:
    for reached in (7, 9, 8, 12, 11):
        die(tmp_path, 0, reached)
    with pytest.raises(UserError, match=r"after \[7, 9, 8, 12, 11\]"):
        die(tmp_path, 0, 3)


def test_progress_and_an_orderly_end_are_no_deaths(tmp_path: Path) -> None:
    for start in range(0, 12, 2):  # preempted without notice, but a checkpoint further each time
        die(tmp_path, start, start + 3)
    for _ in range(4):
        with attempt(tmp_path, 12, ALONE):
            pass  # stopped by a signal after saving, or finished
        with pytest.raises(UserError, match="full"), attempt(tmp_path, 12, ALONE):
            raise UserError("disk full")
    assert not (tmp_path / "attempts.json").exists()


def test_a_poisoned_run_is_refused_by_training(make_config: MakeConfig, trained: Path) -> None:
    shutil.rmtree(trained / "checkpoints")
    (trained / "attempts.json").write_text(json.dumps({"start": 0, "deaths": [6]}))
    with pytest.raises(UserError, match=r"died 2 times after step 6, without a new checkpoint"):
        train(make_config())
    (trained / "attempts.json").unlink()
    train(make_config())
