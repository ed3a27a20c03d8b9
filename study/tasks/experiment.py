"""Run a task experiment: train and test one model per scheme, k and seed (the command `task`).

Place in the flow: settings → trials, in parallel → trials/*.json → accuracy.parquet → figure.py.

A trial with a file is done, so the same command resumes, and the parts of a SLURM array
(`--shard i/n`) write into one folder. The last one to finish writes the complete table.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

import torch

from olmo_sparsity.conform import with_crc
from olmo_sparsity.errors import DataError, UserError
from olmo_sparsity.folders import WorkFolder, locked
from olmo_sparsity.io import read_json, sha256_of, write_atomically
from olmo_sparsity.runtime import Progress, choose_device, device_name, provenance
from olmo_sparsity.settings import merge
from study.tasks.results import Row, check_rows, read_results, write_results
from study.tasks.settings import (
    MAY_CHANGE,
    ExperimentSettings,
    build_task,
    each,
    load_settings,
    tests,
)
from study.tasks.trial import Bench, Report, Trial, measure, train


def run(config_path: str, overrides: list[str], shard: tuple[int, int] = (0, 1)) -> list[Row]:
    settings = load_settings(config_path, overrides)
    command = " ".join(["olmo-sparsity", "task", config_path, *overrides])
    return run_settings(settings, command=command, shard=shard)


def run_settings(
    settings: ExperimentSettings, *, command: str = "", shard: tuple[int, int] = (0, 1)
) -> list[Row]:
    """Run the unfinished trials; returns all rows of the folder."""
    device = choose_device(settings.device)
    made_by = provenance(device_name(device))
    folder, fixed = Path(settings.output), fixed_settings(settings)
    work = WorkFolder(folder, "output")
    work.create("trials")
    identity = work.identify(fixed, with_defaults)
    trials = list_trials(settings)[shard[0] :: shard[1]]
    todo = [trial for trial in trials if not _file_of(folder, trial).is_file()]
    num_left_out = len(settings.test_lengths) * len(each(settings.test_ks))
    num_left_out -= len(tests(settings, build_task(settings, test=True)))
    if num_left_out:
        print(
            f"{num_left_out} pairs of test length and k are not tested: k does not fit the length"
        )
    if todo:
        if not os.access(folder / "trials", os.W_OK):
            raise UserError(f"output={folder} cannot be written; name a folder of your own")
        run, num_steps = partial(run_trial, settings, device, folder), settings.training.num_steps
        with Progress("trials", total=len(trials) * num_steps, unit="steps") as progress:
            progress.resume_at((len(trials) - len(todo)) * num_steps)
            if settings.num_workers == 1 or len(todo) < 2:
                _train_here(run, todo, progress)
            else:
                _train_in_workers(run, settings, todo, progress)
    elif (rows := _finished(folder)) == _collect(folder, identity)[0]:
        return rows  # of a folder that may be read-only
    with locked(folder, waits=True):  # the last shard's table has the trials of all
        rows, of_trials = _collect(folder, identity)
        write_results(folder, rows, {"command": command, "settings": fixed} | of_trials | made_by)
    return rows


def list_trials(settings: ExperimentSettings) -> list[Trial]:
    """Ordered by seed, so that an interrupted experiment has complete seeds."""
    return [
        Trial(scheme, train_k, seed)
        for seed in settings.seeds
        for train_k in each(settings.train_ks)
        for scheme in settings.schemes
    ]


# --- one trial ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trained:
    """The file of a trial."""

    identity: str
    """SHA-256 of the experiment's settings.json."""

    rows: list[Row]
    losses: list[list[float]]
    num_parameters: int
    training_seconds: float
    seconds: float
    cpu_seconds: float


def run_trial(
    settings: ExperimentSettings, device: torch.device, folder: Path, trial: Trial, report: Report
) -> str:
    """Write the trial's file; returns a line on its shortest and its longest length."""
    started, cpu_started = time.perf_counter(), time.process_time()
    bench = Bench(settings, trial, device)
    model, history = train(bench, report)
    training_seconds = time.perf_counter() - started
    rows = measure(bench, model)
    seconds = time.perf_counter() - started
    done = _Trained(
        sha256_of(folder / "settings.json"),
        rows,
        history,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        training_seconds=round(training_seconds, 1),
        seconds=round(seconds, 1),
        cpu_seconds=round(time.process_time() - cpu_started, 1),
    )
    write_atomically(_file_of(folder, trial), json.dumps(with_crc(asdict(done)), indent=1) + "\n")
    ends = ", ".join(
        f"{row.exact_match:.3f} at {row.length}"
        + (f" (k = {row.test_k})" if row.test_k is not None else "")
        for row in (min(rows, key=lambda r: r.length), max(rows, key=lambda r: r.length))
    )
    return f"{trial.name}: exact match {ends}; {seconds:.0f} s"


