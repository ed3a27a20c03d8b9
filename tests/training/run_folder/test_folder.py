"""The log of a run: whole, or named where it is not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.json_text import with_crc
from olmo_sparsity.data.batches import TrainingBatches
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training import steps
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.metrics.loss_table import describe_losses
from olmo_sparsity.training.metrics.metrics import Metrics
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.steps import Outcome
from tests.conftest import MakeConfig
from tests.support.metrics import WAITS
from tests.support.models import truncate


@pytest.mark.parametrize(
    "damage",
    [
        b"\xf6\x00",
        b'{"step": 2, "lo',
        b'{"step": "2"}',
        b'{"step": 2, "loss": 1.5, "line": 2, "crc32": "00000000"}',
    ],
)
def test_a_damaged_line_of_the_metrics_is_named_and_left(
    tmp_path: Path, damage: bytes, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage)
    assert list(read_metrics(path)) == [{"step": 1}], "the last one, cut short by a kill"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    assert list(read_metrics(path)) == [{"step": 1}, {"step": 3}]
    assert "1 damaged lines are skipped" in capsys.readouterr().err


def test_a_damaged_line_is_counted_before_a_whole_one_without_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}')
    assert read_metrics(path) == [{"step": 1}, {"step": 3}]
    assert "1 damaged lines are skipped" in capsys.readouterr().err
    Metrics(tmp_path, 3, [])
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'


def test_rows_wait_while_the_disk_takes_none(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A try that fails may have written a part of a line."""
    config = make_config(logging__interval_steps=1)
    path = Path(config.run_folder) / "metrics.jsonl"
    really, num_tries = Path.open, 0

    def opened(self: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        nonlocal num_tries
        if self == path and mode == "ab":
            num_tries += 1
            if num_tries == 3:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))
            if num_tries == 4:
                return FullAfterSixBytes(really(self, "ab"))
        return really(self, mode, *given, **named)

    monkeypatch.setattr(Path, "open", opened)
    assert train(config) is Outcome.FINISHED
    monkeypatch.undo()
    assert capsys.readouterr().err.count("cannot be written now (Stale file handle)") == 1
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5, 6, 6]
    assert "damaged" not in capsys.readouterr().err


class FullAfterSixBytes:
    """A file whose writes fail when a part is written."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> FullAfterSixBytes:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> None:
        self.file.write(data[:6])
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_metrics_of_another_run_are_refused(
    make_config: MakeConfig, trained: Path, tmp_path: Path
) -> None:
    """Whichever checkpoint is the last; and the own ones are taken, with fewer checkpoints too."""
    own, metrics = (trained / "metrics.jsonl").read_bytes(), trained / "metrics.jsonl"
    shutil.copytree(trained / "checkpoints/step000004", tmp_path / "saved")
    other = make_config(run_folder=str(tmp_path / "other"), seed=4)
    train(other)
    shutil.copy(tmp_path / "other/metrics.jsonl", metrics)
    for step in (6, 4):
        with pytest.raises(DataError, match=f"metrics.* not of the run of .*step00000{step}"):
            train(make_config(run_folder=str(trained), seed=3))
        with pytest.raises(DataError, match=r"restore .*, or delete it"):
            describe_losses(trained)
        shutil.rmtree(trained / f"checkpoints/step{step:06d}")
    shutil.copytree(tmp_path / "saved", trained / "checkpoints/step000004")
    metrics.write_bytes(own)
    train(make_config(run_folder=str(trained)))
    assert [row["step"] for row in read_metrics(metrics)] == [1, 2, 3, 4, 5, 6, 6]
    describe_losses(trained)


def test_a_run_is_recognized_although_a_killed_start_repeated_the_step_of_a_damaged_checkpoint(
    make_config: MakeConfig, trained: Path
) -> None:
    newest = list_checkpoints(trained)[0]
    assert newest.name == "step000006"
    truncate(newest / "model.safetensors")
    path = trained / "metrics.jsonl"
    lines = path.read_text().splitlines()
    (number,) = [number for number, row in enumerate(read_metrics(path)) if is_step(row, 6)]
    repeated = list(read_metrics(path))[number] | {"timestamp": "2026-03-01T12:00:00Z"}
    lines[number] = json.dumps(with_crc(repeated))
    path.write_text("\n".join(lines) + "\n")
    assert train(make_config()) is Outcome.FINISHED
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5, 6, 6]


def is_step(row: dict, step: int) -> bool:
    return row["step"] == step and "loss" in row


def test_each_row_has_the_time_of_its_step_in_utc(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of its logging interval."""
    slow_down(monkeypatch, TrainingBatches, "of_step", step=5, seconds=1.1)
    config = make_config(logging__interval_steps=6)
    began = datetime.now(UTC).replace(microsecond=0)
    train(config)
    rows = list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))
    times = [datetime.fromisoformat(row["timestamp"]) for row in rows]
    assert all(row["timestamp"].endswith("Z") for row in rows)
    in_order = [began, *times, datetime.now(UTC)]
    assert in_order == sorted(in_order)
    assert times[4] - times[3] >= timedelta(seconds=1)


