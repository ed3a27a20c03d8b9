"""Run a task experiment: train and test one model per scheme, k and seed.

A trial with a file is done, so the same command resumes, and several processes (`--shard i/n`)
write into one folder. Each writes the table of all trials that are done by then.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from olmo_sparsity.base.conform import with_crc
from olmo_sparsity.base.devices import choose_device, device_name
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import read_json, sha256_of, write_atomically
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.progress import Progress
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
    command = " ".join(["python -m study.tasks", config_path, *overrides])
    return run_settings(load_settings(config_path, overrides), command=command, shard=shard)


def run_settings(
    settings: ExperimentSettings, *, command: str = "", shard: tuple[int, int] = (0, 1)
) -> list[Row]:
    """Run the unfinished trials; returns all rows of the folder."""
    device = choose_device(settings.device)
    folder, fixed = Path(settings.output), fixed_settings(settings)
    work = WorkFolder(folder, "output")
    work.create("trials")
    identity = work.identify(fixed, with_defaults)
    trials = list_trials(settings)[shard[0] :: shard[1]]
    todo = [trial for trial in trials if not _file_of(folder, trial).is_file()]
    num_steps, num_threads = settings.training.num_steps, torch.get_num_threads()
    torch.set_num_threads(1)  # models this small gain nothing from more, and sums round differently
    try:
        with Progress("trials", total=len(trials) * num_steps, unit="steps") as progress:
            progress.resume_at((len(trials) - len(todo)) * num_steps)
            for trial in todo:
                before = progress.done

                def report(step: int, loss: float, at: int = before, of: Trial = trial) -> None:
                    progress.update(at + step, trial=of.name, loss=f"{loss:.3f}")

                progress.note(run_trial(settings, device, folder, trial, report))
    finally:
        torch.set_num_threads(num_threads)
    with locked(folder, waits=True):  # the last shard's table has the trials of all
        rows, of_trials = _collect(folder, identity)
        about = {"command": command, "settings": fixed} | of_trials
        write_rows(folder / TABLE, rows, about | provenance(device_name(device)))
    return rows


def list_trials(settings: ExperimentSettings) -> list[Trial]:
    """Ordered by seed, so that an interrupted experiment has complete seeds."""
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
    """See trial.Course."""

    num_parameters: int
    training_seconds: float
    seconds: float
    cpu_seconds: float


def run_trial(
    settings: ExperimentSettings, device: torch.device, folder: Path, trial: Trial, report: Report
) -> str:
    """Write the trial's file, at once or from where it was stopped; returns a line on its shortest
    and its longest length."""
    started, cpu_started = time.perf_counter(), time.process_time()
    bench = Bench(settings, trial, device)
    kept = _file_of(folder, trial).with_suffix(".pt")
    model, course = train(bench, report, kept)
    training_seconds = time.perf_counter() - started
    rows = measure(bench, model)
    seconds = time.perf_counter() - started
    done = Trained(
        sha256_of(folder / "settings.json"),
        rows,
        course.losses,
        course.mastered,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        training_seconds=round(training_seconds, 1),
        seconds=round(seconds, 1),
        cpu_seconds=round(time.process_time() - cpu_started, 1),
    )
    write_atomically(_file_of(folder, trial), json.dumps(with_crc(asdict(done)), indent=1) + "\n")
    kept.unlink(missing_ok=True)
    ends = min(rows, key=lambda row: row.length), max(rows, key=lambda row: row.length)
    said = ", ".join(f"{row.exact_match:.3f} at {row.length}" for row in ends)
    return f"{trial.name}: exact match {said}; {seconds:.0f} s"


# --- the folder -----------------------------------------------------------------------------------


def _file_of(folder: Path, trial: Trial) -> Path:
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
    """The settings that must not change between two starts."""
    return {key: value for key, value in asdict(settings).items() if key not in MAY_CHANGE}


def with_defaults(stored: dict[str, Any]) -> dict[str, Any]:
    """Return stored settings, with defaults for settings that did not exist then."""
    return cast(dict[str, Any], merge(fixed_settings(ExperimentSettings()), stored))


def _collect(folder: Path, identity: str) -> tuple[list[Row], dict[str, Any]]:
    """All rows, and the seconds, last training loss and step of mastery of each trial."""
    rows: list[Row] = []
    of_trials: dict[str, dict[str, Any]] = {"seconds": {}, "losses": {}, "mastered": {}}
    for path in sorted((folder / "trials").glob("*.json")):
        trained = _read_trial(path, identity)
        rows += trained.rows
        of_trials["seconds"][path.stem] = trained.seconds
        of_trials["losses"][path.stem] = round(trained.losses[-1][1], 4)
        of_trials["mastered"][path.stem] = trained.mastered
    return rows, {f"trial_{name}": of for name, of in of_trials.items()}
