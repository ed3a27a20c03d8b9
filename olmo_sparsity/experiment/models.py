"""List the models of an experiment: each config with each combination of the grid.

In a value of the grid, `{seed}` is replaced by the axis's part of the model's name (seed1), so that
an experiment can start from the runs of another: `init_from: runs/first/c4_{seed}`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """The part of the name that says the seed; empty if the grid has not several."""

    choices: tuple[str, ...]
    """What the scheme is made of: the config's name, then the choice of each axis but the seed."""

    folder: Path
    config: str
    """Path of the config."""

    overrides: list[str]
    """`--key.sub=value` words after the config, on the command line of `train`."""

    settings: RunConfig

    @property
    def num_steps(self) -> int:
        return self.settings.training.num_steps


def is_named_by(beginning: str, name: str) -> bool:
    """Return whether `beginning` is a model's name, or the beginning of one up to an underscore, by
    which a user names several models at once."""
    return name == beginning or name.startswith(f"{beginning}_")


def models_of(
    file: ExperimentFile, path: str, overrides: list[str], measured_steps: list[int]
) -> list[Model]:
    """Return all models of an experiment. `measured_steps`: those before the last, whose
    checkpoints must be kept."""
    models = []
    for name in file.models:
        config = os.path.relpath(find_config(name, find_config(path)))
        for combination in expand_grid(f"{path}: grid", file.grid):
            models.append(
                _make_model(
                    file,
                    path,
                    config,
                    name=as_name(Path(name).stem),
                    combination=combination,
                    overrides=overrides,
                    measured_steps=measured_steps,
                )
            )
    _check_models_differ(models, path)
    return models


def _make_model(
    file: ExperimentFile,
    path: str,
    config: str,
    *,
    name: str,
    combination: Combination,
    overrides: list[str],
    measured_steps: list[int],
) -> Model:
    """Return the model of a config and a combination. `name`: that of the config."""
    parts = combination.name_parts
    model_name = "_".join([name, *(part for part in parts.values() if part)])
    choices = (name, *(part for axis, part in parts.items() if axis != "seed"))
    chosen = [_name_axes(f"--{key}={value}", parts) for key, value in combination.settings.items()]
    words = [*chosen, *overrides]

    folder = Path(file.folder if file.runs is None else file.runs) / model_name
    given = read_given(config, words)
    if file.runs is None and not file.grid and "run_folder" in given:
        folder = Path(str(given["run_folder"]))  # so that a run that exists is used
    else:
        words.append(f"--run_folder={folder}")

    settings = load_config(config, words)
    num_steps = settings.training.num_steps
    beyond = [step for step in measured_steps if step > num_steps]
    if beyond:
        last_step = f"{model_name} has training.num_steps={num_steps}"
        raise ConfigError(f"{path}: measure.steps={beyond}, and {last_step}; lower them")
    if measured_steps:
        keep_steps = sorted({*measured_steps, *(settings.checkpoint.keep_steps or [])})
        words.append(f"--checkpoint.keep_steps={keep_steps}")
        settings = load_config(config, words)
    return Model(
        name=model_name,
        scheme="_".join(choice for choice in choices if choice),
        seed=parts.get("seed", ""),
        choices=choices,
        folder=folder,
        config=config,
        overrides=words,
        settings=settings,
    )


def _name_axes(word: str, parts: Mapping[str, str]) -> str:
    """Replace `{axis}` in a word by the axis's part of the model's name."""
    return re.sub(r"\{([^{}]+)\}", lambda match: parts.get(match[1], match[0]), word)


def _check_models_differ(models: Sequence[Model], path: str) -> None:
    """Raise ConfigError if two models have one name or one folder."""
    for name, count in Counter(model.name for model in models).items():
        if count > 1:
            raise ConfigError(f"{path}: {count} models would be called {name}; rename a choice")
    for folder, count in Counter(model.folder for model in models).items():
        if count > 1:
            raise ConfigError(f"{path}: {count} models have run_folder={folder}; name one for each")


def pairs_of_seeds(models: Sequence[Model]) -> Iterator[tuple[Model, Model]]:
    """Yield each model with the next seed of its scheme; the last one with the first."""
    for model in models:
        seeds = [other for other in models if other.scheme == model.scheme]
        if len(seeds) > 1:
            yield model, seeds[(seeds.index(model) + 1) % len(seeds)]
