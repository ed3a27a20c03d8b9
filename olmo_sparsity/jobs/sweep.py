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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_sparsity.config.file import fill_in, load_config, read_given
from olmo_sparsity.config.shipped import find_config
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.jobs.job import Job
from olmo_sparsity.model.checkpoint_files import list_checkpoints
from olmo_sparsity.training.run_folder import read_metrics


@dataclass
class SweepConfig:
    folder: str = ""
    configs: list[str] = field(default_factory=list)
    grid: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run(Job):
    config: str
    overrides: list[str]

    @property
    def text(self) -> str:
        return shlex.join(["olmo-sparsity", "train", self.config, *self.overrides])

    def saved(self) -> int:
        return next((int(path.name[4:]) for path in list_checkpoints(self.folder)), 0)

    def reached(self) -> int:
        logged = [row["step"] for row in read_metrics(self.folder / "metrics.jsonl")]
        return max(logged, default=0)


def expand(path: str, overrides: list[str]) -> list[Run]:
    """The runs of a grid, in order, with checked configs. Overrides apply to all of them."""
    sweep = fill_in(SweepConfig, read_given(path), path)
    if not sweep.folder or not sweep.configs:
        raise ConfigError(f"{path}: a sweep needs `folder` and `configs`")
    axes = [_choices(path, axis, values) for axis, values in sweep.grid.items()]
    runs = []
    for name in sweep.configs:
        config = os.path.relpath(find_config(name, find_config(path)))
        for choices in itertools.product(*axes):
            names = (as_name(label) for label, _ in choices)
            labels = dict(zip(sweep.grid, names, strict=True))
            parts = [as_name(Path(name).stem), *filter(None, labels.values())]
            folder = Path(sweep.folder) / "_".join(parts)
            chosen = [_name_axes(word, labels) for _, words in choices for word in words]
            words = [*chosen, *overrides, f"--run_folder={folder}"]
            num_steps = load_config(config, words).training.num_steps
            runs.append(Run(folder.name, folder, num_steps, (), config, words))
    for name, count in Counter(run.name for run in runs).items():
        if count > 1:
            raise ConfigError(
                f"{path}: {count} runs would be called {name}; rename a config or choice"
            )
    return runs


def _choices(path: str, axis: str, values: Any) -> list[tuple[str, list[str]]]:
    """The choices of one axis: for each, its part of the run's name, and its overrides."""
    if isinstance(values, list) and values:
        leaf, texts = axis.rsplit(".", 1)[-1], [as_text(value) for value in values]
        return [(leaf + text if len(texts) > 1 else "", [f"--{axis}={text}"]) for text in texts]
    if is_named(values):
        return [
            (str(label), [f"--{key}={as_text(value)}" for key, value in keys.items()])
            for label, keys in values.items()
        ]
    raise ConfigError(
        f"{path}: grid.{axis} must be a list of values, or names each with `key: value` pairs"
    )


def is_named(values: Any) -> bool:
    """Whether they are names, each with `key: value` pairs."""
    return (
        isinstance(values, dict)
        and len(values) > 0
        and all(isinstance(keys, dict) for keys in values.values())
    )


def as_name(label: str) -> str:
    return re.sub(r"[^\w.+-]", "-", label)


def _name_axes(word: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{([^{}]+)\}", lambda match: labels.get(match[1], match[0]), word)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
