"""Checkpoints: killed at any moment, resumed, the final weights are bit for bit the same."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from olmo_sparsity.base import locks, retry
from olmo_sparsity.base import manifest as io
from olmo_sparsity.base.errors import ConfigError, DataError, UnreadableNowError, UserError
from olmo_sparsity.base.lock_owner import Owner
from olmo_sparsity.base.manifest import find_damage
from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.models.checkpoint_files import list_checkpoints, step_of
from olmo_sparsity.models.load import load_model
from olmo_sparsity.training.checkpoints.save import (
    CheckpointContent,
    Save,
    delete_checkpoints,
    publish,
)
from olmo_sparsity.training.checkpoints.save_steps import SaveSteps, SaveTime
from olmo_sparsity.training.checkpoints.writer import EXIT_DISK, SLOW_S, CheckpointWriter
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.optimizer import moments
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.run_folder.trainer_state import TrainerState
from olmo_sparsity.training.steps import Outcome
from tests.conftest import MakeConfig, data_section, left_by_a_killed_process, small_run
from tests.support import children
from tests.support.metrics import repeatable_rows
from tests.support.models import truncate

NUM_STEPS = 12


def settings_for(data_folder: Path, folder: Path) -> dict:
    settings = small_run(folder, data_section(data_folder))
    lengths = [{"tokens": 8, "until": NUM_STEPS // 2}, {"tokens": 16}]
    settings["training"] |= {"num_steps": NUM_STEPS, "length": lengths}
    settings["model"] |= {"residual_dropout": 0.1, "attention_dropout": 0.1}  # random state
    return settings


def content_of(step: int) -> CheckpointContent:
    """Return the content of a checkpoint without weights."""
    return CheckpointContent(TrainerState(step, 0, ""), lambda _: None, lambda _: [])


def run(settings: dict, disturb: Callable[[], None] | None = None) -> int | None:
    """Trains in a child; its exit code."""
    (code,) = children.start(settings, 1, disturb={0: disturb} if disturb else {}).wait()
    return code


def final_state(folder: Path) -> tuple[dict, dict, list]:
    last = list_checkpoints(folder)[0]
    assert last.name == f"step{NUM_STEPS:06d}"
    moments = load_file(last / "engine/moments-00000-of-00001.safetensors")
    return load_file(last / "model.safetensors"), moments, repeatable_rows(folder)


def assert_same_end(left: Path, right: Path) -> None:
    (weights, moments, rows), (weights_, moments_, rows_) = final_state(left), final_state(right)
    assert_equal(weights, weights_)
    assert_equal(moments, moments_)
    assert rows == rows_


def assert_equal(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.fixture(scope="module")
def undisturbed(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run(settings_for(data_folder, folder)) == 0
    return folder


def die_at_fsync(number: int) -> None:
    calls, really = 0, os.fsync

    def deadly(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        really(descriptor)

    os.fsync = deadly


def die_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def test_killed_at_random_moments_the_end_is_bit_identical(
    data_folder: Path, tmp_path: Path, undisturbed: Path
) -> None:
    folder = tmp_path / "killed"
    settings = settings_for(data_folder, folder)
    generator = random.Random(0)
    for _ in range(2):
        in_a_checkpoint = partial(die_at_fsync, generator.randint(8, 40))
        for blow in (in_a_checkpoint, partial(die_after, generator.uniform(0.2, 1.0))):
            code = run(settings, blow)
            assert code in (0, -signal.SIGKILL)
            if code == 0:  # finished before the blow: take its last checkpoint away
                shutil.rmtree(list_checkpoints(folder)[0])
            # So many deaths in so short a run are not the loop that is guarded against.
            (folder / "attempts.json").unlink(missing_ok=True)
    assert run(settings) == 0
    starts = json.loads((folder / "environment.json").read_text())
    assert len({start["resumed_at_step"] for start in starts}) > 2, "they went on from checkpoints"
    assert_same_end(folder, undisturbed)
    assert not list((folder / "checkpoints").glob("*.tmp"))


def test_a_run_that_dies_before_its_first_checkpoint_is_not_started_for_ever(
    data_folder: Path, tmp_path: Path
) -> None:
    """Each time after another step, all of which are logged."""
    settings = settings_for(data_folder, tmp_path / "dying")
    settings |= {"checkpoint": {"interval_steps": 1000}, "logging": {"interval_steps": 1}}
    for step in (3, 5, 4):
        assert run(settings, partial(children.signal_at_step, step, "SIGKILL")) == -signal.SIGKILL
    assert run(settings) == 2
    settings["checkpoint"]["max_starts"] = 4
    assert run(settings) == 0


def test_signals_save_leave_with_their_code_and_the_run_resumes(
    data_folder: Path, tmp_path: Path, undisturbed: Path
) -> None:
    folder = tmp_path / "asked"
    settings = settings_for(data_folder, folder)
    settings["checkpoint"] = {"interval_steps": 1000}  # only signals save
    for step, (more, name) in {3: (3, "SIGTERM"), 5: (2, "SIGINT"), 9: (4, "SIGUSR2")}.items():
        assert run(settings, partial(children.signal_at_step, more, name)) == 75
        assert list_checkpoints(folder)[0].name == f"step{step:06d}"
    assert run(settings) == 0
    assert_same_end(folder, undisturbed)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    make_config: MakeConfig, trained: Path, damage: str, capsys: pytest.CaptureFixture
) -> None:
    last, before = list_checkpoints(trained)
    weights = last / "model.safetensors"
    path = last / "manifest.json" if damage == "manifest" else weights
    whole, trained_to = path.read_bytes(), weights.read_bytes()
    if damage == "flip":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 2])
    assert train(make_config()) is Outcome.FINISHED
    shown = capsys.readouterr().err
    assert f"checkpoint {last} is damaged" in shown
    assert path.name in shown
    assert f"resuming from {before}" in shown
    assert weights.read_bytes() == trained_to, "the same step was trained again"
    assert find_damage(last) is None


def damage(run_folder: Path) -> list[Path]:
    """All checkpoints, cut short."""
    checkpoints = list_checkpoints(run_folder)
    for checkpoint_folder in checkpoints:
        truncate(checkpoint_folder / "model.safetensors")
    return checkpoints


def content(*paths: Path) -> dict[Path, bytes]:
    files = (file for path in paths for file in ([path] if path.is_file() else path.rglob("*")))
    return {file: file.read_bytes() for file in files if file.is_file()}


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(
    make_config: MakeConfig, trained: Path
) -> None:
    damage(trained)
    before = content(trained / "checkpoints", trained / "metrics.jsonl")
    with pytest.raises(DataError, match=r"no checkpoint .* intact.*truncated.*--start_over=true"):
        train(make_config())
    assert content(trained / "checkpoints", trained / "metrics.jsonl") == before


@pytest.mark.parametrize("left", ["attempts.json", "environment.json", "metrics.jsonl"])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(
    make_config: MakeConfig, trained: Path, left: str
) -> None:
    """As one of its files shows, also for a run of an earlier version, which wrote no attempts."""
    train(make_config())
    shutil.rmtree(trained / "checkpoints")
    for name in {"attempts.json", "environment.json"} - {left}:
        (trained / name).unlink()
    logged = (trained / "metrics.jsonl").read_bytes()
    with pytest.raises(DataError, match=r"has (saved step 6|logged 6 steps).*--start_over=true"):
        train(make_config())
    assert (trained / "metrics.jsonl").read_bytes() == logged


def test_a_run_that_starts_over_keeps_what_was_there_and_then_resumes(
    make_config: MakeConfig, trained: Path, capsys: pytest.CaptureFixture
) -> None:
    checkpoints = damage(trained)
    before = content(trained / "checkpoints", trained / "metrics.jsonl")
    assert train(make_config(start_over=True)) is Outcome.FINISHED
    kept = trained / "set_aside_1"
    after = content(kept / "checkpoints", kept / "metrics.jsonl")
    assert list(after.values()) == list(before.values())
    assert f"what is left is in {kept}" in capsys.readouterr().err
    assert [find_damage(path) for path in checkpoints] == [None, None]
    # The flag may stay in the script of a job that is requeued.
    assert train(make_config(start_over=True)) is Outcome.FINISHED
    assert f"resuming from {checkpoints[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("what", ["sha256_of", "read_bounded", "listdir"])
@pytest.mark.parametrize("start_over", [False, True])
def test_checkpoints_that_cannot_be_read_now_are_not_taken_for_damaged(
    make_config: MakeConfig,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    what: str,
    start_over: bool,
) -> None:
    """Nor is an earlier one resumed in place of the newest."""
    before = content(trained / "checkpoints", trained / "metrics.jsonl")
    owner = os if what == "listdir" else io
    really = getattr(owner, what)

    def fail(path: Path, *given: Any) -> Any:
        is_newest = "step000006" in str(path) or what == "listdir"
        if "checkpoints" in str(path) and is_newest:
            raise OSError(number, os.strerror(number), str(path))
        return really(path, *given)

    monkeypatch.setattr(owner, what, fail)
    remedy = rf"cannot be read now \({os.strerror(number)}\).*restore access"
    with pytest.raises(UnreadableNowError, match=remedy) as error:
        train(make_config(start_over=start_over))
    assert error.value.exit_code == EXIT_DISK
    monkeypatch.undo()
    assert content(trained / "checkpoints", trained / "metrics.jsonl") == before


def test_a_damaged_later_checkpoint_is_none_of_those_kept(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nor can a file of an old one be removed while a process on another machine reads it.
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    config = make_config(checkpoint__keep=1)
    damaged = Path(config.run_folder) / "checkpoints/step000008"
    damaged.mkdir(parents=True)
    with CheckpointWriter(Path(config.run_folder), config.checkpoint, Processes()) as writer:
        for step in (4, 6):
            writer.save(content_of(step))
            writer.wait()
    saved = damaged.with_name("step000006")
    assert list_checkpoints(config.run_folder) == [damaged, saved]
    assert find_damage(saved) is None


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"checkpoint__keep_every_steps": 3}, [9, 8, 6, 3]),
        ({"checkpoint__keep_steps": [1, 5]}, [9, 8, 5, 1]),
        ({"checkpoint__keep_powers_of_two": True}, [9, 8, 4, 2, 1]),
        ({"checkpoint__keep_every_steps": 3, "checkpoint__keep_steps": [3, 5]}, [9, 8, 6, 5, 3]),
    ],
)
def test_some_checkpoints_stay_for_ever(
    make_config: MakeConfig, settings: dict, steps: list[int]
) -> None:
    config = make_config(training__num_steps=9, checkpoint__interval_steps=2, **settings)
    train(config)
    assert [step_of(path) for path in list_checkpoints(config.run_folder)] == steps
    staying = [step for step in range(1, 10) if config.checkpoint.stays(step)]
    for after in range(9):
        count = len([step for step in staying if step > after])
        assert config.checkpoint.num_staying(after, 9) == count


# --- written while training goes on ---------------------------------------------------------------


def state_of(engine: Engine) -> tuple[dict, dict]:
    weights = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    pieces = engine.moments()
    return weights, {f"{k}/{p.parameter}": m.clone() for p in pieces for k, m in p.moments.items()}


def test_a_checkpoint_holds_its_step_while_later_steps_are_taken(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(checkpoint__interval_steps=None, checkpoint__keep_steps=[2])
    states: list[tuple[dict, dict]] = []
    gone_on = threading.Event()
    step, write = Engine.step, moments.write_tensors

    def watched(self: Engine, *given: Any) -> Any:
        found = step(self, *given)
        states.append(state_of(self))
        if len(states) == 5:
            gone_on.set()
        return found

    def held_back(*given: Any, **named: Any) -> None:
        assert gone_on.wait(30), "training waits for the writer"
        write(*given, **named)

    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr(moments, "write_tensors", held_back)
    train(config)
    for folder in list_checkpoints(config.run_folder):
        weights, optimizer = states[step_of(folder) - 1]
        saved = load_file(folder / "model.safetensors")
        assert_equal(saved, {name: weights[name] for name in saved})
        assert_equal(load_file(folder / "engine/moments-00000-of-00001.safetensors"), optimizer)
    assert len(list_checkpoints(config.run_folder)) == 2
    name = "transformer.wte.weight"
    assert not torch.equal(states[1][0][name], states[4][0][name]), "later steps change it"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that could not write tries again at once."""
    monkeypatch.setattr(retry, "RETRY_AFTER_S", (0.0, 0.0))


