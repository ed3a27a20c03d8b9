"""Read the file of an experiment: which models are trained, and how each is measured.

Models are all configs × all choices of a grid. In a value, `{seed}` is replaced by the axis's part
of the model's name (seed1), so that an experiment can start from the runs of another."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.analysis.options import ModelOptions, Settings, TextOptions
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.renamed import EXPERIMENT_KEYS, current_keys
from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.schema import build, find_config, kinds_of, option, read_given
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.windows import Long, long_window

FILE_NAME = "experiment.yaml"
"""In the folder of an experiment: its file as it was when it last began."""


@dataclass
class MeasureSection:
    """Keys of `measure` that are not options of the command `measure`."""

    steps: list[int | Literal["last"]] = option(["last"], some=True, distinct=True, least=1)
    """Checkpoints that are measured with the longest window; the last one with each window."""

    long: list[Long] = option(["all"], some=True, distinct=True, least=1)
    distant_states: list[InterpretationName] = option(["contextual"], some=True, distinct=True)
    targets: Literal["shared", "own"] = "shared"
    """shared: the first model that is measured chooses the targets of all models and steps."""

    transfer: bool = True
    """Also evaluate the tokens that another seed of the same model chose, at the last step."""

    text: str | None = None
    models: list[str] = option([])
    """Names of the models that are measured; empty: all."""

    shards: int = option(8, least=1)
    """SLURM tasks that share a measurement."""


@dataclass
class FigureSection:
    labels: dict[str, str] = field(default_factory=dict)
    """Label of a model, of all models whose name begins so, or of a value of distant_states."""

    out: str | None = None
    """Default: figure2.png in the experiment's folder."""


@dataclass
class ExperimentFile:
    folder: str = ""
    models: list[str] = field(default_factory=list)
    grid: dict[str, Any] = field(default_factory=dict)
    processes: int | Literal["auto"] = option(1, least=1)
    """Processes of a training on this machine, and measurements at once; auto: the GPUs, or up to
    two on a CPU."""

    measure: dict[str, Any] | None = None
    figure: FigureSection = field(default_factory=FigureSection)


@dataclass(frozen=True)
class Model:
    """A training run of an experiment."""

    name: str
    scheme: str
    """The name without the seed: models of one scheme share label and colour."""

    folder: Path
    config: str
    overrides: list[str]
    settings: RunConfig

    @property
    def num_steps(self) -> int:
        return self.settings.training.num_steps


@dataclass(frozen=True)
class Measurement:
    name: str
    model: Model
    step: int | None
    """None: the last one."""

    long: Long
    distant_states: InterpretationName
    folder: Path
    options: Mapping[str, Any]
    """Further options of the command `measure`."""

    text: str | None = None
    targets_of: str | None = None
    """Name of the measurement that chose the targets; None: it chooses them itself."""

    choices_of: str | None = None
    """Name of the measurement whose ranked tokens are evaluated; None: it ranks them itself."""

    @property
    def checkpoint(self) -> Path:
        if self.step is None:
            return self.model.folder
        return self.model.folder / "checkpoints" / f"step{self.step:06d}"


@dataclass(frozen=True)
class Experiment:
    path: str
    overrides: list[str]
    file: ExperimentFile
    models: list[Model]
    measurements: list[Measurement]
    shards: int

    @property
    def folder(self) -> Path:
        return Path(self.file.folder)

    @property
    def figure(self) -> Path:
        return Path(self.file.figure.out or self.folder / "figure2.png")

    def label_of(self, measurement: Measurement) -> str:
        """What the figure calls a measurement's curve. All seeds of a scheme share it."""
        model = measurement.model
        labels = self.file.figure.labels
        states = {one.distant_states for one in self.measurements}
        schemes = {one.model.scheme for one in self.measurements}
        fitting = [key for key in labels if _is_part(key, model.name)]
        label = labels[max(fitting, key=len)] if fitting else model.scheme
        if len(states) == 1:
            return label
        shown = labels.get(measurement.distant_states, measurement.distant_states)
        return shown if len(schemes) == 1 and not fitting else f"{label}, {shown}"

    def save(self) -> None:
        """Keep the file in the folder, so that `figure`, `compare` and `report` find the rest."""
        kept = asdict(self.file) | {
            "models": [os.path.abspath(find_config(name, Path(self.path))) for name in
                       self.file.models]
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"file": kept, "overrides": self.overrides}, indent=1)
        write_atomically(self.folder / FILE_NAME, text + "\n")


def saved_experiment(folder: str | Path) -> Experiment | None:
    """The experiment whose folder this is; None for another folder."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        return None
    kept = read_given(path)
    if kept.keys() != {"file", "overrides"}:
        raise ConfigError(f"{path} was not written by `experiment`; delete it, and begin again")
    return _expand(build(ExperimentFile, kept["file"], str(path)), str(path), kept["overrides"])


def read_experiment(path: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read and check the file. `overrides`: --key.sub=value words for all of its models."""
    given = current_keys(read_given(path), EXPERIMENT_KEYS)
    return _expand(build(ExperimentFile, given, path), path, list(overrides))