# --- many trials ----------------------------------------------------------------------------------


Run = Callable[[Trial, Report], str]
"""`run_trial` of an experiment."""


def _train_here(run: Run, todo: list[Trial], progress: Progress) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker: sums of more threads round differently
    try:
        for trial in todo:

            def report(
                step: int, loss: float, trial: Trial = trial, before: int = progress.done
            ) -> None:
                progress.update(before + step, trial=trial.name, loss=f"{loss:.3f}")

            progress.note(run(trial, report))
    finally:
        torch.set_num_threads(num_threads)


def _train_in_workers(
    run: Run, settings: ExperimentSettings, todo: list[Trial], progress: Progress
) -> None:
    earlier = progress.done
    num_done = earlier // settings.training.num_steps
    num_trials = num_done + len(todo)
    # Not forked: a child would inherit PyTorch's threads in an undefined state.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    with ProcessPoolExecutor(
        settings.num_workers, context, initializer=_start_worker, initargs=(counter,)
    ) as pool:
        try:
            # Ctrl-C reaches all processes of the group; workers inherit that it is blocked.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            # Not `futures.wait`, which locks every future: a Ctrl-C in between leaves some
            # locked, and the pool waits for them for ever.
            ended: SimpleQueue[Future[str]] = SimpleQueue()
            for trial in todo:
                future = pool.submit(_work, run, trial)
                future.add_done_callback(ended.put)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            while num_done < num_trials:
                with contextlib.suppress(Empty):
                    progress.note(ended.get(timeout=1).result())
                    num_done += 1
                progress.update(earlier + counter.value, trials=f"{num_done} of {num_trials}")
        except BrokenProcessPool:
            raise UserError(
                "a worker was killed, perhaps for want of memory; lower num_workers or "
                "training.batch_size. Finished trials are kept, the same command goes on"
            ) from None
        except Exception:
            pool.shutdown(cancel_futures=True)  # running trials finish
            raise
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.kill()
            raise


_steps_done: Synchronized[int]


def _start_worker(counter: Synchronized[int]) -> None:
    global _steps_done
    _steps_done = counter
    torch.set_num_threads(1)  # models this small gain nothing from threads
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent ends or is killed, which closes its pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _work(run: Run, trial: Trial) -> str:
    def report(step: int, loss: float) -> None:
        with _steps_done.get_lock():
            _steps_done.value += 1

    return run(trial, report)


# --- the folder -----------------------------------------------------------------------------------


def _file_of(folder: Path, trial: Trial) -> Path:
    return folder / "trials" / f"{trial.name}.json"


def fixed_settings(settings: ExperimentSettings) -> dict[str, Any]:
    """The settings that must not change between two starts."""
    return {key: value for key, value in asdict(settings).items() if key not in MAY_CHANGE}


def with_defaults(stored: dict[str, Any]) -> dict[str, Any]:
    """Return stored settings, with defaults for settings that did not exist then."""
    return cast(dict[str, Any], merge(fixed_settings(ExperimentSettings()), stored))


def _finished(folder: Path) -> list[Row]:
    with contextlib.suppress(DataError):
        return read_results(folder)[0]
    return []


def _collect(folder: Path, identity: str) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """All rows, and the seconds and last training loss of each trial."""
    rows, seconds, losses = [], {}, {}
    for path in sorted((folder / "trials").glob("*.json")):
        remedy = "delete it and start again"
        trained = read_json(path, _Trained, remedy)
        if not (trained.rows and trained.losses and len(trained.losses[-1]) == 2):
            raise DataError(f"{path}: it has no rows or no losses; {remedy}")
        names = {Trial(row.scheme, row.train_k, row.seed).name for row in trained.rows}
        if names != {path.stem} or trained.identity != identity:
            raise DataError(f"{path} is of another trial or experiment; {remedy}")
        check_rows(path, trained.rows)
        rows += trained.rows
        seconds[path.stem] = trained.seconds
        losses[path.stem] = round(trained.losses[-1][1], 4)
    return rows, {"trial_seconds": seconds, "trial_losses": losses}
