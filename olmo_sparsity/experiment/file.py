"""Read the file of an experiment: which models are trained, and how each is measured.

    experiment = read_experiment("configs/experiments/c4_1b.yaml")
    experiment.models         # all configs × all combinations of the grid (models.py, grid.py)
    experiment.measurements   # all checkpoints × all windows (measurements.py)

Place in the flow: a file → **`read_experiment`** → an `Experiment` → jobs.py, which makes jobs of
models and measurements. A copy of the file in the experiment's folder, from which
**`saved_experiment`** reads the same, lets later commands do with the folder alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.base.errors import ConfigError, printable
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.path_options import check_output_path
from olmo_sparsity.base.renamed import EXPERIMENT_KEYS, current_keys
from olmo_sparsity.config.build import build
from olmo_sparsity.config.installed import find_config
from olmo_sparsity.config.yaml_files import read_given
from olmo_sparsity.experiment.grid import check_overrides
from olmo_sparsity.experiment.measure_section import read_measure_section
from olmo_sparsity.experiment.measurements import Measurement, measurements_of
from olmo_sparsity.experiment.models import Model, is_named_by, models_of
from olmo_sparsity.experiment.sections import ExperimentFile

FILE_NAME = "experiment.yaml"
"""The copy of the file in the experiment's folder, as the file was when the experiment last
began."""


@dataclass(frozen=True)
class Experiment:
    """A file of an experiment, expanded to all of its models and measurements."""

    path: str
    """The path of the file."""

    overrides: list[str]
    """`--key.sub=value` words for all models."""

    file: ExperimentFile
    """What the file says."""

    models: list[Model]
    measurements: list[Measurement]
    shards: int
    """Number of SLURM tasks that share a measurement."""

    @property
    def folder(self) -> Path:
        """Return the folder of the results."""
        return Path(self.file.folder)

    @property
    def figure(self) -> Path:
        """Return the path of the figure."""
        return Path(self.file.figure.out or self.folder / "figure2.png")

    def label_of(self, measurement: Measurement) -> str:
        """Return what the figure calls the curve of a measurement. All seeds of a scheme have the
        same label."""
        # The label of the model: of c4 and c4_pose the longer key says most of c4_pose_seed1.
        model = measurement.model
        labels = self.file.figure.labels
        fitting_keys = [key for key in labels if is_named_by(key, model.name)]
        label = labels[max(fitting_keys, key=len)] if fitting_keys else model.scheme
        states = {other.distant_states for other in self.measurements}
        if len(states) == 1:
            return label

        # With several values of `distant_states`, a curve for each.
        state = labels.get(measurement.distant_states, measurement.distant_states)
        schemes = {other.model.scheme for other in self.measurements}
        if len(schemes) == 1 and not fitting_keys:
            return state  # all curves are of one scheme, whose name tells nothing apart
        return f"{label}, {state}"

    def save(self) -> None:
        """Write a copy of the file into the experiment's folder, so that `figure`, `compare` and
        `report` find models and measurements."""
        content = asdict(self.file)
        # The copy lies elsewhere, so that relative paths would not lead to the configs.
        configs = [find_config(name, Path(self.path)) for name in self.file.models]
        content["models"] = [os.path.abspath(config) for config in configs]
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"file": content, "overrides": self.overrides}, indent=1)
        write_atomically(self.folder / FILE_NAME, text + "\n")


def saved_experiment(folder: str | Path) -> Experiment | None:
    """Return the experiment whose folder this is; None if it is no experiment's folder."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        return None
    saved = read_given(path)
    # A user may have put a file of this name into the folder, such as the original.
    if saved.keys() != {"file", "overrides"}:
        raise ConfigError(f"{path} was not written by `experiment`; delete it, and begin again")
    file = build(ExperimentFile, saved["file"], str(path))
    return _expand(file, str(path), saved["overrides"])


def read_experiment(path: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read and check the file of an experiment.

    Args:
        path: The file.
        overrides: `--key.sub=value` words for all of its models.
    """
    values = current_keys(read_given(path), EXPERIMENT_KEYS)
    experiment = _expand(build(ExperimentFile, values, path), path, list(overrides))
    _check_labels(experiment)
    return experiment


def _check_labels(experiment: Experiment) -> None:
    """Raise ConfigError if a label names no model and no value of `distant_states`: it would have
    no effect."""
    names = [model.name for model in experiment.models]
    for key in experiment.file.figure.labels:
        is_used = key in get_args(InterpretationName) or any(
            is_named_by(key, name) for name in names
        )
        if not is_used:
            raise ConfigError(
                f"{experiment.path}: figure.labels has {printable(key)}, which is no model; they "
                f"are {', '.join(names)}"
            )


def _expand(file: ExperimentFile, path: str, overrides: list[str]) -> Experiment:
    """Return the experiment of a file, with all of its models and measurements.

    Args:
        file: What the file says.
        path: The path of the file, for messages, and from which paths in it are relative.
        overrides: `--key.sub=value` words for all models.
    """
    if not file.folder or not file.models:
        raise ConfigError(f"{path}: an experiment needs `folder` and `models`")
    check_output_path("folder", file.folder)
    if file.runs is not None:
        check_output_path("runs", file.runs)
    # Before models are made: an override of the grid would make some of them equal, and the message
    # would name folders.
    check_overrides(path, file.grid, overrides)

    keys = read_measure_section(file, path)
    has_measurements = file.measure is not None
    measured_steps = keys.section.earlier_steps if has_measurements else []
    models = models_of(file, path, overrides, measured_steps)
    measurements = measurements_of(file, path, models, keys) if has_measurements else []
    return Experiment(
        path=path,
        overrides=overrides,
        file=file,
        models=models,
        measurements=measurements,
        shards=keys.section.shards,
    )