TRIES = 3


def fail_to_publish(
    monkeypatch: pytest.MonkeyPatch, number: int, fails: Callable[[int, int], bool]
) -> None:
    """The disk gives this error, if `fails` of the step and of the number of the try."""
    tries: list[int] = []

    def failing(partial: Path, final: Path) -> None:
        step = step_of(final)
        tries.append(step)
        if fails(step, tries.count(step)):
            raise OSError(number, os.strerror(number))
        publish(partial, final)

    monkeypatch.setattr("olmo_sparsity.training.checkpoints.save.publish", failing)


def content_of_checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_a_run_whose_folder_was_taken_over_writes_nothing_more_there(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock notices it, and interrupts this process, which would save on a signal."""
    monkeypatch.setattr(locks, "REFRESH_S", 0.1)
    config = make_config(checkpoint__interval_steps=None)
    folder = Path(config.run_folder)
    step, num_begun = Engine.step, 0

    def taken_over(self: Engine, *given: Any) -> Any:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 3:
            (folder / "lock").write_text(json.dumps(vars(Owner(host="elsewhere"))))
            time.sleep(1)  # until the lock is looked at
        return step(self, *given)

    monkeypatch.setattr(Engine, "step", taken_over)
    with pytest.raises(UserError, match=r"taken over by process .* on elsewhere"):
        train(config)
    assert list((folder / "checkpoints").iterdir()) == []
    assert not metrics_of(config).exists()
    assert (folder / "lock").exists(), "it is that of the other process"


@pytest.mark.usefixtures("impatient")
def test_a_disk_that_is_away_for_a_moment_costs_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    fail_to_publish(monkeypatch, errno.ESTALE, lambda step, number: number < TRIES)
    assert train(config) is Outcome.FINISHED
    assert content_of_checkpoints(Path(config.run_folder)) == {"step000004", "step000006"}
    assert not any("failed_saves" in row for row in read_metrics(metrics_of(config)))


def metrics_of(config: Any) -> Path:
    return Path(config.run_folder) / "metrics.jsonl"


@pytest.mark.usefixtures("impatient")
def test_a_save_that_fails_leaves_the_one_before_and_training_goes_on(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config = make_config(checkpoint__keep=1)
    before: set[str] = set()

    def fails(step: int, number: int) -> bool:
        if step == 4:
            before.update(content_of_checkpoints(Path(config.run_folder)))
        return step == 4

    fail_to_publish(monkeypatch, errno.EIO, fails)
    assert train(config) is Outcome.FINISHED
    assert "step000002" in before
    assert content_of_checkpoints(Path(config.run_folder)) == {"step000006"}
    shown = capsys.readouterr().err
    assert "NOT SAVED: " in shown
    assert "step000004 cannot be written: Input/output error" in shown
    rows = list(read_metrics(metrics_of(config)))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 6], "no step is lost"
    assert rows[-2].get("failed_saves", 0) in (0, 1)


@pytest.mark.usefixtures("impatient")
def test_a_folder_that_cannot_be_created_for_a_moment_costs_no_save(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Nor the run: its last save would fail three times in a row at once."""
    make_folder = Save._make_folder
    num_tries = 0

    def fail_twice(save: Save) -> None:
        nonlocal num_tries
        if step_of(save.final_folder) == 6:
            num_tries += 1
            if num_tries < TRIES:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        make_folder(save)

    monkeypatch.setattr(Save, "_make_folder", fail_twice)
    config = make_config()
    assert train(config) is Outcome.FINISHED
    assert num_tries == TRIES
    assert "NOT SAVED" not in capsys.readouterr().err
    assert content_of_checkpoints(Path(config.run_folder)) == {"step000004", "step000006"}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ESTALE, 74), (errno.ENOSPC, 74), (errno.EDQUOT, 74), (errno.EROFS, 2)],
)
def test_a_disk_that_takes_no_checkpoint_ends_the_run_and_the_one_before_stays(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    config = make_config(model__layer_norm_with_affine=True, checkpoint__export_at_end=True)
    fail_to_publish(monkeypatch, number, lambda step, _: step == 6)
    words = rf"step000006.* cannot be written: {os.strerror(number)}.*3 saves in a row"
    with pytest.raises(UserError, match=words) as ended:
        train(config)
    assert ended.value.exit_code == code
    folder = Path(config.run_folder)
    assert content_of_checkpoints(folder) >= {"step000004"}
    assert not (folder / "huggingface").exists()
    monkeypatch.undo()
    assert train(config) is Outcome.FINISHED


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_takes_a_checkpoint_after_the_oldest_is_deleted(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    number: int,
) -> None:
    config = make_config(checkpoint__keep=3)
    folder = Path(config.run_folder)
    fail_to_publish(
        monkeypatch,
        number,
        lambda step, _: step == 6 and "step000002" in content_of_checkpoints(folder),
    )
    assert train(config) is Outcome.FINISHED
    assert content_of_checkpoints(folder) == {"step000004", "step000006"}
    shown = capsys.readouterr().err
    assert re.search("step000006 cannot be written.*: deleted .*step000002 to make room", shown)
    assert "NOT SAVED" not in shown


@pytest.mark.usefixtures("impatient")
def test_on_a_full_disk_what_is_set_aside_is_deleted_before_a_checkpoint(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config = make_config(checkpoint__keep=3)
    folder = Path(config.run_folder)
    set_aside = folder / "checkpoints/step000001.set_aside"
    set_aside.mkdir(parents=True)
    fail_to_publish(monkeypatch, errno.ENOSPC, lambda step, _: step == 6 and set_aside.exists())
    assert train(config) is Outcome.FINISHED
    assert content_of_checkpoints(folder) == {"step000002", "step000004", "step000006"}
    assert f"deleted {set_aside} to make room" in capsys.readouterr().err


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("number", "keep_steps"), [(errno.EDQUOT, [2]), (errno.EDQUOT, [2, 4]), (errno.EIO, [])]
)
def test_neither_a_checkpoint_that_stays_nor_the_newest_is_deleted_for_another(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, number: int, keep_steps: list[int]
) -> None:
    config = make_config(checkpoint__keep=3, checkpoint__keep_steps=keep_steps)
    fail_to_publish(monkeypatch, number, lambda step, _: step == 6)
    with pytest.raises(UserError, match="3 saves in a row"):
        train(config)
    assert content_of_checkpoints(Path(config.run_folder)) == {"step000002", "step000004"}


@pytest.mark.usefixtures("impatient")
def test_a_rename_that_was_not_synced_deletes_no_whole_checkpoint(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second try finds the checkpoint under its final name."""

    def renamed_and_failed(partial: Path, final: Path) -> None:
        publish(partial, final)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("olmo_sparsity.training.checkpoints.save.publish", renamed_and_failed)
    config = make_config()
    assert train(config) is Outcome.FINISHED
    assert content_of_checkpoints(Path(config.run_folder)) == {"step000004", "step000006"}
    assert find_damage(list_checkpoints(config.run_folder)[0]) is None


def test_what_cannot_be_removed_of_a_killed_save_does_not_spoil_the_next(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, a file that a process still has open stays."""
    config = make_config()
    stuck = Path(config.run_folder) / "checkpoints/step000002.tmp"
    stuck.mkdir(parents=True)
    (stuck / "0.written").write_text("{}")
    rmtree = shutil.rmtree

    def removes(path: Path, ignore_errors: bool = False) -> None:
        if path != stuck:
            rmtree(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", removes)
    with CheckpointWriter(Path(config.run_folder), config.checkpoint, Processes()) as writer:
        writer.save(content_of(2))
        assert writer.wait()
    (saved,) = list_checkpoints(config.run_folder)
    assert find_damage(saved) is None
    assert not (saved / "0.written").exists()


def test_a_process_of_an_earlier_start_writes_into_no_later_save(tmp_path: Path) -> None:
    """As one on a node that SLURM has given up, and that comes back."""

    def save_of(start: str) -> Save:
        def write_part(folder: Path) -> list[Path]:
            path = folder / "weights"
            path.write_text(start)
            return [path]

        content = CheckpointContent(TrainerState(2, 0, ""), lambda _: None, write_part)
        return Save(tmp_path, content, Processes(), None, threading.Event())

    earlier = save_of("earlier")
    later = save_of("later")
    earlier.create_folder()
    later.create_folder()
    later.write_own_part()
    earlier.write_own_part()
    later.complete()
    (saved,) = list_checkpoints(tmp_path)
    assert (saved / "weights").read_text() == "later"


def test_a_checkpoint_is_deleted_though_an_earlier_one_of_its_step_is_stuck(tmp_path: Path) -> None:
    """On NFS, a file that a process still has open stays."""
    checkpoint = tmp_path / "step000002"
    for folder in (checkpoint, checkpoint.with_suffix(".tmp")):
        folder.mkdir()
        (folder / "weights").touch()
    delete_checkpoints([checkpoint])
    assert not checkpoint.exists()


def test_another_error_waits_for_the_writer_and_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def leave() -> None:
        with CheckpointWriter(tmp_path, CheckpointConfig(), Processes()) as writer:
            writer.save(CheckpointContent(TrainerState(1, 1, ""), fail, lambda folder: []))
            raise UserError("another")

    with pytest.raises(UserError, match="another"):
        leave()
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert "step000001 cannot be written: No space" in last_line
    assert "trying again" not in last_line
    assert list((tmp_path / "checkpoints").iterdir()) == []


class Watch:
    """A clock that a test sets."""

    now_s = 100.0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr("time.perf_counter", lambda: watch.now_s)
    return watch


def auto_saves() -> SaveSteps:
    """Those of a run of 5,000 steps."""
    return SaveSteps(CheckpointConfig(interval_steps=0, keep_steps=[3]), 0, 5000)


def save_after(
    saves: SaveSteps, watch: Watch, step: int, step_s: float, waited_s: float, copied_s: float
) -> str:
    """Take the steps since the last save, and save. Return what the run says."""
    num_steps = step - saves.timed_from_step
    watch.now_s += num_steps * step_s + waited_s + copied_s
    return saves.after_save(step, SaveTime(waited_s, copied_s), Processes())


def test_auto_saves_every_ten_minutes_or_less_often_where_copies_cost_more_than_a_fiftieth(
    watch: Watch,
) -> None:
    saves = auto_saves()
    assert [step for step in range(1, 50) if saves.due(step)][:2] == [3, 10]
    said = save_after(saves, watch, 10, step_s=1.5, waited_s=0, copied_s=18)
    assert saves.next_step == 10 + 600, "every 15 minutes"
    assert "in 600 steps, about 15 min" in said
    assert save_after(saves, watch, 610, step_s=1.6, waited_s=0, copied_s=18) == "", "no news"
    assert saves.next_step == 610 + 562
    assert saves.due(5000)


def test_a_single_slow_copy_postpones_no_later_save(watch: Watch) -> None:
    saves = auto_saves()
    saves.due(1)
    save_after(saves, watch, 10, step_s=1.0, waited_s=0, copied_s=2)
    assert saves.next_step == 610
    save_after(saves, watch, 610, step_s=1.0, waited_s=0, copied_s=120)
    assert saves.next_step == 1210, "after 10 minutes, not 100"


def test_a_wait_for_the_last_checkpoint_postpones_the_next_one_by_no_more_than_it_took(
    watch: Watch,
) -> None:
    saves = auto_saves()
    saves.due(1)
    save_after(saves, watch, 10, step_s=1.0, waited_s=0, copied_s=2)
    save_after(saves, watch, 610, step_s=1.0, waited_s=42, copied_s=2)
    assert saves.next_step == 610 + 642
    save_after(saves, watch, 1252, step_s=1.0, waited_s=0, copied_s=2)
    assert saves.next_step == 1252 + 600


def test_auto_never_waits_more_than_half_an_hour_and_says_each_time_that_it_is_long(
    watch: Watch,
) -> None:
    saves = auto_saves()
    saves.due(1)
    for step in (10, 1810):
        said = save_after(saves, watch, step, step_s=1.0, waited_s=0, copied_s=300)
        assert saves.next_step == step + 1800
        assert "the next checkpoint is in 1,800 steps, about 30 min" in said


def test_auto_is_a_setting(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SaveSteps, "USUAL_INTERVAL_S", 0.0)
    monkeypatch.setattr(SaveSteps, "LARGEST_COPY_SHARE", 1e9)
    config = make_config(checkpoint__interval_steps="auto", training__num_steps=12)
    train(config)
    assert [step_of(path) for path in list_checkpoints(config.run_folder)] == [12, 11]


@pytest.mark.parametrize("took_s", [None, 0.0, SLOW_S + 100])
def test_only_the_first_slow_save_says_how_long_it_took(
    took_s: float | None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with CheckpointWriter(tmp_path, CheckpointConfig(), Processes()) as writer:
        for step in (1, 2):
            begun = None if took_s is None else time.monotonic() - took_s
            writer.save(content_of(step), begun)
            writer.wait()
    said = re.findall(r"took (\d+) s", capsys.readouterr().err)
    assert len(said) == (took_s is not None and took_s > SLOW_S)
    assert all(took_s <= float(seconds) < took_s + 60 for seconds in said)


def test_a_checkpoint_of_before_goes_on(make_config: MakeConfig, tmp_path: Path) -> None:
    """Step 2 of a run of 6, as version 0.1.0 wrote it."""
    ends = []
    for name in ("whole", "from before"):
        folder = tmp_path / name
        config = make_config(
            run_folder=str(folder), model__d_model=8, model__n_layers=1, model__residual_dropout=0.1
        )
        if name == "from before":
            saved = folder / "checkpoints/step000002"
            shutil.unpack_archive(Path(__file__).with_name("checkpoint_of_before.zip"), saved)
            shutil.copy(saved / "config.yaml", folder)
        train(config)
        last = list_checkpoints(folder)[0]
        moments = load_file(last / "engine/moments-00000-of-00001.safetensors")
        ends.append(load_file(last / "model.safetensors") | moments)
    # To the bit on the machine that wrote it; others round otherwise.
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-7)


# --- branches -------------------------------------------------------------------------------------


@pytest.fixture
def trunk(make_config: MakeConfig, tmp_path: Path) -> Path:
    """Step 4 of a run of 6, kept."""
    config = make_config(run_folder=str(tmp_path / "trunk"), checkpoint__keep_steps=[4])
    train(config)
    return tmp_path / "trunk/checkpoints/step000004"


def test_a_branch_goes_on_as_its_trunk_did(
    make_config: MakeConfig, tmp_path: Path, trunk: Path
) -> None:
    same = make_config(run_folder=str(tmp_path / "same"), branch_from=str(trunk))
    train(same)
    ends = trunk.with_name("step000006"), list_checkpoints(same.run_folder)[0]
    assert_equal(*(load_file(folder / "model.safetensors") for folder in ends))
    rows = list(read_metrics(tmp_path / "same/metrics.jsonl"))
    assert [row["step"] for row in rows] == [5, 6, 6]

    other = make_config(
        run_folder=str(tmp_path / "other"),
        optimizer__learning_rate=1e-3,
        positions__target_length=48,
        training__num_steps=8,
    )
    train(other)
    rows = list(read_metrics(tmp_path / "other/metrics.jsonl"))
    assert [row["step"] for row in rows] == [5, 6, 7, 8, 8]
    shutil.rmtree(list_checkpoints(other.run_folder)[0])
    shutil.rmtree(trunk)
    assert train(other) is Outcome.FINISHED, "from its own checkpoint"


def test_a_decay_from_a_stable_run_is_that_of_the_run_planned_so(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    wsd = {"optimizer__schedule": "wsd", "optimizer__warmup_steps": 2}
    stable, planned, branch = (tmp_path / name for name in ("stable", "planned", "branch"))
    short = {"training__num_steps": 8, "optimizer__cooldown_steps": 3}
    long = {"training__num_steps": 12, "optimizer__cooldown_steps": 2}
    train(make_config(run_folder=str(stable), checkpoint__keep_steps=[5], **wsd, **long))
    train(make_config(run_folder=str(planned), **short))
    at = stable / "checkpoints/step000005"
    train(make_config(run_folder=str(branch), branch_from=str(at)))
    for file in ("model.safetensors", "engine/moments-00000-of-00001.safetensors"):
        ends = (load_file(folder / "checkpoints/step000008" / file) for folder in (planned, branch))
        assert_equal(*ends)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 4}, r"was trained with seed=3 \(now 4\)"),
        ({"training__batch_size": 2}, r"training\.batch_size=4 \(now 2\)"),
        ({"model__n_layers": 1}, r"model\.n_layers=2 \(now 1\)"),
        ({"training__num_steps": 4}, r"has 4 steps; raise training\.num_steps=4"),
        ({"init_from": "runs/x"}, r"exclude each other"),
        ({"branch_from": "runs/x"}, "branch_from=runs/x must be an intact checkpoint"),
    ],
)
def test_what_a_branch_cannot_be_is_refused(
    make_config: MakeConfig, tmp_path: Path, trunk: Path, settings: dict, message: str
) -> None:
    given = {"run_folder": str(tmp_path / "branch"), "branch_from": str(trunk)} | settings
    with pytest.raises(ConfigError, match=message):
        train(make_config(checkpoint__keep_steps=None, **given))


