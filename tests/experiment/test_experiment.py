"""Experiments: models that are trained, measured and drawn, here or on SLURM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from olmo_sparsity.analysis.results.stored_results import read_results
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.launch import EXIT_STOPPED
from olmo_sparsity.base.lock_owner import Owner
from olmo_sparsity.base.locks import LOCK, STALE_S
from olmo_sparsity.command.cli import EXIT_BAD_INPUT, main
from olmo_sparsity.config.run import save_config
from olmo_sparsity.experiment import here
from olmo_sparsity.experiment.agreement_of_seeds import describe_agreement
from olmo_sparsity.experiment.child_processes import Command, Ending
from olmo_sparsity.experiment.comparisons import comparisons_of
from olmo_sparsity.experiment.file import read_experiment, saved_experiment
from olmo_sparsity.experiment.jobs import check_no_other_work, format_states, jobs_of
from olmo_sparsity.experiment.measurement_job import MeasurementJob
from olmo_sparsity.experiment.slurm_flags import SlurmFlags
from olmo_sparsity.experiment.training_job import TrainingJob
from olmo_sparsity.training.dry_run import describe_run
from olmo_sparsity.training.estimate.cost import cost_of_run
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.host import disk_of
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.steps import Outcome
from tests.conftest import until

MakeGrid = Callable[..., str]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def make_grid(run_dict: dict, tmp_path: Path) -> MakeGrid:
    def make(**sections: object) -> str:
        run_dict.pop("run_folder", None)
        (tmp_path / "tiny.yaml").write_text(json.dumps(run_dict))
        grid = {"folder": str(tmp_path / "runs"), "models": ["tiny.yaml"], **sections}
        (tmp_path / "grid.yaml").write_text(json.dumps(grid))
        return str(tmp_path / "grid.yaml")

    return make


# --- from the grid to runs ------------------------------------------------------------------------


def test_every_config_times_every_choice(make_grid: MakeGrid, tmp_path: Path) -> None:
    path = make_grid(
        grid={
            "positions": {
                "pose": {},
                "rope": {"positions.scheme": "contiguous", "positions.target_length": None},
            },
            "optimizer.learning_rate": [1e-3],  # not a choice: it names nothing
            "seed": [1, 2],
            "init_from": ["runs/{positions}_{seed}_{other}"],
        }
    )
    runs = read_experiment(path, ["--training.num_steps=9"]).models
    names = [f"tiny_{positions}_seed{seed}" for positions in ("pose", "rope") for seed in (1, 2)]
    assert [run.name for run in runs] == names
    assert runs[2].overrides == [
        "--positions.scheme=contiguous",
        "--positions.target_length=null",
        "--optimizer.learning_rate=0.001",
        "--seed=1",
        "--init_from=runs/rope_seed1_{other}",
        "--training.num_steps=9",
        f"--run_folder={tmp_path}/runs/tiny_rope_seed1",
    ]
    assert {run.num_steps for run in runs} == {9}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"grids": {}}, "did you mean 'grid'"),
        ({"models": []}, "needs `folder` and `models`"),
        ({"models": ["tiny.yaml", "tiny.yaml"]}, "2 models would be called tiny"),
        (
            {"grid": {"optimizer.learning_rate": ["3e-5", 3.0e-5]}},
            "have the same settings; leave out one choice of the grid",
        ),
        ({"grid": {"seed": 3}}, "grid.seed must be a list"),
        ({"grid": {"seed": []}}, "grid.seed must be a list"),
        ({"grid": {"sizes": {"small": 3}}}, "grid.sizes must be a list"),
        ({"grid": {"sead": [1, 2]}}, "did you mean 'seed'"),
        ({"grid": {"run_folder": ["a", "b"]}}, "grid.run_folder has no effect"),
        (
            {"grid": {"seed": [1, 2], "size": {"a": {"seed": 3}}}},
            "grid.seed and grid.size set seed",
        ),
        ({"measure": {"lnog": 32}}, "unknown key 'measure.lnog'; did you mean 'long'"),
        ({"measure": {"long": 24, "steps": [7]}}, "has training.num_steps=6; lower"),
        ({"measure": {"long": 65, "ks": 1}}, "has model.max_sequence_length=64"),
        ({"measure": {"long": 24, "models": ["tony"]}}, "measure.models=tony is none of tiny"),
        ({"measure": {"long": 24, "short": 24}}, "short=24 must be below long=24"),
        (
            {"figure": {"labels": {"tiny": "a", "isolated": "b", "tony": "c"}}},
            "figure.labels has tony, which is no model; they are tiny",
        ),
    ],
    ids=str,
)
def test_a_grid_that_cannot_be(make_grid: MakeGrid, sections: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_experiment(make_grid(**sections))
    assert expected in str(error.value)


@pytest.mark.parametrize("word", ["--seed=9", "--run_folder=x", "--optimizer={}"])
def test_an_override_of_what_the_grid_sets_is_refused(make_grid: MakeGrid, word: str) -> None:
    """It would give several runs of one model."""
    path = make_grid(grid={"seed": [1, 2], "optimizer.learning_rate": [1e-3, 1e-2]})
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        read_experiment(path, [word])


MEASURE = {
    "steps": [2, "last"],
    "long": [12, 24],
    "short": 8,
    "stride": 8,
    "ks": [1, 2],
    "draws": 1,
    "selectors": ["add_one", "random"],
    "max_documents": 8,
    "max_targets": 2,
    "min_gap": 0.0,
    "halves": 0,
}


def test_each_measurement_waits_for_its_model_and_for_what_chooses_its_targets(
    make_grid: MakeGrid,
) -> None:
    path = make_grid(grid={"seed": [1, 2]}, measure=MEASURE)
    jobs = {job.name: job for job in jobs_of(read_experiment(path))}
    needs = {name: job.needs for name, job in jobs.items()}
    assert needs["tiny_seed1-last-24"] == ("tiny_seed1",)
    assert needs["tiny_seed1-2-24"] == ("tiny_seed1", "tiny_seed1-last-24")
    assert needs["tiny_seed2-last-12"] == ("tiny_seed2", "tiny_seed1-last-12")
    assert needs["tiny_seed2-last-24-transfer"] == ("tiny_seed2", "tiny_seed1-last-24")
    assert needs["figure"] == tuple(name for name in jobs if "-" in name)


def test_a_model_keeps_the_checkpoints_that_are_measured(make_grid: MakeGrid) -> None:
    (model,) = read_experiment(make_grid(measure=MEASURE)).models
    assert "--checkpoint.keep_steps=[2]" in model.overrides


def test_only_the_measurement_that_chooses_targets_has_the_options_of_choosing(
    make_grid: MakeGrid,
) -> None:
    path = make_grid(grid={"seed": [1, 2]}, measure=MEASURE)
    for measurement in read_experiment(path).measurements:
        is_chooser = measurement.targets_of is None and measurement.choices_of is None
        assert ("max_targets" in measurement.options) == is_chooser
        assert ("min_gap" in measurement.options) == is_chooser


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_field": "question"}, "max_targets, min_gap cannot be combined with prompt_field"),
        ({"share": "all"}, "min_gap=0 has no effect"),
    ],
)
def test_options_of_measure_that_exclude_each_other_are_refused_before_a_model_is_trained(
    make_grid: MakeGrid, tmp_path: Path, capsys: pytest.CaptureFixture, options: dict, message: str
) -> None:
    assert main(["experiment", make_grid(measure=MEASURE | options)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_with_own_targets_no_measurement_waits_for_another(make_grid: MakeGrid) -> None:
    jobs = jobs_of(read_experiment(make_grid(measure=MEASURE | {"targets": "own"})))
    assert {len(job.needs) for job in jobs if job.kind == "measure"} == {1}


def test_a_model_that_starts_from_another_waits_for_it(make_grid: MakeGrid, tmp_path: Path) -> None:
    origin = f"{tmp_path}/runs/tiny_first"
    second = {"init_from": origin}
    path = make_grid(grid={"part": {"second": second, "first": {}}})
    assert [(job.name, job.needs) for job in jobs_of(read_experiment(path))] == [
        ("tiny_first", ()),
        ("tiny_second", ("tiny_first",)),
    ]


def test_a_measurement_of_a_model_that_failed_has_its_reason(make_grid: MakeGrid) -> None:
    jobs = {job.name: job for job in jobs_of(read_experiment(make_grid(measure=MEASURE)))}
    measurement = jobs["tiny-last-24"]
    assert measurement.reason_to_skip(jobs) == "trained to step 0 of 6"
    with pytest.raises(ValueError, match="nan"), jobs["tiny"].recording():
        raise ValueError("step 3: loss nan")
    assert jobs["tiny"].state().name == "failed"
    assert measurement.reason_to_skip(jobs) == "its training failed: step 3: loss nan"


def test_a_measurement_is_running_while_one_of_its_processes_lives(make_grid: MakeGrid) -> None:
    jobs = {job.name: job for job in jobs_of(read_experiment(make_grid(measure=MEASURE)))}
    job = jobs["tiny-last-24"]
    assert isinstance(job, MeasurementJob)
    assert job.state().name == "waiting"
    with job.recording_process("0-0"):
        assert job.state().name == "running"
        lock = job.locks / "0-0" / LOCK
        os.utime(lock, (time.time() - STALE_S - 60,) * 2)
        assert job.state().name == "failed"
        assert job.state().detail.startswith("died on ")
    assert job.state().name == "waiting"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "done"),
        ({"batch_tokens": 512}, "done"),
        ({"seed": 5}, "seed=None (now 5)"),
        ({"ks": [1]}, "ks=[1, 2] (now [1])"),
        ({"max_documents": 6}, "max_documents=8 (now 6)"),
        ({"text": "builtin:python"}, "text=None (now builtin:python)"),
    ],
    ids=str,
)
def test_a_measurement_with_other_options_is_not_done(
    make_grid: MakeGrid, changed: dict, expected: str
) -> None:
    def job_of(path: str) -> MeasurementJob:
        (job,) = (job for job in jobs_of(read_experiment(path)) if job.name == "tiny-last-24")
        assert isinstance(job, MeasurementJob)
        return job

    with job_of(make_grid(measure=MEASURE)).recording_process("0-0"):
        folder = job_of(make_grid(measure=MEASURE)).results
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    state = job_of(make_grid(measure=MEASURE | changed)).state()
    assert expected in (state.name, state.detail.partition(" with ")[2].partition(";")[0])


def test_folders_of_other_work_are_refused_before_anything_is_priced_submitted_or_run(
    make_grid: MakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pretend_slurm(tmp_path, monkeypatch)
    path = make_grid(measure=MEASURE)
    (run,) = read_experiment(path).models
    run.folder.mkdir(parents=True)
    save_config(run.settings, run.folder / "config.yaml")
    # A start that ended before its first step has nothing to lose.
    check_no_other_work(jobs_of(read_experiment(path, ["--seed=9"])))
    (run.folder / "metrics.jsonl").touch()
    for words in (["--dry-run"], ["--slurm"], []):
        assert main(["experiment", path, "--seed=9", *words]) == EXIT_BAD_INPUT
        message = capsys.readouterr().err
        assert f"tiny: {run.folder} holds work with seed=3 (now 9); set it as it was" in message


def test_a_measurement_of_another_checkpoint_is_not_done(make_grid: MakeGrid) -> None:
    jobs = jobs_of(read_experiment(make_grid(measure=MEASURE)))
    (job,) = (job for job in jobs if job.name == "tiny-last-24")
    assert isinstance(job, MeasurementJob)
    checkpoint = job.measurement.model.folder / "checkpoints/step000006"
    for folder in (checkpoint, job.results):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    with job.recording_process("0-0"):
        assert job.state().name == "done"
    (checkpoint / "manifest.json").write_text('{"files": {}}')  # trained again
    assert "was measured with checkpoint=" in job.state().detail
    shutil.rmtree(checkpoint)
    assert job.state().name == "done"


def test_the_longest_name_decides_the_time_limit() -> None:
    flags = SlurmFlags("", "", times=["tiny=1:00", "tiny_seed1=2:00"])
    assert [flags.time_of(name) for name in ("tiny_seed1", "tiny_seed2", "tinier")] == [
        "2:00",
        "1:00",
        None,
    ]
    with pytest.raises(ConfigError, match="--time=huge=3:00 must be MODEL=TIME"):
        SlurmFlags("", "", times=["huge=3:00"]).check(["tiny"])


# --- how they stand -------------------------------------------------------------------------------


@pytest.fixture
def run(make_grid: MakeGrid) -> TrainingJob:
    (run,) = jobs_of(read_experiment(make_grid()))
    assert isinstance(run, TrainingJob)
    return run


@pytest.mark.parametrize(
    ("owner", "age_s", "expected"),
    [
        ({}, 0, "running"),
        ({"host": "elsewhere", "slurm_job": "17"}, STALE_S / 2, "running"),
        ({"host": "elsewhere", "slurm_job": "17"}, STALE_S + 60, "failed"),
    ],
    ids=["here", "refreshed", "not refreshed"],
)
def test_a_run_is_running_while_its_owner_lives(
    run: TrainingJob, owner: dict[str, Any], age_s: float, expected: str
) -> None:
    folder = run.model.folder
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 4, "loss": 3.0}\n')
    (folder / LOCK).write_text(json.dumps(asdict(Owner(**owner))))
    os.utime(folder / LOCK, (time.time() - age_s,) * 2)
    state = run.state()
    assert (state.name, state.step) == (expected, 4)
    assert state.detail.endswith("on elsewhere, job 17") == ("host" in owner)


def test_an_experiment_that_measures_nothing_has_nothing_to_compare(make_grid: MakeGrid) -> None:
    with pytest.raises(ConfigError, match="measures nothing; add a section `measure`"):
        comparisons_of(read_experiment(make_grid()))


def test_a_run_with_other_settings_is_not_done(make_grid: MakeGrid) -> None:
    """Whatever a start takes from the tokenizer and the device is no other setting."""
    path = make_grid()
    (run,) = read_experiment(path).models
    model = replace(run.settings.model, vocab_size=300, embedding_size=384)
    run.folder.mkdir(parents=True)
    save_config(replace(run.settings, model=model), run.folder / "config.yaml")
    (run.folder / "checkpoints/step000006").mkdir(parents=True)
    for words, name in (
        ([], "done"),
        (["--training.precision=auto"], "done"),
        (["--training.precision=bf16"], "failed"),
    ):
        (job,) = jobs_of(read_experiment(path, words))
        assert job.state().name == name
    assert "holds work with training.precision=fp32 (now bf16)" in job.state().detail


# --- running them ---------------------------------------------------------------------------------


@pytest.mark.accept
def test_an_experiment_is_stopped_goes_on_and_says_what_failed(
    make_grid: MakeGrid, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    monkeypatch.setattr("olmo_sparsity.base.locks.STALE_S", 60.0)  # the run refreshes as users' do
    assert Outcome.STOPPED_BY_SIGNAL == EXIT_STOPPED
    path = make_grid(grid={"optimizer.max": {"ok": {}, "bad": {"optimizer.learning_rate": 1e30}}})
    words = ["experiment", path, "--training.num_steps=200", "--checkpoint.interval_steps=100"]
    words += ["--logging.interval_steps=1"]
    first, second = jobs_of(read_experiment(path, words[2:]))
    assert isinstance(first, TrainingJob)
    metrics = first.model.folder / "metrics.jsonl"
    seen: list[str] = []

    def stop() -> None:
        until(lambda: len(list(read_metrics(metrics))) >= 3)
        seen.append(first.state().name)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # if it comes when the run has ended
    try:
        (stopping := threading.Thread(target=stop)).start()
        assert main(words) == EXIT_STOPPED
        stopping.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == ["running"]
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("import time")]
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert {"torch", "olmo.model"} <= imported, "the process of the run"
    assert not {"torch._dynamo", "transformers", "matplotlib", "deepspeed"} & imported
    assert first.state().name == "waiting"
    assert 0 < first.state().step < 200
    assert second.state().step == 0

    assert main(words) == EXIT_BAD_INPUT
    assert first.state().name == "done"
    assert second.state().name == "failed"
    assert "lower optimizer.learning_rate" in second.state().detail
    told = capfd.readouterr()
    assert "1 done, 0 running, 1 failed, 0 waiting" in told.out
    assert "tiny_bad: failed (reasons above); the same command tries again" in told.err

    assert main([*words, "--list"]) == 0
    assert capfd.readouterr().out.strip() == format_states([first, second])


SAY_AND_NUMBER = 'echo "$@" >>said; echo $((40 + $(wc -l <said)))'
"""An sbatch that writes down its words, and numbers jobs from 41 on."""


def pretend_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Make `folder` look like the root of a clone on a machine with these commands of SLURM."""
    (folder / "slurm").mkdir()
    for name in ("train", "measure"):
        (folder / f"slurm/{name}.sbatch").touch()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_slurm_gets_the_unfinished_runs_as_an_array(
    make_grid: MakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_grid(grid={"seed": [1, 2, 3]})
    first = read_experiment(path).models[0]
    (first.folder / "checkpoints/step000006").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    pretend_slurm(tmp_path, monkeypatch, sbatch=SAY_AND_NUMBER)
    flags = ["--slurm=--time=1:00", "--max-jobs=4"]
    assert main(["experiment", path, *flags]) == 0
    said = f"--parsable --time=1:00 --array=1,2%4 slurm/train.sbatch {path}\n"
    assert Path("said").read_text() == said


def test_slurm_gets_nothing_while_a_text_is_not_prepared(
    make_grid: MakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    path = make_grid(grid={"seed": [1, 2]})
    monkeypatch.chdir(tmp_path)
    pretend_slurm(tmp_path, monkeypatch, sbatch="touch submitted; echo 41")
    words = ["experiment", path, "--data.folder=text of 100 lines", "--slurm=--time=1:00"]
    assert main(words) == EXIT_BAD_INPUT
    refusal = capsys.readouterr().err
    assert "tiny_seed1: data.folder=text of 100 lines is not prepared" in refusal
    line = "olmo-sparsity prepare tiny.yaml '--data.folder=text of 100 lines'"
    assert refusal.strip().endswith(line)
    assert not Path("submitted").exists()


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--training.max_epochs=0.001", "times, above training.max_epochs=0.001"),
        ("--data.heldout_share=0.123", "heldout_share="),
    ],
)
def test_slurm_gets_nothing_that_would_end_at_once(
    option: str,
    reason: str,
    make_grid: MakeGrid,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    path = make_grid(grid={"seed": [1, 2]})
    monkeypatch.chdir(tmp_path)
    pretend_slurm(tmp_path, monkeypatch, sbatch="touch submitted; echo 41")
    assert main(["experiment", path, option, "--slurm=--time=1:00"]) == EXIT_BAD_INPUT
    refusal = capsys.readouterr().err
    assert "tiny_seed1: " in refusal
    assert reason in refusal
    assert not Path("submitted").exists()


def test_slurm_measures_when_trainings_have_ended_well_or_not(
    make_grid: MakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_grid(measure=MEASURE | {"shards": 2})
    monkeypatch.chdir(tmp_path)
    queue = "echo 41 0; echo 42 0; echo 42 1; echo 43 0; echo 44 0; echo 45 N/A"
    pretend_slurm(tmp_path, monkeypatch, sbatch=SAY_AND_NUMBER, squeue=queue)
    words = ["experiment", path, "--slurm=--gpus=8", "--measure-slurm=--gpus=1"]
    assert main(words) == 0
    train, *measures, last = Path("said").read_text().splitlines()
    assert train == f"--parsable --gpus=8 --array=0 slurm/train.sbatch {path}"
    assert measures[0].startswith("--parsable --gpus=1 --dependency=afterany:41_0 --array=0-1 ")
    assert measures[0].endswith(f"slurm/measure.sbatch {path} --only=tiny-last-12")
    assert "--dependency=afterany:41_0:43 " in measures[2]  # the longest chose its targets
    assert last.startswith("--parsable --gpus=1 --dependency=afterany:42:43:44 slurm/measure")
    assert main(words) == 0  # all are in the queue
    assert len(Path("said").read_text().splitlines()) == 5


def test_what_waits_is_cancelled_before_what_runs(
    make_grid: MakeGrid,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """Or measurements would begin when their trainings end."""
    path = make_grid(measure=MEASURE)
    monkeypatch.chdir(tmp_path)
    queue = "echo 41 0; echo 43 0"
    cancel = "echo $@ >> cancelled"
    pretend_slurm(tmp_path, monkeypatch, sbatch=SAY_AND_NUMBER, squeue=queue, scancel=cancel)
    assert main(["experiment", path, "--cancel"]) == 0
    assert "no job of it is in the queue" in capsys.readouterr().out
    assert main(["experiment", path, "--slurm"]) == 0
    assert main(["experiment", path, "--cancel"]) == 0
    assert Path("cancelled").read_text() == "--state=PENDING 41_0 43\n41_0 43\n"
    assert "cancelled: tiny, tiny-last-" in capsys.readouterr().out


def test_an_experiment_has_a_price_before_anything_is_trained(
    make_grid: MakeGrid, capsys: pytest.CaptureFixture
) -> None:
    path = make_grid(grid={"training.num_steps": [600, 1800], "seed": [1, 2]})
    models = read_experiment(path).models
    (models[0].folder / "checkpoints/step000600").mkdir(parents=True)
    words = ["experiment", path, "--dry-run", "--gpus", "2", "--gpu", "h100"]
    assert main([*words, "--gpu-hour", "2.5"]) == 0
    *runs, _, _, total = capsys.readouterr().out.splitlines()
    assert [run.partition(":")[0] for run in runs] == [model.name for model in models[1:]]
    assert "parameters, 115,200 tokens in 1,800 steps; " in runs[-1]
    assert re.fullmatch(r"3 of 4 models to train: [\d.e-]+ GPU-hours .* at \$2.5 a .*", total)
    two = Hardware.of("h100", 2, 1)
    configs = [describe_run(model.settings, two).config for model in models[1:]]
    costs = [cost_of_run(config, two) for config in configs]
    hours = [cost.time.gpu_hours for cost in costs if cost.time is not None]
    # Each run has a last save and evaluations, whose number is not in proportion to its steps.
    assert hours[1] == pytest.approx(3 * hours[0], rel=0.001)
    assert main(["experiment", path, "--dry-run"]) == 0
    assert "3 of 4 models to train: pass --gpus N" in capsys.readouterr().out


def test_the_price_has_the_memory_and_disk_of_train_and_counts_a_shared_text_once(
    make_grid: MakeGrid, tmp_path: Path, capsys: Capture
) -> None:
    path = make_grid(grid={"seed": [1, 2]})
    hardware = ["--gpus", "2", "--gpu", "h100"]
    assert main(["train", str(tmp_path / "tiny.yaml"), "--dry-run", *hardware]) == 0
    printed = capsys.readouterr().out
    peak = re.search(r"# memory of a process, ddp: (\S+ GiB)", printed)
    of_node = re.search(r"# main memory: .*; (\S+ GiB a node)", printed)
    assert peak is not None
    assert of_node is not None
    assert main(["experiment", path, "--dry-run", *hardware]) == 0
    first, second, text, disk, _ = capsys.readouterr().out.splitlines()
    for line in (first, second):
        assert f"; {peak[1]} a GPU (ddp, fits, micro-batches of " in line
        assert f"main memory {of_node[1]}; the run folder " in line
    settings = read_experiment(path).models[0].settings
    folder = Path(settings.data.folder)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    assert text == f"text: {folder} is prepared, {size / 1e9:.1f} GB"
    resolved = describe_run(settings, Hardware.of("h100", 2, 1)).config
    of_runs = 2 * disk_of(resolved).run_folder_bytes
    assert disk == (
        f"disk: {(of_runs + size) / 1e9:,.1f} GB, of which run folders {of_runs / 1e9:,.1f} and "
        f"texts {size / 1e9:,.1f}"
    )


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--training.max_epochs=0.001", "times, above training.max_epochs=0.001"),
        ("--training.batch_size=1000000", "sequences of"),
    ],
)
def test_what_the_dry_run_of_a_training_refuses_is_not_priced(
    option: str, reason: str, make_grid: MakeGrid, tmp_path: Path, capsys: Capture
) -> None:
    path = make_grid(grid={"seed": [1, 2]})
    hardware = ["--gpus", "2", "--gpu", "h100"]
    assert main(["train", str(tmp_path / "tiny.yaml"), "--dry-run", *hardware, option]) == 2
    assert reason in capsys.readouterr().err
    assert main(["experiment", path, "--dry-run", *hardware, option]) == EXIT_BAD_INPUT
    refusal = capsys.readouterr().err
    assert "tiny_seed1: " in refusal
    assert reason in refusal


def test_a_run_that_has_begun_is_priced_however_often_it_reads_its_text(
    make_grid: MakeGrid, capsys: Capture
) -> None:
    """It goes on, as a start does."""
    path = make_grid()
    model = read_experiment(path).models[0]
    (model.folder / "checkpoints/step000002").mkdir(parents=True)
    assert main(["experiment", path, "--dry-run", "--training.max_epochs=0.001"]) == 0
    assert "1 of 1 models to train" in capsys.readouterr().out


def test_a_text_that_is_not_prepared_is_said_in_one_line_and_priced(
    make_grid: MakeGrid, tmp_path: Path, capsys: Capture
) -> None:
    path = make_grid(grid={"seed": [1, 2]})
    folder = tmp_path / "later"
    assert main(["experiment", path, "--dry-run", f"--data.folder={folder}"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if str(folder) in line]
    assert line.startswith(f"text: {folder} is not prepared; run `olmo-sparsity prepare` first. ")
    assert "How often it is read is not checked" in line


@pytest.mark.accept
def test_a_measurement_of_an_untrained_model_has_the_price_of_the_trained_one(
    make_grid: MakeGrid, capsys: pytest.CaptureFixture
) -> None:
    """By token-forwards that the measurement itself counts, for the same number of targets."""
    path = make_grid(measure=MEASURE | {"steps": ["last"], "long": [24]})
    words = ["experiment", path]
    assert main([*words, "--dry-run", "--gpus=1", "--gpu=h100"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "token-forwards" in line]
    found = re.search(r"about (\d+) targets, (\S+) token-forwards", line)
    assert found is not None
    assert main(words) == 0
    capsys.readouterr()
    experiment = saved_experiment(read_experiment(path).folder)
    assert experiment is not None
    (measurement,) = experiment.measurements
    results = read_results(measurement.folder)
    assert experiment.figure.read_bytes().startswith(b"\x89PNG")
    counted = results.meta.token_forwards_of_last_start
    ratio = len(results.targets) / float(found[1])
    assert float(found[2]) == pytest.approx(counted, rel=0.5), ratio
    assert main(["report", str(experiment.folder), "--out", f"{experiment.folder}/page.html"]) == 0
    assert (experiment.folder / "page.html").exists()


def test_other_text_is_priced_with_the_tokenizer_that_was_trained(
    make_grid: MakeGrid, run_dict: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "own.jsonl"
    lines = [json.dumps({"text": f"cat {number} sat on mat {number} " * 9}) for number in range(40)]
    text.write_text("\n".join(lines))
    folder = tmp_path / "prepared"
    run_dict["data"] = {
        "folder": str(folder),
        "corpus": {"source": "files", "path": str(text)},
        "tokenizer": {"train_vocab": 270},
        "heldout_share": 0.5,
    }
    path = make_grid(measure=MEASURE | {"steps": ["last"], "long": [24], "text": str(text)})
    words = ["experiment", path, "--dry-run", "--gpus=1", "--gpu=h100"]
    assert main(words) == 0
    assert "is not prepared; run `olmo-sparsity prepare` first" in capsys.readouterr().out
    assert main(["prepare", str(tmp_path / "tiny.yaml")]) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert "token-forwards" in capsys.readouterr().out


def test_measure_prices_a_config_and_refuses_to_measure_it(
    make_grid: MakeGrid, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    make_grid()
    words = ["measure", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "results"), "--ks=1"]
    assert main([*words, "--dry-run", "--speed=h100"]) == 0
    line = capsys.readouterr().out
    assert "documents, about" in line
    assert "GPU-hours" in line
    assert main(words) == EXIT_BAD_INPUT
    assert "is a config: train it and pass its run folder" in capsys.readouterr().err
    assert main([*words, "--dry-run", "--shard=0/2"]) == EXIT_BAD_INPUT
    assert "--shard requires a trained model" in capsys.readouterr().err


# --- a second experiment of the same runs ---------------------------------------------------------


@pytest.fixture
def second_file(make_grid: MakeGrid, tmp_path: Path) -> str:
    """A file that measures the runs of the experiment in `runs`, with results elsewhere."""
    path = Path(make_grid(grid={"seed": [1, 2]}))
    content = json.loads(path.read_text())
    content |= {
        "folder": str(tmp_path / "short"),
        "runs": str(tmp_path / "runs"),
        "measure": MEASURE | {"steps": ["last"], "long": [12], "transfer": False},
    }
    second = tmp_path / "second.yaml"
    second.write_text(json.dumps(content))
    return str(second)


@pytest.mark.accept
def test_a_second_experiment_measures_the_runs_of_a_grid_and_trains_nothing(
    make_grid: MakeGrid,
    second_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    first_file = make_grid(grid={"seed": [1, 2]})
    for job in ("tiny_seed1", "tiny_seed2"):
        assert main(["experiment", first_file, f"--only={job}"]) == 0
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/**/*")}

    capsys.readouterr()
    assert main(["experiment", second_file, "--dry-run"]) == 0
    assert "0 of 2 models to train, 2 of 2 to measure" in capsys.readouterr().out
    assert main(["experiment", second_file, "--list"]) == 0
    assert "5 jobs: 2 done, 0 running, 0 failed, 3 waiting" in capsys.readouterr().out
    run: list[str] = []

    def run_in_this_process(commands: Sequence[Command], _: int) -> Ending:
        words = [list(command.words)[4:] for command in commands]
        run.extend(word.removeprefix("--only=") for *_, word in words)
        return Ending([main(command) for command in words], is_stopped=False)

    monkeypatch.setattr(here, "run_processes", run_in_this_process)
    assert main(["experiment", second_file]) == 0
    assert run == ["tiny_seed1-last-12", "tiny_seed2-last-12", "figure"]
    assert "5 jobs: 5 done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/**/*")} == written

    folder = str(tmp_path / "short")
    assert (tmp_path / "short/figure2.png").exists()
    assert main(["compare", folder]) == 0
    assert main(["report", folder, "--out", f"{folder}/page.html"]) == 0
    assert {path.name for path in tmp_path.glob("short/*.html")} == {
        "page_tiny_seed1.html",
        "page_tiny_seed2.html",
    }


def test_without_a_grid_runs_takes_precedence_over_the_run_folder_of_a_config(
    make_grid: MakeGrid, tmp_path: Path
) -> None:
    path = make_grid(runs=str(tmp_path / "elsewhere"))
    config = tmp_path / "tiny.yaml"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"run_folder": "runs/other"}))
    (model,) = read_experiment(path).models
    assert model.folder == tmp_path / "elsewhere/tiny"
    assert model.settings.run_folder == str(tmp_path / "elsewhere/tiny")


