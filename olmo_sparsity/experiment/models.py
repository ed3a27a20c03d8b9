"""List the models of an experiment: each config with each combination of the grid.

    models: [c4.yaml]              c4_seed1_pose    --seed=1 --positions.scheme=pose
    grid: seed × positions     →   c4_seed1_rope    --seed=1 --positions.scheme=contiguous
                                   c4_seed2_pose    …

In a value of the grid, `{seed}` is replaced by the axis's part of the model's name (seed1), so that
an experiment can start from the runs of another: `init_from: runs/first/c4_{seed}`.

Place in the flow: file.py, grid.py → **`models_of`** → jobs.py, measurements.py.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.installed import find_config
from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.yaml_files import read_given
from olmo_sparsity.experiment.grid import Combination, as_name, expand_grid
from olmo_sparsity.experiment.sections import ExperimentFile


@dataclass(frozen=True)
class Model:
    """A training run of an experiment."""

    name: str
    scheme: str
    """The name without the seed: models of one scheme share label and colour."""

    seed: str
    """The part of the name that says the seed; empty if the grid has not several seeds."""

    choices: tuple[str, ...]
    """The parts of the scheme: the config's name, then the choice of each axis except the seed."""

    folder: Path
    """The run folder."""

    config: str
    """Path of the config."""

    overrides: list[str]
    """`--key.sub=value` words after the config, on the command line of `train`."""

    settings: RunConfig
    """The config with these words applied."""

    @property
    def num_steps(self) -> int:
        """Return the number of steps that the model is trained for."""
        return self.settings.training.num_steps


def is_named_by(beginning: str, name: str) -> bool:
    """Return whether `beginning` is a model's name, or the beginning of one up to an underscore, by
    which a user names several models at once."""
    return name == beginning or name.startswith(f"{beginning}_")


def models_of(
    file: ExperimentFile, path: str, overrides: list[str], measured_steps: list[int]
) -> list[Model]:
    """Return all models of an experiment.

    Args:
        file: What the file says.
        path: The path of the file.
        overrides: `--key.sub=value` words for all models.
        measured_steps: Steps before the last that are measured, so that their checkpoints must be
            kept.
    """
    maker = _ModelMaker(file, path, overrides, measured_steps)
    models = []
    for name in file.models:
        config = os.path.relpath(find_config(name, find_config(path)))
        for combination in expand_grid(f"{path}: grid", file.grid):
            models.append(maker.make(as_name(Path(name).stem), config, combination))
    _check_models_differ(models, path)
    return models


@dataclass(frozen=True)
class _ModelMaker:
    """Makes models: gives each a name, a folder and the words of its command line. The fields are
    the arguments of `models_of`."""

    file: ExperimentFile
    path: str
    overrides: list[str]
    measured_steps: list[int]

    def make(self, config_name: str, config: str, combination: Combination) -> Model:
        """Return the model of a config and a combination of the grid.

        Args:
            config_name: The name of the config, with which the model's name begins.
            config: The path of the config.
        """
        name_parts = combination.name_parts
        name = "_".join([config_name, *filter(None, name_parts.values())])
        choices = (config_name, *(part for axis, part in name_parts.items() if axis != "seed"))
        chosen_words = [
            _name_axes(f"--{key}={value}", name_parts)
            for key, value in combination.settings.items()
        ]
        # The last word counts, so overrides come last; check_overrides keeps them off the grid.
        words = [*chosen_words, *self.overrides]

        folder = self._find_own_folder(config, words)
        if folder is None:
            # Each model of a grid in a folder of its own, by its name.
            runs = self.file.folder if self.file.runs is None else self.file.runs
            folder = Path(runs) / name
            words.append(f"--run_folder={folder}")
        settings = load_config(config, words)
        # The number of steps, and which checkpoints are kept, are only known from the settings.
        if self.measured_steps:
            self._check_steps(name, settings)
            words.append(self._keep_measured(settings))
            settings = load_config(config, words)
        return Model(
            name=name,
            scheme="_".join(choice for choice in choices if choice),
            seed=name_parts.get("seed", ""),
            choices=choices,
            folder=folder,
            config=config,
            overrides=words,
            settings=settings,
        )

    def _find_own_folder(self, config: str, words: list[str]) -> Path | None:
        """Return the run folder that the config itself names, so that a run that exists is used.
        Return None if the experiment names the folder: a grid has several runs of one config, which
        must not share one."""
        if self.file.runs is not None or self.file.grid:
            return None
        values = read_given(config, words)
        return Path(str(values["run_folder"])) if "run_folder" in values else None

    def _check_steps(self, name: str, settings: RunConfig) -> None:
        """Raise ConfigError if a step is to be measured that the model is not trained for."""
        num_steps = settings.training.num_steps
        steps_beyond_end = [step for step in self.measured_steps if step > num_steps]
        if steps_beyond_end:
            last_step = f"{name} has training.num_steps={num_steps}"
            raise ConfigError(
                f"{self.path}: measure.steps={steps_beyond_end}, and {last_step}; lower them"
            )

    def _keep_measured(self, settings: RunConfig) -> str:
        """Return the word by which the checkpoints that are measured are kept, besides those that
        the config keeps: others are deleted as training goes on."""
        keep_steps = sorted({*self.measured_steps, *(settings.checkpoint.keep_steps or [])})
        return f"--checkpoint.keep_steps={keep_steps}"


def _name_axes(word: str, name_parts: Mapping[str, str]) -> str:
    """Replace `{axis}` in a word by the axis's part of the model's name. Other braces stay."""
    return re.sub(r"\{([^{}]+)\}", lambda match: name_parts.get(match[1], match[0]), word)


def _check_models_differ(models: Sequence[Model], path: str) -> None:
    """Raise ConfigError if two models have one name or one folder, or are the same model."""
    for name, count in Counter(model.name for model in models).items():
        if count > 1:
            raise ConfigError(f"{path}: {count} models would be called {name}; rename a choice")
    for folder, count in Counter(model.folder for model in models).items():
        if count > 1:
            raise ConfigError(f"{path}: {count} models have run_folder={folder}; name one for each")
    for model, other in itertools.combinations(models, 2):
        if replace(model.settings, run_folder=other.settings.run_folder) == other.settings:
            raise ConfigError(
                f"{path}: {model.name} and {other.name} have the same settings; leave out one "
                "choice of the grid"
            )


class SeedPair(NamedTuple):
    """Two models of one scheme with different seeds."""

    model: Model
    other_seed: Model


def pairs_of_seeds(models: Sequence[Model]) -> Iterator[SeedPair]:
    """Yield each model together with the next seed of its scheme, and the last seed with the first:
    (seed1, seed2), (seed2, seed3), (seed3, seed1). A scheme with one seed has no pairs."""
    # In a circle, so that each seed chooses for one other, and is chosen for once.
    for model in models:
        seeds = [other for other in models if other.scheme == model.scheme]
        if len(seeds) > 1:
            yield SeedPair(model, seeds[(seeds.index(model) + 1) % len(seeds)])
