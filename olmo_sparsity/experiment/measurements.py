"""List the measurements of an experiment: which checkpoint, with which window, by whose targets.

For two seeds, `long: [12, 24]` and `steps: [2, last]` they are, with targets that are shared:

    seed1-last-12             chooses its targets       ← seed2-last-12
    seed1-last-24             chooses its targets       ← seed1-2-24, seed2-last-24, seed2-2-24
    seed1-last-24-transfer    evaluates the tokens that seed2-last-24 has ranked
    seed2-last-24-transfer    evaluates the tokens that seed1-last-24 has ranked
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.analysis.options import ModelOptions, Settings, TextOptions
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.renamed import current_keys
from olmo_sparsity.config.schema import build, kinds_of
from olmo_sparsity.config.windows import Long, long_window
from olmo_sparsity.experiment.models import Model, is_named_by, pairs_of_seeds
from olmo_sparsity.experiment.sections import ExperimentFile, MeasureSection

OPTIONS_OF_CHOOSING = ("sets", "max_targets", "share", "sample", "blocks")
"""Options that choose targets, and have no effect where another measurement chose them."""

_OPTION_SCHEMAS = (Settings, TextOptions, ModelOptions)
"""The schemas of what `measure` of an experiment may have besides `MeasureSection`."""


@dataclass(frozen=True)
class Measurement:
    """A measurement of one checkpoint with one long window."""

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

    @property
    def choosers(self) -> tuple[str, ...]:
        """Return the names of the measurements that choose targets or tokens for this one."""
        names = (self.targets_of, self.choices_of)
        return tuple(name for name in names if name is not None)


# --- the section `measure` ------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasurePlan:
    """The section `measure` of a file."""

    section: MeasureSection = field(default_factory=MeasureSection)
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the command `measure` in it."""


def read_measure_section(file: ExperimentFile, path: str) -> MeasurePlan:
    """Return the section `measure`, checked; defaults, if the file has none."""
    given = current_keys(file.measure or {})
    keys_of_section = kinds_of(MeasureSection).keys()
    _check_keys(given, path)
    of_section = {key: value for key, value in given.items() if key in keys_of_section}
    for key in ("long", "steps", "distant_states"):
        if key in of_section and not isinstance(of_section[key], list):
            of_section[key] = [of_section[key]]
    section = build(MeasureSection, of_section, f"{path}: measure")

    options = {key: value for key, value in given.items() if key not in keys_of_section}
    for schema in _OPTION_SCHEMAS:  # for the messages alone: each measurement builds its own
        options_of_schema = {
            key: value for key, value in options.items() if key in kinds_of(schema)
        }
        build(schema, options_of_schema, f"{path}: measure")
    return MeasurePlan(section, options)


def _check_keys(given: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for a key that is neither of the section nor an option of `measure`."""
    known = set(kinds_of(MeasureSection))
    for schema in _OPTION_SCHEMAS:
        known |= set(kinds_of(schema))
    known.remove("prefix_ids")  # follows from `prefix` and the tokenizer
    for key in given.keys() - known:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else "; `measure --help` lists its options"
        raise ConfigError(f"{path}: unknown key 'measure.{key}'{hint}")


# --- all measurements -----------------------------------------------------------------------------


class _Point(NamedTuple):
    """A checkpoint of each model, and the window that it is measured with."""

    step: int | None
    long: Long


def measurements_of(
    file: ExperimentFile, path: str, models: list[Model], plan: MeasurePlan
) -> list[Measurement]:
    """Return all measurements, each after the one that chooses its targets."""
    section = plan.section
    measured = _measured_models(path, models, section)
    lengths = sorted(section.long, key=lambda long: long_window(long).length)
    for model in measured:
        for long in lengths:
            _check_settings(path, model, plan.options, long)

    make = _MeasurementMaker(Path(file.folder) / "measured", plan)
    measurements: list[Measurement] = []
    for state in section.distant_states:
        chooser_of_length: dict[Any, str] = {}  # the measurement that chooses the targets
        for model in measured:
            for point in _points_of(section, lengths):
                chooser = None
                if section.targets == "shared":
                    chooser = chooser_of_length.get(point.long)
                measurement = make(model, point, state, targets_of=chooser)
                chooser_of_length.setdefault(point.long, measurement.name)
                measurements.append(measurement)
        if section.transfer and "last" in section.steps:
            longest_at_end = _Point(None, lengths[-1])
            for model, other_seed in pairs_of_seeds(measured):
                choices_of = make(other_seed, longest_at_end, state).name
                measurements.append(make(model, longest_at_end, state, choices_of=choices_of))
    return measurements


def _points_of(section: MeasureSection, lengths: Sequence[Long]) -> list[_Point]:
    """Return the points at which each model is measured: at the last step with each length, at
    earlier ones with the longest, as each point takes a share of the whole time."""
    points = []
    if "last" in section.steps:
        points += [_Point(None, long) for long in lengths]
    points += [_Point(step, lengths[-1]) for step in section.earlier_steps]
    return points


def _measured_models(path: str, models: list[Model], section: MeasureSection) -> list[Model]:
    """Return the models that `measure.models` names; all, if it names none."""
    names = [model.name for model in models]
    for beginning in section.models:
        if not any(is_named_by(beginning, name) for name in names):
            raise ConfigError(f"{path}: measure.models={beginning} is none of {', '.join(names)}")
    if not section.models:
        return models
    return [
        model
        for model in models
        if any(is_named_by(beginning, model.name) for beginning in section.models)
    ]


@dataclass(frozen=True)
class _MeasurementMaker:
    """Names a measurement and its folder, and leaves out options that others decide."""

    root: Path
    plan: MeasurePlan

    def __call__(
        self,
        model: Model,
        point: _Point,
        state: InterpretationName,
        targets_of: str | None = None,
        choices_of: str | None = None,
    ) -> Measurement:
        """Return the measurement of a model at a point."""
        section = self.plan.section
        step = "last" if point.step is None else point.step
        name = f"{model.name}-{step}-{point.long}"
        if len(section.distant_states) > 1:
            name += f"-{state}"
        if choices_of is not None:
            name += "-transfer"

        left_out: set[str] = set()
        if targets_of is not None or choices_of is not None:
            left_out.update(OPTIONS_OF_CHOOSING)
        if choices_of is not None:  # its settings are those of the choices
            left_out.update(kinds_of(Settings))
        options = {key: value for key, value in self.plan.options.items() if key not in left_out}
        return Measurement(
            name=name,
            model=model,
            step=point.step,
            long=point.long,
            distant_states=state,
            folder=self.root / name,
            options=options,
            text=section.text,
            targets_of=targets_of,
            choices_of=choices_of,
        )


def _check_settings(path: str, model: Model, options: Mapping[str, Any], long: Any) -> None:
    """Raise ConfigError for windows that do not fit the options or the model, before anything is
    trained."""
    given = {key: value for key, value in options.items() if key in kinds_of(Settings)}
    settings = build(Settings, given | {"long": long}, f"{path}: measure")
    try:
        settings.check()
    except ConfigError as error:
        raise ConfigError(f"{path}: measure, long={long}: {error}") from None
    if settings.windows.has_all:  # windows are cut to what the model takes
        return
    num_available = model.settings.model.max_sequence_length
    num_needed = settings.windows.num_positions()
    if num_needed > num_available:
        windows = f"measure.long={long} with stride={settings.stride} takes {num_needed} positions"
        limit = f"{model.name} has model.max_sequence_length={num_available}"
        raise ConfigError(f"{path}: {windows}, and {limit}; lower long")
