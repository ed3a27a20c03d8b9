"""Expand a small file into many training runs: all configs × all choices of a grid.

Place in the flow: beside the command line. Each run is an ordinary `olmo-sparsity train` into its
own folder, and a job of jobs.py.

    folder: runs/pose_pays                 # holds the folders of the runs
    configs: [../quick.yaml]               # as seen from this file
    grid:
      seed: [1, 2, 3]                      # an axis: a key and its values …
      scheme:                              # … or a name and named sets of keys
        pose: {}
        rope: {positions.scheme: contiguous, positions.target_length: null}

In a value, `{seed}` stands for the axis's part of the run's name (seed1), so that a sweep can start
from the runs of another: `init_from: ["runs/school/quick_{seed}"]`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.jobs.job import Job, State
from olmo_sparsity.model.checkpoint_files import list_checkpoints
from olmo_sparsity.settings import find_config, load
from olmo_sparsity.training.run_folder import is_work_of, read_metrics


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
