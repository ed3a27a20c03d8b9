"""Run a task experiment: train and test one model per scheme, k and seed (`run`).

A folder of results holds

    settings.json       the settings that must not change
    trials/NAME.json    rows of a trained model; a trial with this file is done
    trials/NAME.pt      the state of a training that was stopped
    accuracy.parquet    rows of all trials

So the same command resumes, and several processes (`--shard i/n`) write into one folder. Each
writes the table of all trials that are done by then.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from olmo_sparsity.base.devices import choose_device, device_name
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import read_json, sha256_of, write_atomically
from olmo_sparsity.base.json_text import with_crc
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.base.provenance import provenance
from olmo_sparsity.base.work_folder import WorkFolder
from olmo_sparsity.config.yaml_files import merge
from study.tables_of_rows import write_rows
from study.tasks.results import TABLE, Row
from study.tasks.settings import (
    MAY_CHANGE,
    ExperimentSettings,
    each,
    load_settings,
)
from study.tasks.trial import Bench, Report, Trial, measure, train


def run(config_path: str, overrides: list[str], shard: tuple[int, int] = (0, 1)) -> list[Row]:
    """Run the experiment of a file. `shard`: number of this process, and of all of them."""
    command = " ".join(["python -m study.tasks", config_path, *overrides])
    return run_settings(load_settings(config_path, overrides), command=command, shard=shard)


def run_settings(
    settings: ExperimentSettings, *, command: str = "", shard: tuple[int, int] = (0, 1)
) -> list[Row]:
    """Run the unfinished trials of this shard, and return all rows of the folder."""
    device = choose_device(settings.device)
    folder = Path(settings.output)
    fixed = fixed_settings(settings)
    work = WorkFolder(folder, "output")
    work.create("trials")
    identity = work.identify(fixed, with_defaults)
    shard_index, num_shards = shard
    trials = list_trials(settings)[shard_index::num_shards]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small gain nothing from more, and sums round differently
    try:
        _run_unfinished(settings, device, folder, trials)
    finally:
        torch.set_num_threads(num_threads)
    with locked(folder, waits=True):  # the last shard's table has the trials of all
        collected = _collect(folder, identity)
        about = {"command": command, "settings": fixed} | collected.about_trials
        write_rows(folder / TABLE, collected.rows, about | provenance(device_name(device)))
    all_trials = list_trials(settings)
    num_finished = sum(_file_of(folder, trial).is_file() for trial in all_trials)
    if num_finished < len(all_trials):
        say(
            f"{num_finished} of {len(all_trials)} trials are finished, and the table has these "
            "alone: run the other shards, too"
        )
    return collected.rows


def _run_unfinished(
    settings: ExperimentSettings, device: torch.device, folder: Path, trials: list[Trial]
) -> None:
    """Run those of these trials that have no file."""
    unfinished = [trial for trial in trials if not _file_of(folder, trial).is_file()]
    num_steps = settings.training.num_steps
    with Progress("trials", total=len(trials) * num_steps, unit="steps") as progress:
        progress.resume_at((len(trials) - len(unfinished)) * num_steps)
        for trial in unfinished:
            report = _report_to(progress, trial)
            progress.note(run_trial(settings, device, folder, trial, report))


def _report_to(progress: Progress, trial: Trial) -> Report:
    """Return a function that shows the steps of a trial, after those of the trials before it."""
    steps_before = progress.done

    def report(step: int, loss: float) -> None:
        if progress.done == steps_before:  # the first step: that of a trial that goes on is later
            progress.skip(step - 1)
        progress.update(steps_before + step, trial=trial.name, loss=f"{loss:.3f}")

    return report


def list_trials(settings: ExperimentSettings) -> list[Trial]:
    """Return all trials, ordered by seed, so that an interrupted experiment has complete seeds."""
    return [
        Trial(scheme, train_k, seed)
        for seed in settings.seeds
        for train_k in each(settings.train_ks)
        for scheme in settings.schemes
    ]


@dataclass(frozen=True)
class Trained:
    """The file of a trial."""

    identity: str
    """SHA-256 of the experiment's settings.json."""

    rows: list[Row]
    losses: list[list[float]]
    mastered: int | None
    """The step of the first check that each k passed. None: no check was passed, or asked for."""

    num_parameters: int
    training_seconds: float
    seconds: float
    cpu_seconds: float