@pytest.mark.accept
@pytest.mark.parametrize(
    ("owner", "slow", "key", "logged_at"),
    [
        (TrainingBatches, "of_step", "data_wait_s", 4),
        (steps, "evaluate_step", "evaluation_s", 6),
        (steps, "save_checkpoint", "save_s", 6),
    ],
)
def test_waits_are_logged_with_the_next_speed(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    slow: str,
    key: str,
    logged_at: int,
) -> None:
    """An evaluation and a save of step 4 follow its row. A batch is drawn while the step before it
    computes, so that training waits for a part of the time that it takes."""
    slow_down(monkeypatch, owner, slow, step=4, seconds=2.0)
    config = make_config(
        logging__interval_steps=2,
        evaluation__interval_steps=2,
        checkpoint__interval_steps=2,
    )
    train(config)
    rows = list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))
    logged = {row["step"]: row for row in rows if "tokens_per_s" in row}
    assert list(logged) == [2, 4, 6]
    long_waits = {
        (step, name) for step, row in logged.items() for name in WAITS if row[name] >= 1.0
    }
    assert long_waits == {(logged_at, key)}


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_slow_evaluation_says_once_that_a_signal_acts_after_it(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    is_slow: bool,
) -> None:
    if is_slow:
        monkeypatch.setattr(steps, "SLOW_EVALUATION_S", 0.0)
    train(make_config(evaluation__interval_steps=2))
    said = [line for line in capsys.readouterr().err.splitlines() if "acts after it" in line]
    assert len(said) == is_slow
    assert all(line.startswith("step 2: the evaluation took ") for line in said)


@pytest.mark.parametrize("is_on", [False, True])
def test_layer_gradient_norms_are_in_the_rows_of_logging_intervals(
    make_config: MakeConfig, is_on: bool
) -> None:
    config = make_config(logging__layer_gradient_norms=is_on, logging__interval_steps=2)
    train(config)
    rows = list(read_metrics(Path(config.run_folder) / "metrics.jsonl"))
    steps = [row["step"] for row in rows if any("gradient_norm/" in name for name in row)]
    assert steps == ([2, 4, 6] if is_on else [])


def slow_down(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, step: int, seconds: float
) -> None:
    """Let the batch, the evaluation or the save of a step take longer."""
    really = getattr(owner, name)

    def slow(first: Any, current_step: int, *given: Any) -> Any:
        if current_step == step:
            time.sleep(seconds)
        return really(first, current_step, *given)

    monkeypatch.setattr(owner, name, slow)


def part(first: int, to: int, tokens: int, documents: int | None, loss: float = 2.0) -> dict:
    found = {"from": first, "to": to, "loss": loss, "bits_per_byte": 1.0, "num_tokens": tokens}
    return found if documents is None else found | {"num_documents": documents}


def table_of(folder: Path, *evaluations: list[dict], **others: list[dict]) -> str:
    metrics = Metrics(folder, 0, [])
    for step, parts in enumerate(evaluations, start=1):
        metrics.write_heldout(step, parts, 0.5, others)
    return describe_losses(folder)


def test_each_logged_loss_says_how_many_documents_and_tokens_it_is_over(tmp_path: Path) -> None:
    lines = table_of(tmp_path, [part(0, 16, 640, 40), part(16, 32, 640, 40)]).splitlines()
    assert lines[3].split()[:5] == ["16", "…", "31", "40", "640"]
    assert not any("different documents" in line or "other" in line for line in lines)


def test_ranges_of_different_documents_are_marked(tmp_path: Path) -> None:
    found = table_of(tmp_path, [part(0, 16, 640, 40), part(16, 32, 90, 6)])
    assert "rows are of different documents" in found


def test_steps_that_were_evaluated_on_other_text_are_marked(tmp_path: Path) -> None:
    found = table_of(tmp_path, [part(0, 16, 320, None)], [part(0, 16, 640, 40)])
    first, second = found.splitlines()[-3:-1]
    assert first.endswith("other")
    assert not second.endswith("other")


def test_losses_of_the_same_documents_are_shown_with_the_farthest_first(tmp_path: Path) -> None:
    by_place = [part(8, 16, 72, 9, 1.5) | {"standard_error": 0.25}]
    found = table_of(tmp_path, [part(0, 16, 640, 40)], by_place=by_place)
    (row,) = (line.split() for line in found.splitlines() if line.split()[:3] == ["8", "…", "15"])
    assert row[3:] == ["9", "72", "1.5000", "0.2500"]
    assert "documents 8 … 15" in found
