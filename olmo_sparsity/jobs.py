"""Run resumable jobs here or on SLURM: sweeps of training runs, and experiments of commands.

The state of a job is read from its folder alone, whoever ran it, wherever, and however often it was
stopped. A sweep is a file that expands to training runs, all configs × all choices of a grid:

    folder: runs/pose_pays                 # holds the folders of the runs
    configs: [../quick.yaml]               # as seen from this file
    grid:
      seed: [1, 2, 3]                      # an axis: a key and its values …
      scheme:                              # … or a name and named sets of keys
        pose: {}
        rope: {positions.scheme: contiguous, positions.target_length: null}

In a value, `{seed}` is replaced by the axis's part of the run's name (seed1), so that a sweep can
start from the runs of another: `init_from: ["runs/school/quick_{seed}"]`.

An experiment has commands, dependencies and outputs. Finished commands are not run again:

    folder: runs/evidence                  # records of finished commands
    parts: [text]                          # which to run (--parts=[text,tasks]), with their needs
    options: {windows: --long 96 --short 32}
    experiments:
      text:                                # a part
        taught:
          commands: [olmo-sparsity train configs/induction.yaml]
        measured:
          needs: [taught]                  # of any part
          grid:                            # one experiment for each choice of each axis:
            far: [contextual, isolated]    # values, names each with `key: value` pairs, or a sweep,
            # run: ../sweeps/quick.yaml    # (relative to this file); its runs are the values
          commands:
            - olmo-sparsity measure runs/x ${options.windows} --far-states {far} --out results/{far}
          outputs: [results/{far}/meta.json]

`{far}` is replaced by the value; the keys of a named value have their own names. A need without
choices means all of them. Commands run without a shell, but `*` is expanded when the command
starts, except in options."""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.errors import ConfigError, ReportedElsewhere, UserError
from olmo_sparsity.folders import holder, locked
from olmo_sparsity.io import read_bounded, read_json, write_atomically
from olmo_sparsity.model.checkpoint_files import list_checkpoints
from olmo_sparsity.runtime import EXIT_STOPPED, STOP_SIGNALS, handling, read_launch, say
from olmo_sparsity.settings import find_config, load, read_given
from olmo_sparsity.training.run_folder import is_work_of, read_metrics


@dataclass(frozen=True)
class State:
    name: str
    """done, running, failed or waiting."""

    step: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Job(ABC):
    """Resumable work that fills a folder, which it locks while it runs."""

    name: str
    folder: Path
    num_steps: int
    needs: tuple[str, ...]
    """Names of jobs that must be done before this one."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The command, for display."""

    @abstractmethod
    def saved(self) -> int:
        """Number of steps that are saved."""

    def reached(self) -> int:
        """Number of steps done, saved or not."""
        return self.saved()

    @property
    def note(self) -> Path:
        """A file next to the folder with the error message of the last failure."""
        return self.folder.with_name(self.folder.name + ".failed")

    def is_done(self) -> bool:
        return self.saved() >= self.num_steps

    def state(self) -> State:
        saved = self.saved()
        if saved >= self.num_steps:
            return State("done", saved)
        owner, alive = holder(self.folder)
        if owner is not None:
            where = f"on {owner.host}" + (f", job {owner.slurm_job}" if owner.slurm_job else "")
            name, detail = ("running", where) if alive else ("failed", f"died {where}")
            return State(name, self.reached(), detail)
        if self.note.is_file():
            note = read_bounded(self.note).decode(errors="replace")
            return State("failed", self.reached(), " ".join(note.split()))
        return State("waiting", saved)


def format_states(jobs: Sequence[Job]) -> str:
    states = [job.state() for job in jobs]
    width = max(len(job.name) for job in jobs)
    lines = [
        f"{job.name:<{width}}  {state.name:<8}{state.step:>9,}/{job.num_steps:<9,} {state.detail}"
        for job, state in zip(jobs, states, strict=True)
    ]
    counts = Counter(state.name for state in states)
    total = ", ".join(f"{counts[name]} {name}" for name in ("done", "running", "failed", "waiting"))
    return "\n".join([*(line.rstrip() for line in lines), f"{len(jobs)} runs: {total}"])