def test_measurements_wait_for_trainings_that_the_first_experiment_has_in_the_queue(
    make_grid: MakeGrid, second_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_file = make_grid(grid={"seed": [1, 2]}, measure=MEASURE)
    monkeypatch.chdir(tmp_path)
    queue = "for number in 41 42 43 44 45 46 47; do echo $number 0; echo $number 1; done"
    pretend_slurm(tmp_path, monkeypatch, sbatch=SAY_AND_NUMBER, squeue=queue)
    assert main(["experiment", first_file, "--slurm"]) == 0
    Path("said").write_text("\n" * 59)
    assert main(["experiment", second_file, "--slurm"]) == 0
    first, second, figure = Path("said").read_text().strip().splitlines()
    assert "--dependency=afterany:41_0 " in first
    assert first.endswith(f"{second_file} --only=tiny_seed1-last-12")
    assert "--dependency=afterany:41_1:100 " in second
    assert figure.endswith("--only=figure")


def test_the_dry_run_says_at_which_length_transfer_is_measured(
    make_grid: MakeGrid, capsys: Capture
) -> None:
    measure = MEASURE | {"steps": ["last"]}
    path = make_grid(grid={"seed": [1, 2]}, measure=measure)
    assert main(["experiment", path, "--dry-run"]) == 0
    line = "transfer: 2 measurements, at the last step and long=24 alone\n"
    assert line in capsys.readouterr().out
    path = make_grid(grid={"seed": [1, 2]}, measure=measure | {"transfer": False})
    assert main(["experiment", path, "--dry-run"]) == 0
    assert "transfer: " not in capsys.readouterr().out


# --- pairs that `compare` subtracts ---------------------------------------------------------------

SCHEMES_AND_SEEDS = {
    "positions": {
        "pose": {},
        "rope": {"positions.scheme": "contiguous", "positions.target_length": None},
    },
    "seed": [1, 2],
}


def names_of_pairs(path: str) -> list[tuple[str, str]]:
    comparisons = comparisons_of(read_experiment(path))
    pairs = [pair for comparison in comparisons for pair in comparison.pairs]
    return [(first.name, second.name) for first, second in pairs]


def test_schemes_are_compared_at_each_seed_and_each_length(make_grid: MakeGrid) -> None:
    assert names_of_pairs(make_grid(grid=SCHEMES_AND_SEEDS, measure=MEASURE)) == [
        ("tiny_pose_seed1-last-12", "tiny_rope_seed1-last-12"),
        ("tiny_pose_seed2-last-12", "tiny_rope_seed2-last-12"),
        ("tiny_pose_seed1-last-24", "tiny_rope_seed1-last-24"),
        ("tiny_pose_seed2-last-24", "tiny_rope_seed2-last-24"),
    ]


def test_models_that_differ_in_two_things_are_not_compared(make_grid: MakeGrid) -> None:
    grid = {"optimizer.learning_rate": [1e-3, 1e-2], "training.z_loss": [0.0, 0.1]}
    pairs = names_of_pairs(make_grid(grid=grid, measure=MEASURE | {"long": 12}))
    assert len(pairs) == 4
    for first, second in pairs:
        parts = zip(first.split("_"), second.split("_"), strict=True)
        # z_loss0.1-last-12 is one part
        assert sum(ours != theirs for ours, theirs in parts) == 1


def test_seeds_are_compared_with_each_other_where_nothing_else_differs(
    make_grid: MakeGrid,
) -> None:
    path = make_grid(grid={"seed": [1, 2]}, measure=MEASURE | {"long": 12})
    assert names_of_pairs(path) == [("tiny_seed1-last-12", "tiny_seed2-last-12")]


@pytest.mark.accept
def test_compare_of_an_experiment_names_each_pair_and_sums_up_its_seeds(
    make_grid: MakeGrid, tmp_path: Path, results_folder: Path, capsys: Capture
) -> None:
    labels = {"tiny_pose": "PoSE", "tiny_rope": "RoPE"}
    path = make_grid(grid=SCHEMES_AND_SEEDS, measure=MEASURE, figure={"labels": labels})
    experiment = read_experiment(path)
    experiment.save()
    folder = str(experiment.folder)
    assert main(["compare", folder]) == EXIT_BAD_INPUT
    assert "no two measurements that `compare` pairs are finished" in capsys.readouterr().err
    for measurement in experiment.measurements:
        if measurement.name != "tiny_rope_seed2-last-24":
            shutil.copytree(results_folder, measurement.folder)

    assert main(["compare", folder, "--out", f"{folder}/pairs.csv"]) == 0
    printed, said = capsys.readouterr()
    titles = [line for line in printed.splitlines() if line.startswith("net excess: ")]
    assert titles == [
        "net excess: PoSE (tiny_pose_seed1) minus RoPE (tiny_rope_seed1), long=12, last step",
        "net excess: PoSE (tiny_pose_seed2) minus RoPE (tiny_rope_seed2), long=12, last step",
        "net excess: PoSE (tiny_pose_seed1) minus RoPE (tiny_rope_seed1), long=24, last step",
    ]
    assert "RoPE (tiny_rope_seed2), long=24, last step: not compared: " in said
    # Of these copies the losses with both windows are equal.
    assert printed.startswith("L_12 - L_24: what the text beyond 12 tokens saves, nats a token")
    saved = [re.sub(r" \[.*?\]", "", line) for line in printed.splitlines()[1:6]]
    assert saved == [
        "  PoSE (tiny_pose_seed1): +0.000; more than unrelated text: +0.000",
        "  PoSE (tiny_pose_seed2): +0.000; more than unrelated text: +0.000",
        "  RoPE (tiny_rope_seed1): +0.000; more than unrelated text: +0.000",
        "  tiny_pose_seed1 minus tiny_rope_seed1: +0.000; more than unrelated text: +0.000",
        "",
    ]
    assert "tiny_rope_seed2, L_12 - L_24: not compared: " in said
    assert "2 seeds: tiny_pose minus tiny_rope, long=12\n  L_short - L_long: " in printed
    assert "1 of 2 seeds: tiny_pose minus tiny_rope, long=24\n" in printed
    assert len(pd.read_csv(f"{folder}/pairs.csv")["first"].unique()) == 3

    assert main(["compare", folder, "--transfer"]) == EXIT_BAD_INPUT
    assert "pass two folders of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.4, 0.2, 0.3], "above 0 in all 3 seeds; 2 of 3 intervals exclude 0"),
        ([-0.4, -0.2, -0.3], "below 0 in all 3 seeds; 2 of 3 intervals exclude 0"),
        ([0.4, -0.3, 0.1], "not the same sign: above 0 in 2 of 3 seeds; 2 of 3 intervals"),
    ],
    ids=str,
)
def test_seeds_agree_if_all_have_one_sign(
    make_grid: MakeGrid, values: list[float], expected: str
) -> None:
    """Each interval reaches 0.25 to both sides; a random control and other targets do not count."""
    grid = SCHEMES_AND_SEEDS | {"seed": [1, 2, 3]}
    path = make_grid(grid=grid, measure=MEASURE | {"long": 12})
    (comparison,) = comparisons_of(read_experiment(path))
    tables = []
    for value in values:
        row = {
            "target_set": "gap",
            "selector": "add_one",
            "units": "tokens",
            "k": 1,
            "net_equal": value,
            "net_equal_low": value - 0.25,
            "net_equal_high": value + 0.25,
            "mean_gap": -value,
            "mean_gap_low": -value - 0.01,
            "mean_gap_high": -value + 0.01,
        }
        others = [row | {"selector": "random", "net_equal": -9.0}, row | {"target_set": "every"}]
        tables.append(pd.DataFrame([row, *others]))
    title, gap, net = describe_agreement(comparison, tables)
    assert title == "3 seeds: tiny_pose minus tiny_rope, long=12"
    assert net.startswith(f"  net at equal gaps, tokens, k=1: {expected}")
    assert gap.startswith("  L_short - L_long: ")
    assert gap.endswith("3 of 3 intervals exclude 0")
