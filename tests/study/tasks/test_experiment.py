"""Many trials, on any number of processes: their files, their table, their end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from olmo_sparsity.errors import ConfigError, DataError, UserError
from study.tasks import experiment
from study.tasks.__main__ import main
from study.tasks.results import Row, format_table, read_results, wilson
from study.tasks.schemes import SCHEMES
from study.tasks.trial import Report, Trial
from tests.conftest import running, small_task, until
from tests.study.tasks.support import make, write

# --- many trials ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """The folder and the rows of a run of every scheme."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, experiment.run_settings(make(folder, schemes=list(SCHEMES), seeds=[1]))


def test_every_scheme_trains_and_is_tested(finished: tuple[Path, list[Row]]) -> None:
    folder, rows = finished
    tested = [(row.scheme, row.length) for row in rows]
    assert tested == [(scheme, length) for scheme in sorted(SCHEMES) for length in (4, 8)]
    for row in rows:
        assert row.low <= row.exact_match <= row.high
        assert row.exact_match <= row.token_accuracy
        assert (row.id_accuracy is None) == (row.scheme not in ("ppc", "auxiliary", "pointers"))
    trial = json.loads((folder / "run/trials/ppc_seed1.json").read_text())
    assert [step for step, _ in trial["losses"]] == [3]
    assert trial["num_parameters"] > 0


def test_the_table_is_read_back_as_written(finished: tuple[Path, list[Row]]) -> None:
    folder, rows = finished
    stored, meta = read_results(folder / "run")
    assert stored == rows
    assert meta["settings"]["train_lengths"] == [3, 5]
    assert meta["trial_losses"].keys() == meta["trial_seconds"].keys()
    assert all(0 < loss < 10 for loss in meta["trial_losses"].values())
    with pytest.raises(DataError, match=r"has no accuracy.parquet"):
        read_results(folder)


