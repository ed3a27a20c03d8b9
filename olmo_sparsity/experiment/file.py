"""Read the file of an experiment: which models are trained, and how each is measured.

Place in the flow: first. Models are all configs × all choices of a grid. In a value, `{seed}` is
replaced by the axis's part of the model's name (seed1), so that an experiment can start from the
runs of another.
"""

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
from olmo_sparsity.base.files import check_no_tilde, write_atomically
from olmo_sparsity.base.renamed import EXPERIMENT_KEYS, current_keys
from olmo_sparsity.config.installed import find_config
from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.schema import build, kinds_of, option
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.windows import Long, long_window
from olmo_sparsity.config.yaml_files import read_given

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
        """Return the folder that is measured: the run, of which the last checkpoint is taken, or
        the checkpoint of a step."""
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
        """Return what the figure calls a measurement's curve. All seeds of a scheme share it."""
        model = measurement.model
        labels = self.file.figure.labels
        fitting = [key for key in labels if _is_part(key, model.name)]
        label = model.scheme
        if fitting:  # the longest says most of this model
            label = labels[max(fitting, key=len)]
        states = {other.distant_states for other in self.measurements}
        if len(states) == 1:
            return label
        state = labels.get(measurement.distant_states, measurement.distant_states)
        schemes = {other.model.scheme for other in self.measurements}
        # Where all curves are of one scheme, its name tells nothing apart.
        return state if len(schemes) == 1 and not fitting else f"{label}, {state}"

    def save(self) -> None:
        """Keep the file in the folder, so that `figure`, `compare` and `report` find the rest."""
        kept = asdict(self.file)
        # The copy lies elsewhere, so that relative paths would not lead to the configs.
        configs = [find_config(name, Path(self.path)) for name in self.file.models]
        kept["models"] = [os.path.abspath(config) for config in configs]
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"file": kept, "overrides": self.overrides}, indent=1)
        write_atomically(self.folder / FILE_NAME, text + "\n")


def saved_experiment(folder: str | Path) -> Experiment | None:
    """Return the experiment whose folder this is; None for another folder."""
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
    """Return the experiment of a file, with all of its models and measurements."""
    if not file.folder or not file.models:
        raise ConfigError(f"{path}: an experiment needs `folder` and `models`")
    check_no_tilde("folder", file.folder)
    _refuse_own_keys(file, path, overrides)
    section, options = _split_measure(file, path)
    steps: list[int] = []
    if file.measure is not None:
        steps = [step for step in section.steps if step != "last"]
    models = list(_models(file, path, overrides, steps))
    _refuse_equal_models(models, path)
    measurements: list[Measurement] = []
    if file.measure is not None:
        measurements = _measurements(file, path, models, section, options)
    return Experiment(path, overrides, file, models, measurements, section.shards)


def _refuse_equal_models(models: Sequence[Model], path: str) -> None:
    """Raise ConfigError if two models have one name or one folder."""
    for name, count in Counter(model.name for model in models).items():
        if count > 1:
            raise ConfigError(f"{path}: {count} models would be called {name}; rename a choice")
    for folder, count in Counter(model.folder for model in models).items():
        if count > 1:
            raise ConfigError(f"{path}: {count} models have run_folder={folder}; name one for each")


# --- models: configs × choices --------------------------------------------------------------------


def _refuse_own_keys(file: ExperimentFile, path: str, overrides: list[str]) -> None:
    """Refuse an option that would make models equal that the grid sets apart."""
    axes: dict[str, str] = {}  # the axis that sets a key
    for axis, values in file.grid.items():
        keys = [axis]
        if isinstance(values, dict):
            keys = []
            for choice in values.values():
                keys += choice if isinstance(choice, dict) else []
        for key in keys:
            if axes.setdefault(key, axis) != axis:
                remedy = "set it in one of them"
                raise ConfigError(f"{path}: grid.{axes[key]} and grid.{axis} set {key}; {remedy}")
    for word in overrides:
        key = word.lstrip("-").partition("=")[0]
        if key == "run_folder":
            raise ConfigError(f"{word}: an experiment has several runs; change `folder` in {path}")
        for name, axis in axes.items():
            # One may be a section that the other is in.
            if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}."):
                raise ConfigError(f"{word}: grid.{axis} of {path} sets {name}; change it there")
    if "run_folder" in axes:
        raise ConfigError(f"{path}: grid.run_folder has no effect; runs are named by their choices")


def _models(
    file: ExperimentFile, path: str, overrides: list[str], steps: list[int]
) -> Iterator[Model]:
    """Yield a model for each config and choice. `steps`: those that are measured before the last,
    whose checkpoints must be kept."""
    for name in file.models:
        config = os.path.relpath(find_config(name, find_config(path)))
        for labels, values in expand_grid(f"{path}: grid", file.grid):
            parts = {axis: _part(axis, file.grid[axis], label) for axis, label in labels.items()}
            yield _model(
                file,
                path,
                config,
                name=as_name(Path(name).stem),
                parts=parts,
                values=values,
                overrides=overrides,
                steps=steps,
            )