@contextlib.contextmanager
def recording_failure(job: Job) -> Iterator[None]:
    """Write the note of a job that fails inside."""
    job.note.unlink(missing_ok=True)
    try:
        yield
    except ReportedElsewhere:
        raise
    except Exception as error:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.note, str(error) or type(error).__name__)
        raise


def run_here(path: str, overrides: list[str], jobs: Sequence[Job]) -> int:
    """Run the unfinished jobs one after the other, each in its own process. A job with needs that
    failed waits."""
    failed = []
    for number, job in enumerate(jobs):
        if job.state().name in ("done", "running") or unfinished_needs(job, jobs):
            continue
        say(f"{job.name}: {job.text}")
        words = ["sweep", path, f"--only={number}", *overrides]
        code, stopped = run_process([sys.executable, "-P", "-m", "olmo_sparsity", *words])
        if stopped:
            return EXIT_STOPPED
        if code != 0:
            failed.append(job.name)
    print(format_states(jobs))
    if failed:
        raise UserError(f"{', '.join(failed)}: failed; the same command tries again")
    return 0


def unfinished_needs(job: Job, jobs: Sequence[Job]) -> list[str]:
    return [other.name for other in jobs if other.name in job.needs if not other.is_done()]


def run_process(
    command: Sequence[str], environment: dict[str, str] | None = None
) -> tuple[int, bool]:
    """Run a command. Returns its exit code, and whether it or this process got a signal to stop: it
    may have ended well all the same."""
    child: subprocess.Popen | None = None
    signals, early = [], []

    def pass_on(number: int, _: object) -> None:
        signals.append(number)
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    with handling(STOP_SIGNALS, pass_on):
        # In its own process group, or Ctrl-C would reach it twice, and the second kills it.
        child = subprocess.Popen(command, process_group=0, env=environment)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    return code, bool(signals) or code == EXIT_STOPPED


def submit(path: str, overrides: list[str], jobs: Sequence[Job], flags: str) -> int:
    """Submit the jobs that are neither done nor running, as one SLURM array for each set of
    needs."""
    script = Path("slurm/train.sbatch")
    if not script.exists():
        raise ConfigError(f"{script} is not here; submit from the root of olmo-sparsity")
    # A running job may have been started by hand, without a SLURM job to depend on.
    todo = {i: job for i, job in enumerate(jobs) if job.state().name not in ("done", "running")}
    if not todo:
        print(format_states(jobs))
        return 0
    arrays: dict[tuple[str, ...], list[int]] = {}
    names = {job.name for job in todo.values()}
    for i, job in todo.items():
        arrays.setdefault(tuple(name for name in job.needs if name in names), []).append(i)
    submitted: dict[str, str] = {}
    for needs, numbers in arrays.items():  # in order of dependency
        words = ["sbatch", *shlex.split(flags)]
        if needs:
            waits = ":".join(submitted[name] for name in needs)
            words += [f"--dependency=afterok:{waits}", "--kill-on-invalid-dep=yes"]
        words += [f"--array={','.join(map(str, numbers))}", str(script), path, *overrides]
        say(shlex.join(words))
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            raise ConfigError("sbatch is not here; leave --slurm out to run one by one") from None
        print(done.stdout, end="")
        if done.returncode != 0:
            raise UserError(f"sbatch ended with {done.returncode}; nothing more is submitted")
        match = re.search(r"Submitted batch job (\d+)", done.stdout)
        if match is None:
            raise UserError(f"sbatch printed no job number: {done.stdout.strip()}")
        submitted |= {jobs[i].name: f"{match[1]}_{i}" for i in numbers}
    return 0


