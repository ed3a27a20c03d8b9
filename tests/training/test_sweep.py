"""Sweeps: runs that resume, here or on SLURM."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.folders import LOCK, STALE_S, Owner
from olmo_sparsity.base.launch import EXIT_STOPPED
from olmo_sparsity.command.cli import EXIT_BAD_INPUT, main
from olmo_sparsity.config.run import save_config
from olmo_sparsity.training.estimate import Hardware, gpu_hours
from olmo_sparsity.training.loop import Outcome
from olmo_sparsity.training.run_folder import read_metrics
from olmo_sparsity.training.start import cost_of
from olmo_sparsity.training.sweep import Run, expand, format_states
from tests.conftest import until

MakeGrid = Callable[..., str]


@pytest.fixture
def make_grid(run_dict: dict, tmp_path: Path) -> MakeGrid:
    def make(**sections: object) -> str:
        del run_dict["run_folder"]
        (tmp_path / "tiny.yaml").write_text(json.dumps(run_dict))
        grid = {"folder": str(tmp_path / "runs"), "configs": ["tiny.yaml"], **sections}
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
    runs = expand(path, ["--training.num_steps=9"])
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
        ({"configs": []}, "needs `folder` and `configs`"),
        ({"configs": ["tiny.yaml", "tiny.yaml"]}, "2 runs would be called tiny"),
        ({"grid": {"seed": 3}}, "grid.seed must be a list"),
        ({"grid": {"seed": []}}, "grid.seed must be a list"),
        ({"grid": {"sizes": {"small": 3}}}, "grid.sizes must be a list"),
        ({"grid": {"sead": [1, 2]}}, "did you mean 'seed'"),
    ],
    ids=str,
)
def test_a_grid_that_cannot_be(make_grid: MakeGrid, sections: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        expand(make_grid(**sections), [])
    assert expected in str(error.value)


# --- how they stand -------------------------------------------------------------------------------


@pytest.fixture
def run(make_grid: MakeGrid) -> Run:
    (run,) = expand(make_grid(), [])
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
    run: Run, owner: dict[str, Any], age_s: float, expected: str
) -> None:
    run.folder.mkdir(parents=True)
    (run.folder / "metrics.jsonl").write_text('{"step": 4, "loss": 3.0}\n')
    (run.folder / LOCK).write_text(json.dumps(asdict(Owner(**owner))))
    os.utime(run.folder / LOCK, (time.time() - age_s,) * 2)
    state = run.state()
    assert (state.name, state.step) == (expected, 4)
    assert state.detail.endswith("on elsewhere, job 17") == ("host" in owner)


def test_a_run_with_other_settings_is_not_done(make_grid: MakeGrid) -> None:
    """Whatever a start takes from the tokenizer and the device is no other setting."""
    path = make_grid()
    (run,) = expand(path, [])
    model = replace(run.settings.model, vocab_size=300, embedding_size=384)
    run.folder.mkdir(parents=True)
    save_config(replace(run.settings, model=model), run.folder / "config.yaml")
    (run.folder / "checkpoints/step000006").mkdir(parents=True)
    assert run.state().name == "done"
    (resolved,) = expand(path, ["--training.precision=auto"])
    assert resolved.state().name == "done"
    (other,) = expand(path, ["--training.precision=bf16"])
    assert other.folder == run.folder
    assert (other.state().name, other.state().step) == ("failed", 0)
    assert "holds work with other settings" in other.state().detail


# --- running them ---------------------------------------------------------------------------------


def test_a_sweep_is_stopped_goes_on_and_says_what_failed(
    make_grid: MakeGrid, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    monkeypatch.setattr(
        "olmo_sparsity.base.folders.STALE_S", 60.0
    )  # the run refreshes as users' do
    assert Outcome.STOPPED_BY_SIGNAL == EXIT_STOPPED
    path = make_grid(grid={"optimizer.max": {"ok": {}, "bad": {"optimizer.learning_rate": 1e30}}})
    words = ["sweep", path, "--training.num_steps=200", "--checkpoint.interval_steps=100"]
    words += ["--logging.interval_steps=1"]
    first, second = expand(path, words[2:])
    seen: list[str] = []

    def stop() -> None:
        until(lambda: len(list(read_metrics(first.folder / "metrics.jsonl"))) >= 3)
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

    # The rest without the start of a process for each run.
    run_process = "olmo_sparsity.training.sweep.run_process"
    monkeypatch.setattr(run_process, lambda command: (main(command[4:]), False))
    assert main(words) == EXIT_BAD_INPUT
    assert first.state().name == "done"
    assert second.state().name == "failed"
    assert "lower optimizer.learning_rate" in second.state().detail
    told = capfd.readouterr()
    assert "1 done, 0 running, 1 failed, 0 waiting" in told.out
    assert "tiny_bad: failed; the same command tries again" in told.err

    assert main([*words, "--list"]) == 0
    assert capfd.readouterr().out.strip() == format_states([first, second])


def test_slurm_gets_the_unfinished_runs_as_an_array(
    make_grid: MakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_grid(grid={"seed": [1, 2, 3]})
    first = expand(path, [])[0]
    (first.folder / "checkpoints/step000006").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/train.sbatch").touch()
    pretend = tmp_path / "sbatch"
    pretend.write_text('#!/bin/sh\necho "$@" >>said\n')
    pretend.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["sweep", path, "--slurm=--time=1:00"]) == 0
    assert Path("said").read_text() == f"--time=1:00 --array=1,2 slurm/train.sbatch {path}\n"


def test_a_sweep_has_a_price(make_grid: MakeGrid, capsys: pytest.CaptureFixture) -> None:
    path = make_grid(grid={"training.num_steps": [600, 1800], "seed": [1, 2]})
    (expand(path, [])[0].folder / "checkpoints/step000600").mkdir(parents=True)
    assert main(["sweep", path, "--dry-run", "--gpus", "2", "--gpu", "h100"]) == 0
    *runs, total = capsys.readouterr().out.splitlines()
    assert [run.partition(":")[0] for run in runs] == [run.name for run in expand(path, [])[1:]]
    assert "parameters, 115,200 tokens in 1,800 steps; " in runs[-1]
    assert re.fullmatch(r"3 of 4 runs to train: [\d.e-]+ GPU-hours \(predicted\)", total)
    two = Hardware.of("h100", 2, 1)
    hours = [gpu_hours(*cost_of(run.settings, two)[:2]) for run in expand(path, [])[1:]]
    assert hours[1] == pytest.approx(3 * hours[0])
    assert main(["sweep", path, "--dry-run"]) == 0
    assert "3 of 4 runs to train: pass --gpus N" in capsys.readouterr().out