def _model(
    file: ExperimentFile,
    path: str,
    config: str,
    *,
    name: str,
    parts: dict[str, str],
    values: dict[str, str],
    overrides: list[str],
    steps: list[int],
) -> Model:
    """Return the model of a config and a choice. `parts`: of its name, by axis; `values`: of the
    keys that are chosen."""
    model_name = "_".join([name, *(part for part in parts.values() if part)])
    without_seed = [part for axis, part in parts.items() if part and axis != "seed"]
    chosen = [_name_axes(f"--{key}={value}", parts) for key, value in values.items()]
    words = [*chosen, *overrides]
    folder = Path(file.folder) / model_name
    given = read_given(config, words)
    if not file.grid and "run_folder" in given:
        folder = Path(str(given["run_folder"]))  # so that a run that exists is used
    else:
        words.append(f"--run_folder={folder}")
    settings = load_config(config, words)
    num_steps = settings.training.num_steps
    beyond = [step for step in steps if step > num_steps]
    if beyond:
        most = f"{model_name} has training.num_steps={num_steps}"
        raise ConfigError(f"{path}: measure.steps={beyond}, and {most}; lower them")
    if steps:
        kept = sorted({*steps, *(settings.checkpoint.keep_steps or [])})
        words.append(f"--checkpoint.keep_steps={kept}")
        settings = load_config(config, words)
    return Model(
        name=model_name,
        scheme="_".join([name, *without_seed]),
        folder=folder,
        config=config,
        overrides=words,
        settings=settings,
    )


def expand_grid(
    where: str, grid: dict[str, Any]
) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Yield all choices of all axes, in order: what is chosen of each axis, and the keys that it
    sets. An axis is a key and its values, or a name and named sets of keys."""
    axes = [_choices(where, axis, values) for axis, values in grid.items()]
    for choices in itertools.product(*axes):
        labels = {}
        texts: dict[str, str] = {}
        for axis, (label, values) in zip(grid, choices, strict=True):
            labels[axis] = label
            texts |= {key: _as_text(value) for key, value in values.items()}
        yield labels, texts


def _choices(where: str, axis: str, values: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the choices of an axis, each with its label and the keys that it sets."""
    is_named = isinstance(values, dict) and all(isinstance(v, dict) for v in values.values())
    if not values or not (is_named or isinstance(values, list)):
        raise ConfigError(f"{where}.{axis} must be a list of values, or named sets of keys")
    if is_named:
        return [(str(label), keys) for label, keys in values.items()]
    return [(_as_text(value), {axis: value}) for value in values]


def _part(axis: str, values: Any, label: str) -> str:
    """Return the part of a model's name that says what is chosen of an axis; empty if there is no
    choice."""
    if isinstance(values, dict):
        return as_name(label)
    if len(values) == 1:
        return ""
    key = axis.rsplit(".", 1)[-1]
    return as_name(key + label)


def as_name(label: str) -> str:
    """Return a label without what a folder's name should not have."""
    return re.sub(r"[^\w.+-]", "-", label)


def _name_axes(word: str, parts: dict[str, str]) -> str:
    """Replace `{axis}` in a word by the axis's part of the model's name."""
    return re.sub(r"\{([^{}]+)\}", lambda match: parts.get(match[1], match[0]), word)


def _as_text(value: Any) -> str:
    """Return a value as it stands in an option of the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _is_part(key: str, name: str) -> bool:
    """Return whether a label's key is a name, or its beginning up to an underscore."""
    return name == key or name.startswith(f"{key}_")


# --- measurements ---------------------------------------------------------------------------------

OF_CHOSEN = ("sets", "max_targets", "share", "sample", "blocks")
"""Options that choose targets, and none where another measurement chose them."""

_OPTIONS = (Settings, TextOptions, ModelOptions)
"""The schemas of what `measure` of an experiment may have besides `MeasureSection`."""


def _split_measure(file: ExperimentFile, path: str) -> tuple[MeasureSection, dict[str, Any]]:
    """Return the section's own keys, and the options of the command `measure` in it."""
    given = current_keys(file.measure or {})
    known = set(kinds_of(MeasureSection))
    for schema in _OPTIONS:
        known |= set(kinds_of(schema))
    known.remove("prefix_ids")  # follows from `prefix` and the tokenizer
    for key in given.keys() - known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else "; `measure --help` lists its options"
        raise ConfigError(f"{path}: unknown key 'measure.{key}'{hint}")
    own = {key: value for key, value in given.items() if key in kinds_of(MeasureSection)}
    for key in ("long", "steps", "distant_states"):
        if key in own and not isinstance(own[key], list):
            own[key] = [own[key]]
    section = build(MeasureSection, own, f"{path}: measure")
    options = {key: value for key, value in given.items() if key not in own}
    for schema in _OPTIONS:  # for the messages alone: each measurement builds its own
        part = {key: value for key, value in options.items() if key in kinds_of(schema)}
        build(schema, part, f"{path}: measure")
    return section, options


def _measurements(
    file: ExperimentFile,
    path: str,
    models: list[Model],
    section: MeasureSection,
    options: dict[str, Any],
) -> list[Measurement]:
    """Return all measurements, each after the one that chooses its targets."""
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
        choosers: dict[Any, str] = {}  # the measurement that chooses the targets, by length
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
        """Return the measurement of a model at a step, and with a long window."""
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
            name=name,
            model=model,
            step=step,
            long=long,
            distant_states=state,
            folder=self.root / name,
            options=options,
            text=self.section.text,
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
    if settings.windows.has_all:  # windows are cut to what the model takes
        return
    most = model.settings.model.max_sequence_length
    needed = settings.windows.num_positions()
    if needed > most:
        windows = f"measure.long={long} with stride={settings.stride} takes {needed} positions"
        takes = f"{model.name} has model.max_sequence_length={most}"
        raise ConfigError(f"{path}: {windows}, and {takes}; lower long")