def own_environment() -> dict[str, str]:
    """The environment for a single-process command, without the variables of this launch."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
    environment = {name: text for name, text in os.environ.items() if name not in launched}
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    )
    return environment


# --- sweeps ---------------------------------------------------------------------------------------


@dataclass
class SweepConfig:
    folder: str = ""
    configs: list[str] = field(default_factory=list)
    grid: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run(Job):
    config: str
    overrides: list[str]
    settings: RunConfig

    @property
    def text(self) -> str:
        return shlex.join(["olmo-sparsity", "train", self.config, *self.overrides])

    def saved(self) -> int:
        if not is_work_of(self.settings):
            return 0
        return next((int(path.name[4:]) for path in list_checkpoints(self.folder)), 0)

    def state(self) -> State:
        if not is_work_of(self.settings):
            return State("failed", 0, f"{self.folder} holds work with other settings")
        return super().state()

    def reached(self) -> int:
        logged = [row["step"] for row in read_metrics(self.folder / "metrics.jsonl")]
        return max(logged, default=0)


def expand(path: str, overrides: list[str]) -> list[Run]:
    """The runs of a grid, in order, with checked configs. Overrides apply to all of them."""
    sweep = load(SweepConfig, path)
    if not sweep.folder or not sweep.configs:
        raise ConfigError(f"{path}: a sweep needs `folder` and `configs`")
    runs = []
    for name in sweep.configs:
        config = os.path.relpath(find_config(name, find_config(path)))
        for labels, values in expand_grid(f"{path}: grid", sweep.grid):
            names = {axis: _part(axis, sweep.grid[axis], label) for axis, label in labels.items()}
            parts = [as_name(Path(name).stem), *filter(None, names.values())]
            folder = Path(sweep.folder) / "_".join(parts)
            chosen = [_name_axes(f"--{key}={value}", names) for key, value in values.items()]
            words = [*chosen, *overrides, f"--run_folder={folder}"]
            settings = load_config(config, words)
            num_steps = settings.training.num_steps
            runs.append(Run(folder.name, folder, num_steps, (), config, words, settings))
    for name, count in Counter(run.name for run in runs).items():
        if count > 1:
            raise ConfigError(
                f"{path}: {count} runs would be called {name}; rename a config or choice"
            )
    return runs


def expand_grid(
    where: str, grid: dict[str, Any]
) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """All choices of all axes, in order: what is chosen of each axis, and the keys that it sets.
    An axis is a key and its values, or a name and named sets of keys."""
    for axis, values in grid.items():
        named = isinstance(values, dict) and all(isinstance(k, dict) for k in values.values())
        if not values or not (named or isinstance(values, list)):
            raise ConfigError(
                f"{where}.{axis} must be a list of values, or names each with `key: value` pairs"
            )
    axes = [
        [(str(label), keys) for label, keys in values.items()]
        if isinstance(values, dict)
        else [(_as_text(value), {axis: value}) for value in values]
        for axis, values in grid.items()
    ]
    for chosen in itertools.product(*axes):
        labels = {axis: label for axis, (label, _) in zip(grid, chosen, strict=True)}
        yield labels, {key: _as_text(value) for _, keys in chosen for key, value in keys.items()}


def _part(axis: str, values: Any, label: str) -> str:
    """The part of a run's name that says what is chosen of an axis."""
    if isinstance(values, dict):
        return as_name(label)
    return as_name(axis.rsplit(".", 1)[-1] + label) if len(values) > 1 else ""


def as_name(label: str) -> str:
    return re.sub(r"[^\w.+-]", "-", label)


def _name_axes(word: str, names: dict[str, str]) -> str:
    return re.sub(r"\{([^{}]+)\}", lambda match: names.get(match[1], match[0]), word)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --- experiments ----------------------------------------------------------------------------------


@dataclass
class ExperimentConfig:
    needs: list[str] = field(default_factory=list)
    grid: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    """Files and folders that must exist when it is done."""


@dataclass
class ExperimentsConfig:
    folder: str = ""
    parts: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    """Text for `${options.NAME}` in commands."""

    experiments: dict[str, dict[str, ExperimentConfig]] = field(default_factory=dict)
    """By part and name."""


@dataclass(frozen=True)
class Experiment(Job):
    commands: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def text(self) -> str:
        return "; ".join(self.commands)

    @property
    def record(self) -> Path:
        return self.folder / "done.json"

    def saved(self) -> int:
        """The number of finished commands that are still the same."""
        if not self.record.is_file():
            return 0
        done = read_json(self.record, list[str], "delete it")
        if len(done) == self.num_steps and self.missing():
            return 0
        same = [was == now for was, now in zip(done, self.commands, strict=False)]
        return [*same, False].index(False)

    def missing(self) -> list[str]:
        return [name for name in self.outputs if not Path(name).exists()]

    def run(self) -> int:
        """Run the unfinished commands in order, each in its own process."""
        if read_launch().world_size > 1:
            raise ConfigError("an experiment is one process; start it with one task per job")
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            for number in range(self.saved(), self.num_steps):
                command = self.commands[number]
                say(f"{self.name}: {command}")
                try:
                    code, stopped = run_process(words_of(command), own_environment())
                except FileNotFoundError:
                    raise ConfigError(f"'{command.split()[0]}' is not here; install it") from None
                if code == 0:
                    write_atomically(self.record, json.dumps(self.commands[: number + 1], indent=1))
                if stopped:
                    return EXIT_STOPPED
                if code != 0:
                    raise UserError(f"`{command}` ended with exit code {code}")
            if missing := self.missing():
                raise UserError(f"{self.name} did not make {', '.join(missing)}")
        return 0