@pytest.mark.parametrize(
    ("settings", "can_branch"),
    [({"training__num_steps": 9}, True), ({"optimizer__learning_rate": 1e-4}, True),
     ({"model__n_layers": 1}, False), ({"seed": 4}, False)],
)  # fmt: skip
def test_a_refused_change_names_branch_from_where_a_branch_may_have_it(
    make_config: MakeConfig, trunk: Path, settings: dict, can_branch: bool
) -> None:
    with pytest.raises(ConfigError, match="name a new run_folder") as refused:
        train(make_config(**settings))
    last = trunk.with_name("step000006")
    assert (f"--branch_from={last}" in str(refused.value)) == can_branch


# --- export at the end ----------------------------------------------------------------------------


def test_a_run_that_cannot_be_exported_at_its_end_is_refused_at_its_start(
    make_config: MakeConfig,
) -> None:
    config = make_config(checkpoint__export_at_end=True, model__query_scale_length=40.0)
    with pytest.raises(ConfigError, match="query_scale_length=40"):
        train(config)
    assert list_checkpoints(config.run_folder) == []


def test_a_run_exports_itself_at_its_end(make_config: MakeConfig) -> None:
    config = make_config(
        model__layer_norm_with_affine=True, checkpoint__export_at_end=True, training__num_steps=2
    )
    train(config)
    folder = Path(config.run_folder)
    ours, theirs = (
        load_model(str(path), device="cpu").model for path in (folder, folder / "huggingface")
    )
    tokens_BL, positions_BL = torch.arange(12)[None], torch.arange(12)[None]
    torch.testing.assert_close(ours(tokens_BL, positions_BL), theirs(tokens_BL, positions_BL))
    shutil.rmtree(folder / "huggingface")
    partial = left_by_a_killed_process(folder / "huggingface")
    train(config)
    assert (folder / "huggingface/config.json").is_file()
    assert not partial.exists()
