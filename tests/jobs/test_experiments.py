"""Experiments: what a file expands to; running it: stopped, failed, changed, waited for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.command.cli import EXIT_BAD_INPUT, main
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.jobs.experiments import read_experiments
from olmo_sparsity.runtime import EXIT_STOPPED
from tests.conftest import running, until

Make = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.chdir(tmp_path)

    def make(experiments: dict, **sections: object) -> str:
        given = {"folder": "noted", "parts": ["a"], "experiments": experiments, **sections}
        Path("experiments.yaml").write_text(json.dumps(given))
        return "experiments.yaml"

    return make


def test_a_grid_becomes_experiments_and_needs_come_first(make: Make) -> None:
    path = make(
        {
            "last": {"part": "a", "needs": ["one"], "commands": ["cat ${options.both} one_*"]},
            "one": {
                "part": "b",
                "needs": ["first_{x}"],
                "grid": {"x": [1, 2], "name": {"long": {"steps": 9}, "a b": {"steps": None}}},
                "commands": ["touch one_{x}_{name} {steps}"],
                "outputs": ["one_{x}"],
            },
            "first": {"part": "b", "grid": {"x": [1, 2]}, "commands": ["true"]},
            "other": {"part": "c", "commands": ["false"]},
        },
        options={"both": "-n -e"},
    )
    jobs = {job.name: job for job in read_experiments(path, [])}
    assert list(jobs) == [
        "first_1",
        "one_1_long",
        "one_1_a-b",
        "first_2",
        "one_2_long",
        "one_2_a-b",
        "last",
    ]
    assert jobs["one_2_a-b"].commands == ("touch one_2_a b null",)
    assert jobs["one_2_a-b"].needs == ("first_2",)
    assert jobs["one_2_a-b"].outputs == ("one_2",)
    assert jobs["last"].commands == ("cat -n -e one_*",)
    assert jobs["last"].needs == ("one_1_long", "one_1_a-b", "one_2_long", "one_2_a-b")
    assert [job.name for job in read_experiments(path, ["--parts=[c]"])] == ["other"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"needs": ["two"]}, "one needs two, which is not there"),
        ({"needs": ["one"]}, "one needs itself"),
        ({"part": "b"}, "no experiment is of part a; there are b"),
        ({"commands": []}, "experiments.one needs `part` and `commands`"),
        ({"comands": []}, "did you mean 'experiments.commands'"),
        ({"commands": ["true {x}"]}, "experiments.one has no {x} in its grid"),
        ({"grid": {"x": 3}}, "experiments.one.grid.x must be a list"),
        ({"grid": {"x": {}}}, "experiments.one.grid.x must be a list"),
        ({"grid": {"x": "none.yaml"}}, "does not exist"),
        ({"grid": {"x": [1, 1]}}, "two experiments are called one_1"),
        ({"commands": ["${options.many}"]}, "options.many"),
    ],
    ids=str,
)
def test_experiments_that_cannot_be(make: Make, changed: dict, expected: str) -> None:
    path = make({"one": {"part": "a", "commands": ["true"]} | changed})
    with pytest.raises(ConfigError) as error:
        read_experiments(path, [])
    assert expected in str(error.value)


def test_a_choice_may_not_be_called_as_another_experiment(make: Make) -> None:
    one, other = ({"part": "a", "commands": ["true"], "grid": grid} for grid in ({"x": [1]}, {}))
    for both in ({"one": one, "one_1": other}, {"one_1": other, "one": one}):
        with pytest.raises(ConfigError, match="two experiments are called one_1"):
            read_experiments(make(both), [])


def states(path: str) -> dict[str, tuple[str, int]]:
    found = {job.name: job.state() for job in read_experiments(path, [])}
    return {name: (state.name, state.step) for name, state in found.items()}


def test_what_is_done_is_not_done_again_and_what_failed_holds_up_only_what_needs_it(
    make: Make, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the start of a process for each experiment, as in the test of one that is stopped.
    run = "olmo_sparsity.jobs.job.run_process"
    monkeypatch.setattr(run, lambda command: (main(command[4:]), False))
    count = "python -c \"print('x', file=open('count', 'a'))\""
    experiments = {
        "bad": {"part": "a", "commands": [count, "python -c exit(3)"]},
        "after": {"part": "a", "needs": ["bad"], "commands": [f"{count} *", "touch b", "ls b"]},
        "empty": {"part": "a", "commands": ["true"], "outputs": ["nowhere"]},
        "absent": {"part": "a", "commands": ["no-such-program"]},
    }
    path = make(experiments)
    assert main(["sweep", path]) == EXIT_BAD_INPUT
    told = capfd.readouterr()
    assert "bad, empty, absent: failed; the same command tries again" in told.err
    assert "0 done, 0 running, 3 failed, 1 waiting" in told.out
    assert "`python -c exit(3)` ended with exit code 3" in told.out
    assert "empty did not make nowhere" in told.out
    assert "'no-such-program' is not here" in told.out
    assert main(["sweep", path, "--only=1"]) == EXIT_BAD_INPUT
    assert "after needs bad; run that first" in capfd.readouterr().err

    experiments["bad"]["commands"] = [count, "true"]  # the first of them is done
    del experiments["empty"], experiments["absent"]
    assert main(["sweep", make(experiments)]) == 0
    assert Path("count").read_text() == "x\nx\n"
    assert states(path) == {"bad": ("done", 2), "after": ("done", 3)}
    assert main(["sweep", path]) == 0
    assert Path("count").read_text() == "x\nx\n"

    experiments["after"] |= {"outputs": ["b"]}
    assert states(make(experiments))["after"] == ("done", 3)
    Path("b").unlink()
    assert states(path)["after"][0] != "done"


def test_an_experiment_that_is_stopped_goes_on_with_its_command(make: Make) -> None:
    waits = "python -c \"import time; open('up', 'w'); time.sleep(100)\""
    path = make({"one": {"part": "a", "commands": ["true", waits]}})
    with running([sys.executable, "-m", "olmo_sparsity", "sweep", path]) as sweep:
        until(Path("up").exists, lambda: sweep.poll() is None)
        assert states(path) == {"one": ("running", 1)}
        sweep.send_signal(signal.SIGTERM)
        assert sweep.wait() == EXIT_STOPPED
    assert states(path) == {"one": ("waiting", 1)}


def test_a_command_that_ends_well_after_a_signal_is_done_and_the_last(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the signal came while the command was being started."""
    waits = "signal.pthread_sigmask(signal.SIG_BLOCK, [2]); open('up', 'w'); signal.sigwait([2])"
    path = make({"one": {"part": "a", "commands": [f'python -c "import signal; {waits}"', "ls"]}})
    start = subprocess.Popen

    def start_slowly(*words: Any, **options: Any) -> subprocess.Popen:
        child = start(*words, **options)
        until(Path("up").exists, lambda: child.poll() is None)
        signal.raise_signal(signal.SIGINT)
        return child

    monkeypatch.setattr(subprocess, "Popen", start_slowly)
    assert main(["sweep", path, "--only=0"]) == EXIT_STOPPED
    assert states(path) == {"one": ("waiting", 1)}


def test_slurm_is_told_what_waits_for_what(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(
        {
            "first": {"part": "a", "grid": {"x": [1, 2]}, "commands": ["true"]},
            "last": {"part": "a", "needs": ["first"], "commands": ["true"]},
            "alone": {"part": "a", "commands": ["true"]},
        }
    )
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/train.sbatch").touch()
    pretend = tmp_path / "sbatch"
    pretend.write_text('#!/bin/sh\necho "$@" >>said\necho "Submitted batch job $(wc -l <said)0"\n')
    pretend.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["sweep", path, "--slurm=--time=1:00"]) == 0
    assert Path("said").read_text().splitlines() == [
        "--time=1:00 --array=0,1,3 slurm/train.sbatch experiments.yaml",
        "--time=1:00 --dependency=afterok:10_0:10_1 --kill-on-invalid-dep=yes --array=2 "
        "slurm/train.sbatch experiments.yaml",
    ]
