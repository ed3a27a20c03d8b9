"""Many trials: their files, their table, their end, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from olmo_sparsity.base.errors import ConfigError, DataError
from study.tasks import experiment
from study.tasks.__main__ import main
from study.tasks.results import Row, format_table, read_results
from study.tasks.schemes import SCHEMES
from study.tasks.trial import Report, Trial
from tests.conftest import small_task
from tests.study.tasks.support import make, write


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
    finished: tuple[Path, list[Row]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make(tmp_path, schemes=list(SCHEMES), seeds=[1])
    for part in range(2):
        experiment.run_settings(settings, shard=(part, 3))
        assert f"of {len(SCHEMES)} trials are finished, and the table" in capsys.readouterr().err
    assert experiment.run_settings(settings, shard=(2, 3)) == finished[1]
    assert "the table has these alone" not in capsys.readouterr().err


def test_tests_of_several_names_are_rows_apart(tmp_path: Path) -> None:
    of_task = {"task": {"name": "variable_assignment"}, "schemes": ["rope"], "seeds": [1]}
    tests = {"few": {}, "fewer": {"num_names": 60}}
    rows = experiment.run_settings(make(tmp_path, **of_task, test_tasks=tests, test_ks=[2]))
    expected = [(name, length) for name in tests for length in (4, 8)]
    assert [(row.task, row.length) for row in rows] == expected
    assert [row.exact_match for row in rows[:2]] == [row.exact_match for row in rows[2:]]


def test_other_settings_in_the_same_folder_are_refused(finished: tuple[Path, list[Row]]) -> None:
    with pytest.raises(ConfigError, match=r"holds work with test_lengths=\[4, 8\] \(now \[4\]\)"):
        experiment.run_settings(make(finished[0], test_lengths=[4]))


def test_a_trial_of_another_scheme_or_experiment_is_refused(
    finished: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    trials = tmp_path / "run" / "trials"
    settings = make(tmp_path, schemes=["rope", "ppc"], seeds=[1])
    shutil.copy(trials / "rope_seed1.json", trials / "ppc_seed1.json")
    with pytest.raises(DataError, match=r"ppc_seed1\.json is of another trial or experiment"):
        experiment.run_settings(settings)


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


K: dict[str, Any] = {"task": {"name": "sparse_parity"}, "schemes": ["rope"]}
K |= {"train_lengths": [20, 20], "test_lengths": [20], "train_ks": [4], "test_ks": [4]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**K, "train_ks": [11]}, r"train_ks=\[11\] must lie between 1 and 10"),
        ({"task": {"name": "subtraction"}}, "task.name=subtraction is not one of sparse_parity"),
        ({"train_lengths": [5, 3]}, r"train_lengths=\[5, 3\] must be \[shortest, longest\]"),
        ({"train_ks": [2], "test_ks": [2]}, "this task has no k; remove it"),
        ({**K, "schemes": ["pointers"]}, "scheme pointers: this task has no coupled IDs"),
        ({"schemes": ["auxiliary"], "task": {"name": "addition"}}, "coupled with no prompt token"),
        ({"model": {"vocab_size": 9}}, "model.vocab_size is set, but decides nothing"),
        ({"schemes": ["rope"], "positions": {"num_chunks": 9}}, "positions.num_chunks is set, but"),
        ({"schemes": ["ppc"], "positions": {"aligned_cuts": True}}, "units are single tokens"),
        (
            {"task": {"name": "variable_assignment"}, "test_tasks": {"more": {"num_names": 61}}},
            "test_tasks.more changes the vocabulary",
        ),
        (
            {"task": {"name": "variable_assignment"}, "train_ks": [2], "test_ks": [2]},
            "takes one k for all samples; leave train_ks empty",
        ),
        (
            {"training": {"num_steps": 4, "past_mastery": 2}},
            "training.past_mastery is set, but decides nothing; remove it",
        ),
    ],
)
def test_bad_input_ends_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write(small_task(tmp_path / "run") | changes, tmp_path))]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