def words_of(command: str) -> list[str]:
    words = []
    for word in shlex.split(command):
        matches = sorted(glob.glob(word)) if "*" in word and not word.startswith("-") else []
        words += matches or [word]
    return words


def read_jobs(path: str, overrides: list[str]) -> Sequence[Job]:
    """The jobs of a file of experiments or of a sweep (sweep.py)."""
    if "experiments" not in read_given(path):
        return expand(path, overrides)
    return read_experiments(path, overrides)


def read_experiments(path: str, overrides: list[str]) -> list[Experiment]:
    """The experiments of the chosen parts and their needs, in order of dependency."""
    config = load(ExperimentsConfig, path, overrides)
    if not config.folder or not config.parts:
        raise ConfigError(f"{path}: experiments need `folder` and `parts`")
    of: dict[str, list[Experiment]] = {}  # by name, with and without choices
    named = [pair for part in config.experiments.values() for pair in part.items()]
    for name, given in named:
        made = _expand(path, Path(config.folder), name, given)
        for known, jobs in [(name, made), *((job.name, [job]) for job in made if job.name != name)]:
            if known in of:
                raise ConfigError(f"{path}: two experiments are called {known}")
            of[known] = jobs
    if unknown := set(config.parts) - set(config.experiments):
        raise ConfigError(
            f"{path}: no experiment is of part {', '.join(sorted(unknown))}; there are "
            f"{', '.join(config.experiments)}"
        )
    ordered: dict[str, Experiment] = {}

    def add(experiment: Experiment, above: tuple[str, ...] = ()) -> None:
        if experiment.name in above:
            raise ConfigError(f"{path}: {experiment.name} needs itself")
        if experiment.name in ordered:
            return
        needs = []
        for need in experiment.needs:
            if need not in of:
                raise ConfigError(f"{path}: {experiment.name} needs {need}, which is not there")
            for other in of[need]:
                add(other, (*above, experiment.name))
                needs.append(other.name)
        ordered[experiment.name] = replace(experiment, needs=tuple(dict.fromkeys(needs)))

    for part in config.parts:
        for name in config.experiments[part]:
            for experiment in of[name]:
                add(experiment)
    return list(ordered.values())


def _expand(path: str, folder: Path, name: str, given: ExperimentConfig) -> list[Experiment]:
    where = f"{path}: experiment {name}"
    if not given.commands:
        raise ConfigError(f"{where} has no `commands`")
    grid = {axis: _runs_of_sweep(path, values) for axis, values in given.grid.items()}
    made = []
    for labels, keys in expand_grid(f"{where}.grid", grid):
        values = labels | keys

        def put(text: str, values: dict[str, str] = values) -> str:
            return re.sub(r"\{(\w+)\}", lambda match: _value(where, values, match[1]), text)

        label = "_".join([name, *map(as_name, labels.values())])
        made.append(
            Experiment(
                name=label,
                folder=folder / label,
                num_steps=len(given.commands),
                needs=tuple(map(put, given.needs)),
                commands=tuple(put(text).strip() for text in given.commands),
                outputs=tuple(map(put, given.outputs)),
            )
        )
    return made


def _runs_of_sweep(path: str, values: Any) -> Any:
    """An axis may be the path of a sweep."""
    if not isinstance(values, str):
        return values
    sweep = os.path.relpath(find_config(values, find_config(path)))
    return [run.name for run in expand(sweep, [])]


def _value(where: str, values: dict[str, str], key: str) -> str:
    if key not in values:
        there = f", which has {', '.join(values)}" if values else ""
        raise ConfigError(f"{where} has no {{{key}}} in its grid{there}")
    return values[key]