def _expand(file: ExperimentFile, path: str, overrides: list[str]) -> Experiment:
    if not file.folder or not file.models:
        raise ConfigError(f"{path}: an experiment needs `folder` and `models`")
    _refuse_own_keys(file, path, overrides)
    section, options = _split_measure(file, path)
    steps = [step for step in section.steps if step != "last"] if file.measure is not None else []
    models = list(_models(file, path, overrides, steps))
    for name, count in Counter(model.name for model in models).items():
        if count > 1:
            raise ConfigError(f"{path}: {count} models would be called {name}; rename a choice")
    for folder, count in Counter(model.folder for model in models).items():
        if count > 1:
            raise ConfigError(f"{path}: {count} models have run_folder={folder}; name one for each")
    measurements: list[Measurement] = []
    if file.measure is not None:
        measurements = _measurements(file, path, models, section, options)
    return Experiment(path, overrides, file, models, measurements, section.shards)


# --- models: configs × choices --------------------------------------------------------------------


def _refuse_own_keys(file: ExperimentFile, path: str, overrides: list[str]) -> None:
    """Refuse an option that would make models equal that the grid sets apart."""
    axes: dict[str, str] = {}
    for axis, values in file.grid.items():
        keys = [axis]
        if isinstance(values, dict):
            keys = [key for chosen in values.values() if isinstance(chosen, dict) for key in chosen]
        for key in keys:
            if axes.setdefault(key, axis) != axis:
                remedy = "set it in one of them"
                raise ConfigError(f"{path}: grid.{axes[key]} and grid.{axis} set {key}; {remedy}")
    for word in overrides:
        key = word.lstrip("-").partition("=")[0]
        if key == "run_folder":
            raise ConfigError(f"{word}: an experiment has several runs; change `folder` in {path}")
        for name, axis in axes.items():
            if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}."):
                raise ConfigError(f"{word}: grid.{axis} of {path} sets {name}; change it there")
    if "run_folder" in axes:
        raise ConfigError(f"{path}: grid.run_folder has no effect; runs are named by their choices")


def _models(
    file: ExperimentFile, path: str, overrides: list[str], steps: list[int]
) -> Iterator[Model]:
    for name in file.models:
        config = os.path.relpath(find_config(name, find_config(path)))
        for labels, values in expand_grid(f"{path}: grid", file.grid):
            parts = {axis: _part(axis, file.grid[axis], label) for axis, label in labels.items()}
            names = [as_name(Path(name).stem), *filter(None, parts.values())]
            without_seed = [part for axis, part in parts.items() if part and axis != "seed"]
            chosen = [_name_axes(f"--{key}={value}", parts) for key, value in values.items()]
            words = [*chosen, *overrides]
            folder = Path(file.folder) / "_".join(names)
            given = read_given(config, words)
            if not file.grid and "run_folder" in given:
                folder = Path(str(given["run_folder"]))  # so that a run that exists is used
            else:
                words = [*words, f"--run_folder={folder}"]
            settings = load_config(config, words)
            num_steps = settings.training.num_steps
            beyond = [step for step in steps if step > num_steps]
            if beyond:
                most = f"{'_'.join(names)} has training.num_steps={num_steps}"
                raise ConfigError(f"{path}: measure.steps={beyond}, and {most}; lower them")
            kept = sorted({*steps, *(settings.checkpoint.keep_steps or [])})
            if steps:
                words = [*words, f"--checkpoint.keep_steps={kept}"]
                settings = load_config(config, words)
            scheme = "_".join([names[0], *without_seed])
            yield Model("_".join(names), scheme, folder, config, words, settings)


def expand_grid(
    where: str, grid: dict[str, Any]
) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """All choices of all axes, in order: what is chosen of each axis, and the keys that it sets.
    An axis is a key and its values, or a name and named sets of keys."""
    for axis, values in grid.items():
        named = isinstance(values, dict) and all(isinstance(k, dict) for k in values.values())
        if not values or not (named or isinstance(values, list)):
            raise ConfigError(f"{where}.{axis} must be a list of values, or named sets of keys")
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
    """The part of a model's name that says what is chosen of an axis."""
    if isinstance(values, dict):
        return as_name(label)
    return as_name(axis.rsplit(".", 1)[-1] + label) if len(values) > 1 else ""


def as_name(label: str) -> str:
    return re.sub(r"[^\w.+-]", "-", label)


def _name_axes(word: str, names: dict[str, str]) -> str:
    return re.sub(r"\{([^{}]+)\}", lambda match: names.get(match[1], match[0]), word)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _is_part(key: str, name: str) -> bool:
    """Whether a label's key is a name, or its beginning up to an underscore."""
    return name == key or name.startswith(f"{key}_")


# --- measurements ---------------------------------------------------------------------------------

OF_CHOSEN = ("sets", "max_targets", "share", "sample", "blocks")
"""Options that choose targets, and none where another measurement chose them."""

_OWN = (MeasureSection, Settings, TextOptions, ModelOptions)


