"""Run named experiments from one file: each has commands, dependencies and outputs.

Place in the flow: beside the command line. Each experiment is a job of jobs.py: finished ones are
not run again, and a stopped one resumes at its current command.

    folder: runs/evidence                  # records of finished commands
    parts: [text]                          # which to run (--parts=[text,tasks]), with their needs
    options: {windows: --long 96 --short 32}
    experiments:
      taught:
        part: text
        commands: [olmo-sparsity train configs/induction.yaml]
      measured:
        part: text
        needs: [taught]
        grid:                              # one experiment for each choice of each axis:
          far: [contextual, isolated]      # values, names each with `key: value` pairs, or a sweep,
          # run: ../sweeps/quick.yaml      # (as seen from this file) whose runs are the values
        commands:
          - olmo-sparsity measure runs/x ${options.windows} --far-states {far} --out results/{far}
        outputs: [results/{far}/meta.json]

`{far}` stands for the value; the keys of a named value have their own names. A need without choices
means all of them. Commands run without a shell, but `*` is expanded when the command starts, except
in options.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from olmo_sparsity.errors import ConfigError, UserError
from olmo_sparsity.folders import locked
from olmo_sparsity.io import read_json, write_atomically
from olmo_sparsity.jobs.job import Job, own_environment, run_process
from olmo_sparsity.jobs.sweep import as_name, expand, expand_grid
from olmo_sparsity.runtime import EXIT_STOPPED, read_launch, say
from olmo_sparsity.settings import find_config, load, read_given


@dataclass
class ExperimentConfig:
    part: str = ""
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

    experiments: dict[str, ExperimentConfig] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment(Job):
    part: str
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
    for name, given in config.experiments.items():
        made = _expand(path, Path(config.folder), name, given)
        for known, jobs in [(name, made), *((job.name, [job]) for job in made if job.name != name)]:
            if known in of:
                raise ConfigError(f"{path}: two experiments are called {known}")
            of[known] = jobs
    parts = {given.part for given in config.experiments.values()}
    if unknown := set(config.parts) - parts:
        raise ConfigError(
            f"{path}: no experiment is of part {', '.join(sorted(unknown))}; there are "
            f"{', '.join(sorted(parts))}"
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

    for name in config.experiments:
        for experiment in of[name]:
            if experiment.part in config.parts:
                add(experiment)
    return list(ordered.values())


def _expand(path: str, folder: Path, name: str, given: ExperimentConfig) -> list[Experiment]:
    if not given.part or not given.commands:
        raise ConfigError(f"{path}: experiments.{name} needs `part` and `commands`")
    where = f"{path}: experiments.{name}"
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
                part=given.part,
                commands=tuple(" ".join(put(text).split()) for text in given.commands),
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
        raise ConfigError(
            f"{where} has no {{{key}}} in its grid"
            + (f", which has {', '.join(values)}" if values else "")
        )
    return values[key]