def run_trial(
    settings: ExperimentSettings, device: torch.device, folder: Path, trial: Trial, report: Report
) -> str:
    """Train and test a model, and write the trial's file. A trial that was stopped goes on from its
    state. Return a line on its shortest and its longest length."""
    started = time.perf_counter()
    cpu_started = time.process_time()
    bench = Bench(settings, trial, device)
    state_file = _file_of(folder, trial).with_suffix(".pt")
    model, course = train(bench, report, state_file)
    training_seconds = time.perf_counter() - started
    rows = measure(bench, model)
    seconds = time.perf_counter() - started
    trained = Trained(
        sha256_of(folder / "settings.json"),
        rows,
        course.losses,
        course.mastered,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        training_seconds=round(training_seconds, 1),
        seconds=round(seconds, 1),
        cpu_seconds=round(time.process_time() - cpu_started, 1),
    )
    stored = json.dumps(with_crc(asdict(trained)), indent=1)
    write_atomically(_file_of(folder, trial), stored + "\n")
    state_file.unlink(missing_ok=True)
    shortest = min(rows, key=lambda row: row.length)
    longest = max(rows, key=lambda row: row.length)
    ends = [f"{row.exact_match:.3f} at {row.length}" for row in (shortest, longest)]
    return f"{trial.name}: exact match {', '.join(ends)}; {seconds:.0f} s"


# --- the folder -----------------------------------------------------------------------------------


def _file_of(folder: Path, trial: Trial) -> Path:
    """Return the file of a finished trial."""
    return folder / "trials" / f"{trial.name}.json"


def read_trials(folder: Path) -> list[tuple[Trial, Trained]]:
    """Return the finished trials of an experiment's folder, by scheme, k and seed."""
    finished = []
    for path in (folder / "trials").glob("*.json"):
        trained = _read_trial(path, sha256_of(folder / "settings.json"))
        row = trained.rows[0]
        finished.append((Trial(row.scheme, row.train_k, row.seed), trained))
    return sorted(finished, key=lambda pair: (pair[0].scheme, pair[0].train_k or 0, pair[0].seed))


def _read_trial(path: Path, identity: str) -> Trained:
    remedy = "delete it and start again"
    trained = read_json(path, Trained, remedy)
    names = {Trial(row.scheme, row.train_k, row.seed).name for row in trained.rows}
    if names != {path.stem} or trained.identity != identity:
        raise DataError(f"{path} is of another trial or experiment; {remedy}")
    return trained


def fixed_settings(settings: ExperimentSettings) -> dict[str, Any]:
    """Return the settings that must not change between two starts."""
    return {key: value for key, value in asdict(settings).items() if key not in MAY_CHANGE}


def with_defaults(stored: dict[str, Any]) -> dict[str, Any]:
    """Return stored settings, with defaults for settings that did not exist then."""
    return cast(dict[str, Any], merge(fixed_settings(ExperimentSettings()), stored))


@dataclass(frozen=True)
class _Collected:
    """What is known of all finished trials."""

    rows: list[Row]
    about_trials: dict[str, Any]
    """Seconds, last training loss and step of mastery, by the names of trials."""


def _collect(folder: Path, identity: str) -> _Collected:
    """Read all finished trials."""
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    losses: dict[str, float] = {}
    mastered: dict[str, int | None] = {}
    for path in sorted((folder / "trials").glob("*.json")):
        trained = _read_trial(path, identity)
        rows += trained.rows
        seconds[path.stem] = trained.seconds
        _, last_loss = trained.losses[-1]
        losses[path.stem] = round(last_loss, 4)
        mastered[path.stem] = trained.mastered
    about = {"trial_seconds": seconds, "trial_losses": losses, "trial_mastered": mastered}
    return _Collected(rows, about)