def test_the_parts_of_an_array_add_up_to_one_run(
    finished: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    settings = make(tmp_path, schemes=list(SCHEMES), seeds=[1])
    for part in range(3):
        rows = experiment.run_settings(settings, shard=(part, 3))
    assert rows == finished[1]


def test_trials_have_one_thread_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads round sums differently."""
    seen = []
    run_trial = experiment.run_trial

    def counted(*given: Any) -> str:
        seen.append(torch.get_num_threads())
        return run_trial(*given)

    monkeypatch.setattr(experiment, "run_trial", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        experiment.run_settings(make(tmp_path, schemes=["rope"], seeds=[1]))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_of_two_shards_that_end_together_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, waits, ended = experiment.write_results, threading.Event(), []

    def slow(folder: Path, rows: list[Row], about: Any) -> None:
        if not waits.is_set():  # the other shard ends while this one writes
            waits.set()
            other.start()
            other.join(1)
            assert other.is_alive()
        ended.append(len(rows))
        really(folder, rows, about)

    monkeypatch.setattr(experiment, "write_results", slow)
    settings = make(tmp_path, schemes=["rope"], seeds=[1, 2])
    other = threading.Thread(target=experiment.run_settings, args=(settings,))
    experiment.run_settings(settings, shard=(0, 2))
    other.join()
    assert ended == [2, 4]
    assert len(read_results(tmp_path / "run")[0]) == 4


def test_other_settings_in_the_same_folder_are_refused(finished: tuple[Path, list[Row]]) -> None:
    with pytest.raises(ConfigError, match=r"holds work with test_lengths=\[4, 8\] \(now \[4\]\)"):
        experiment.run_settings(make(finished[0], test_lengths=[4]))


def test_a_folder_of_before_a_setting_existed_resumes(
    finished: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    settings = make(tmp_path, schemes=["alibi"], seeds=[1])
    fixed = experiment.fixed_settings(settings)
    del fixed["end_token"], fixed["positions"]["published"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/settings.json").write_text(json.dumps(fixed))
    for _ in range(2):
        assert experiment.run_settings(settings) == finished[1][:2]
    with pytest.raises(ConfigError, match=r"end_token=False \(now True\)"):
        experiment.run_settings(make(tmp_path, schemes=["rope"], end_token=True))


def test_a_damaged_file_is_named(finished: tuple[Path, list[Row]], tmp_path: Path) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "run" / "trials" / "rope_seed1.json"
    file.write_text(file.read_text()[:-40])
    with pytest.raises(DataError, match=r"rope_seed1.json: not readable JSON .* delete it"):
        experiment.run_settings(make(tmp_path, schemes=["rope"], seeds=[1]))


def test_a_trial_of_another_scheme_or_experiment_is_refused(
    finished: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    trials = tmp_path / "run" / "trials"
    settings = make(tmp_path, schemes=["rope", "ppc"], seeds=[1])
    own = (trials / "ppc_seed1.json").read_text()
    shutil.copy(trials / "rope_seed1.json", trials / "ppc_seed1.json")
    with pytest.raises(DataError, match=r"ppc_seed1\.json is of another trial or experiment"):
        experiment.run_settings(settings)
    (trials / "ppc_seed1.json").write_text(own)
    other = make(
        tmp_path, schemes=["rope"], seeds=[1], output=str(tmp_path / "x"), test_lengths=[4]
    )
    experiment.run_settings(other)
    shutil.copy(tmp_path / "x/trials/rope_seed1.json", trials)
    with pytest.raises(DataError, match=r"rope_seed1\.json is of another trial or experiment"):
        experiment.run_settings(settings)
    shutil.copy(finished[0] / "run/trials/rope_seed1.json", trials)
    text = (trials / "rope_seed1.json").read_text()
    (trials / "rope_seed1.json").write_text(
        text.replace('"num_parameters": ', '"num_parameters": 1')
    )
    with pytest.raises(DataError, match=r"rope_seed1\.json: it is not what was written"):
        experiment.run_settings(settings)


def test_a_finished_folder_is_not_written_to(
    finished: tuple[Path, list[Row]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another user's, whose unfinished folder is refused before anything is trained."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    rows = experiment.run_settings(make(tmp_path, schemes=["rope"], seeds=[1]))
    assert rows == finished[1]
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(UserError, match=r"output=.*run cannot be written; name a folder of your"):
        experiment.run_settings(make(tmp_path, schemes=["rope"], seeds=[1, 2]))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == times
    (tmp_path / "run/accuracy.parquet").unlink()
    assert experiment.run_settings(make(tmp_path, schemes=["rope"], seeds=[1])) == rows


def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_trial, made = experiment.run_trial, []

    def stop_once(settings: Any, device: Any, folder: Path, trial: Trial, report: Report) -> str:
        made.append(trial.name)
        if len(made) == 2:
            raise KeyboardInterrupt
        return run_trial(settings, device, folder, trial, report)

    monkeypatch.setattr(experiment, "run_trial", stop_once)
    path = write(small_task(tmp_path / "run"), tmp_path)
    assert main([str(path)]) == 75
    assert [file.name for file in (tmp_path / "run" / "trials").iterdir()] == ["rope_seed1.json"]
    assert main([str(path)]) == 0
    assert made[1:] == ["ppc_seed1", "ppc_seed1", "rope_seed2", "ppc_seed2"]
    assert format_table(read_results(tmp_path / "run")[0]) in capsys.readouterr().out
    assert not list((tmp_path / "run").rglob("*.tmp"))


OWN_TASK = """
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
from study.tasks.samples import Samples
@dataclass(frozen=True)
class Copy:
    num_words: int = 3
    length_step: ClassVar[int] = 1
    @property
    def vocabulary(self): return tuple(map(str, range(self.num_words)))
    def sample(self, generator, num_samples, length, k=None):
        x = generator.integers(0, self.num_words, (num_samples, length))
        i = np.tile(np.arange(1, length + 1), (num_samples, 1))
        return Samples(x, x, i, i[:, :length])
    def largest_k(self, length): return None
    def largest_id(self, length): return length
    def solve(self, samples): return samples.prompt_BP
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_workers_end_with_their_parent_and_their_trials_are_as_in_one_process(
    tmp_path: Path, name: str
) -> None:
    """Of a task of one's own too: every process reads its file."""
    file = tmp_path / "copy_task.py"
    file.write_text(OWN_TASK)
    own = {"task": {"name": f"{file}:Copy", "num_words": 5}, "schemes": ["ppc"]}
    settings = small_task(tmp_path / "run") | own | {"num_workers": 2, "seeds": list(range(1000))}
    command = [sys.executable, "-m", "study.tasks", str(write(settings, tmp_path))]
    trials = [tmp_path / "run" / "trials" / f"ppc_seed{seed}.json" for seed in (0, 1)]
    with running(command, stderr=subprocess.PIPE, text=True) as parent:
        until(lambda: all(map(Path.exists, trials)), lambda: parent.poll() is None)
        group = name == "SIGINT"  # as a terminal does
        (os.killpg if group else os.kill)(parent.pid, getattr(signal, name))
        _, error = parent.communicate(timeout=120)
        with contextlib.suppress(ProcessLookupError):
            until(lambda: os.killpg(parent.pid, 0), timeout_s=30)  # its workers, which end too
    if name != "SIGKILL":
        assert parent.returncode == 75
        assert "Traceback" not in error
        assert "the same command goes on" in error
    resumed, alone = (
        experiment.run_settings(make(tmp_path, **own, seeds=[0, 1], output=str(tmp_path / name)))
        for name in ("run", "alone")
    )
    assert [row for row in resumed if row.seed < 2] == alone
    assert len({row.token_accuracy for row in alone}) > 1


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        ("i[:, :length]", "i[:, :-1]", "response_ids_BR has shape"),
        ("def largest_k", "def biggest_k", "Copy lacks largest_k"),
        ("map(str, range(self.num_words))", "map(str, range(2))", "the vocabulary has 2 words"),
        ("return length\n", "return length - 1\n", "position IDs 1 to 5, but the first is 1"),
        ("return samples.prompt_BP", "return 0 * samples.prompt_BP", "solve() does not give"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_wrong_with_it_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture, right: str, wrong: str, expected: str
) -> None:
    assert right in OWN_TASK
    file = tmp_path / "copy_task.py"
    file.write_text(OWN_TASK.replace(right, wrong))
    path = write(small_task(tmp_path / "run") | {"task": {"name": f"{file}:Copy"}}, tmp_path)
    assert main([str(path)]) == 2
    assert expected in capsys.readouterr().err


def test_wilson_is_the_textbook_interval() -> None:
    low, high = wilson(0.5, 100)
    assert (round(low, 4), round(high, 4)) == (0.4038, 0.5962)
    assert wilson(1.0, 500)[1] == 1.0
    assert wilson(0.0, 500)[0] == 0.0
    assert 0.99 < wilson(1.0, 500)[0] < 1.0


# --- what is refused ------------------------------------------------------------------------------


def test_gpt_neox_has_neither_nope_nor_alibi(tmp_path: Path) -> None:
    model = small_task(tmp_path)["model"] | {"architecture": "gpt_neox", "rotary_fraction": 0.5}
    settings = make(tmp_path, schemes=["nope"], model=model)
    with pytest.raises(ConfigError, match=r"model\.architecture=gpt_neox"):
        experiment.run_settings(settings)
    rows = experiment.run_settings(
        make(tmp_path, schemes=["ppc"], seeds=[1], model=model, output=str(tmp_path / "neox"))
    )
    assert len(rows) == 2