def _split_measure(file: ExperimentFile, path: str) -> tuple[MeasureSection, dict[str, Any]]:
    """The section's own keys, and the options of `measure` in it."""
    given = current_keys(file.measure or {})
    names = [kinds_of(schema) for schema in _OWN]
    known = {name for of_schema in names for name in of_schema} - {"prefix_ids"}
    for key in given.keys() - known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else "; `measure --help` lists its options"
        raise ConfigError(f"{path}: unknown key 'measure.{key}'{hint}")
    own = {key: value for key, value in given.items() if key in names[0]}
    for key in ("long", "steps", "distant_states"):
        if key in own and not isinstance(own[key], list):
            own[key] = [own[key]]
    section = build(MeasureSection, own, f"{path}: measure")
    options = {key: value for key, value in given.items() if key not in own}
    for schema, of_schema in zip(_OWN[1:], names[1:], strict=True):
        some = {key: value for key, value in options.items() if key in of_schema}
        build(schema, some, f"{path}: measure")
    return section, options


def _measurements(
    file: ExperimentFile,
    path: str,
    models: list[Model],
    section: MeasureSection,
    options: dict[str, Any],
) -> list[Measurement]:
    measured = _measured_models(path, models, section)
    lengths = sorted(section.long, key=lambda long: long_window(long).length)
    for model in measured:
        for long in lengths:
            _check_settings(path, model, options, long)
    # At the last step each length is measured, at earlier ones the longest.
    places: list[tuple[int | None, Long]] = []
    if "last" in section.steps:
        places += [(None, long) for long in lengths]
    places += [(step, lengths[-1]) for step in section.steps if step != "last"]
    make = _MeasurementMaker(Path(file.folder) / "measured", section, options)
    measurements: list[Measurement] = []
    for state in section.distant_states:
        choosers: dict[Any, str] = {}
        for model in measured:
            for step, long in places:
                chooser = choosers.get(long) if section.targets == "shared" else None
                measurement = make(model, step, long, state, targets_of=chooser)
                choosers.setdefault(long, measurement.name)
                measurements.append(measurement)
        if section.transfer and "last" in section.steps:
            for model, chooser_model in _pairs_of_seeds(measured):
                choices_of = make(chooser_model, None, lengths[-1], state).name
                transfer = make(model, None, lengths[-1], state, choices_of=choices_of)
                measurements.append(transfer)
    return measurements


def _measured_models(path: str, models: list[Model], section: MeasureSection) -> list[Model]:
    """Return the models that `measure.models` names; all, if it names none."""
    known = [model.name for model in models]
    for name in section.models:
        if not any(_is_part(name, model) for model in known):
            raise ConfigError(f"{path}: measure.models={name} is none of {', '.join(known)}")
    if not section.models:
        return models
    return [model for model in models if any(_is_part(name, model.name) for name in section.models)]


def _pairs_of_seeds(measured: list[Model]) -> Iterator[tuple[Model, Model]]:
    """Yield each model with the next seed of its scheme; the last one with the first."""
    for model in measured:
        seeds = [other for other in measured if other.scheme == model.scheme]
        if len(seeds) > 1:
            yield model, seeds[(seeds.index(model) + 1) % len(seeds)]


@dataclass(frozen=True)
class _MeasurementMaker:
    """Names a measurement and its folder, and leaves out options that others decide."""

    root: Path
    section: MeasureSection
    options: dict[str, Any]

    def __call__(
        self,
        model: Model,
        step: int | None,
        long: Any,
        state: InterpretationName,
        targets_of: str | None = None,
        choices_of: str | None = None,
    ) -> Measurement:
        name = f"{model.name}-{'last' if step is None else step}-{long}"
        if len(self.section.distant_states) > 1:
            name += f"-{state}"
        if choices_of is not None:
            name += "-transfer"
        left_out: set[str] = set()
        if targets_of is not None or choices_of is not None:
            left_out.update(OF_CHOSEN)
        if choices_of is not None:  # its settings are those of the choices
            left_out.update(kinds_of(Settings))
        options = {key: value for key, value in self.options.items() if key not in left_out}
        return Measurement(
            name,
            model,
            step,
            long,
            state,
            self.root / name,
            options,
            self.section.text,
            targets_of=targets_of,
            choices_of=choices_of,
        )


def _check_settings(path: str, model: Model, options: dict[str, Any], long: Any) -> None:
    """Refuse windows that do not fit the options or the model, before anything is trained."""
    given = {key: value for key, value in options.items() if key in kinds_of(Settings)}
    settings = build(Settings, given | {"long": long}, f"{path}: measure")
    try:
        settings.check()
    except ConfigError as error:
        raise ConfigError(f"{path}: measure, long={long}: {error}") from None
    most = model.settings.model.max_sequence_length
    needed = 0 if settings.windows.has_all else settings.windows.num_positions()
    if needed > most:
        windows = f"measure.long={long} with stride={settings.stride} takes {needed} positions"
        takes = f"{model.name} has model.max_sequence_length={most}"
        raise ConfigError(f"{path}: {windows}, and {takes}; lower long")
