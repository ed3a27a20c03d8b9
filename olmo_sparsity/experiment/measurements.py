"""List the measurements of an experiment: which checkpoint, with which window, at whose targets.

For two seeds, `long: [12, 24]`, `steps: [2, last]` and shared targets they are:

    model-step-long           targets
    seed1-last-12             its own
    seed1-last-24             its own
    seed1-2-24                those of seed1-last-24
    seed2-last-12             those of seed1-last-12
    seed2-last-24             those of seed1-last-24
    seed2-2-24                those of seed1-last-24
    seed1-last-24-transfer    evaluates the tokens that seed2-last-24 has ranked
    seed2-last-24-transfer    evaluates the tokens that seed1-last-24 has ranked

Place in the flow: measure_section.py and models.py → **`measurements_of`** → jobs.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from olmo_sparsity.analysis.interpretation import InterpretationName
from olmo_sparsity.analysis.options import SELECTION_SETTINGS, Settings
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.build import build
from olmo_sparsity.config.schema import schema_fields
from olmo_sparsity.config.windows import Long, long_window
from olmo_sparsity.experiment.measure_section import MeasureKeys
from olmo_sparsity.experiment.models import Model, is_named_by, pairs_of_seeds
from olmo_sparsity.experiment.sections import ExperimentFile, MeasureSection
from olmo_sparsity.models.checkpoint_files import checkpoint_folder


@dataclass(frozen=True)
class Measurement:
    """A measurement of one checkpoint with one long window."""

    name: str
    model: Model
    step: int | None
    """The step of the checkpoint. None: the last one."""

    long: Long
    distant_states: InterpretationName
    folder: Path
    options: Mapping[str, Any]
    """Further options of the command `measure`."""

    text: str | None = None
    """What is measured. None: the held-out text of the run."""

    targets_of: str | None = None
    """The name of the measurement that chose the targets. None: this one chooses them."""

    choices_of: str | None = None
    """The name of the measurement whose ranked tokens are evaluated. None: this one ranks
    them."""

    @property
    def checkpoint(self) -> Path:
        """Return the folder that is measured: that of the checkpoint; or that of the run, whose
        last checkpoint is then taken."""
        if self.step is None:
            return self.model.folder
        return checkpoint_folder(self.model.folder, self.step)

    @property
    def step_order(self) -> float:
        """Return the step as a number by which measurements can be sorted: infinity for the last
        step, whichever it is."""
        return math.inf if self.step is None else self.step

    @property
    def long_length(self) -> float:
        """Return the number of tokens of the long window; infinity for `all`."""
        return long_window(self.long).sort_key

    @property
    def choosers(self) -> tuple[str, ...]:
        """Return the names of the measurements that choose targets or tokens for this one."""
        names = (self.targets_of, self.choices_of)
        return tuple(name for name in names if name is not None)


# --- all measurements -----------------------------------------------------------------------------


class _Point(NamedTuple):
    """Which checkpoint of each model is measured, and with which window."""

    step: int | None
    """None: the last step."""

    long: Long


def measurements_of(
    file: ExperimentFile, path: str, models: list[Model], keys: MeasureKeys
) -> list[Measurement]:
    """Return all measurements, each after the one that chooses its targets.

    Args:
        file: What the file says.
        path: The path of the file, for messages.
        models: All models.
        keys: The section `measure`.
    """
    section = keys.section
    measured_models = _measured_models(path, models, section)
    long_windows = sorted(section.long, key=lambda long: long_window(long).sort_key)
    # Windows are checked here, as a measurement begins days later.
    for model in measured_models:
        for long in long_windows:
            _check_window(path, model, keys.options, long)

    maker = _MeasurementMaker(Path(file.folder) / "measured", keys)
    points = _points_of(section, long_windows)
    measurements: list[Measurement] = []
    for distant_states in section.distant_states:
        measurements += maker.make_all(measured_models, points, distant_states)
        # Transfer at one point of each model, as it costs as much as a measurement.
        if section.transfer and "last" in section.steps:
            longest_at_end = _Point(None, long_windows[-1])
            measurements += maker.make_transfers(measured_models, longest_at_end, distant_states)
    return measurements


def _points_of(section: MeasureSection, long_windows: Sequence[Long]) -> list[_Point]:
    """Return the points at which each model is measured: each window at the last step, and at
    earlier steps the longest window only, as every point costs time. The last step comes first, as
    its measurement chooses the targets of the others.

    Args:
        section: The section `measure`.
        long_windows: Long windows, the shortest first.
    """
    points = []
    if "last" in section.steps:
        points += [_Point(None, long) for long in long_windows]
    points += [_Point(step, long_windows[-1]) for step in section.earlier_steps]
    return points


def _measured_models(path: str, models: list[Model], section: MeasureSection) -> list[Model]:
    """Return the models that `measure.models` names; all models if it names none."""
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
    """Makes measurements: gives each a name and a folder, and leaves out options that have no
    effect where another measurement chooses targets or tokens."""

    root: Path
    """The folder in which each measurement has its own."""

    keys: MeasureKeys

    def make_all(
        self,
        models: Sequence[Model],
        points: Sequence[_Point],
        distant_states: InterpretationName,
    ) -> list[Measurement]:
        """Return the measurements of each model at each point. With `targets: shared`, the first
        one with a long window chooses the targets of all later ones with it: targets of another
        window would have less text before them than it needs, or more."""
        are_shared = self.keys.section.targets == "shared"
        chooser_by_window: dict[Long, str] = {}
        measurements = []
        for model in models:
            for point in points:
                chooser = chooser_by_window.get(point.long) if are_shared else None
                measurement = self.make(model, point, distant_states, targets_of=chooser)
                chooser_by_window.setdefault(point.long, measurement.name)
                measurements.append(measurement)
        return measurements

    def make_transfers(
        self, models: Sequence[Model], point: _Point, distant_states: InterpretationName
    ) -> list[Measurement]:
        """Return for each model a measurement that evaluates the tokens of another seed."""
        measurements = []
        for model, other_seed in pairs_of_seeds(models):
            choices_of = self.name_of(other_seed, point, distant_states)
            measurements.append(self.make(model, point, distant_states, choices_of=choices_of))
        return measurements

    def name_of(self, model: Model, point: _Point, distant_states: InterpretationName) -> str:
        """Return the name of the measurement of a model at a point, without the end that marks
        transfer."""
        step = "last" if point.step is None else point.step
        name = f"{model.name}-{step}-{point.long}"
        if len(self.keys.section.distant_states) > 1:  # else it tells nothing apart
            name += f"-{distant_states}"
        return name

    def make(
        self,
        model: Model,
        point: _Point,
        distant_states: InterpretationName,
        targets_of: str | None = None,
        choices_of: str | None = None,
    ) -> Measurement:
        """Return the measurement of a model at a point.

        Args:
            point: Its checkpoint and window.
            distant_states: How the states of distant tokens are computed: `contextual` or
                `isolated`.
            targets_of: Name of the measurement that chooses the targets; None: this one does.
            choices_of: Name of the measurement that ranks the tokens; None: this one does.
        """
        name = self.name_of(model, point, distant_states)
        if choices_of is not None:
            name += "-transfer"

        left_out: set[str] = set()
        if choices_of is not None:
            # All settings, those of the selection among them, are those of the choices.
            left_out.update(schema_fields(Settings), SELECTION_SETTINGS)
        elif targets_of is not None:
            left_out.update(SELECTION_SETTINGS)
        options = {key: value for key, value in self.keys.options.items() if key not in left_out}
        return Measurement(
            name=name,
            model=model,
            step=point.step,
            long=point.long,
            distant_states=distant_states,
            folder=self.root / name,
            options=options,
            text=self.keys.section.text,
            targets_of=targets_of,
            choices_of=choices_of,
        )


def _check_window(path: str, model: Model, options: Mapping[str, Any], long: Long) -> None:
    """Raise ConfigError for windows that do not fit the options or the model. This is noticed
    before anything is trained, as training takes days."""
    given_settings = {
        key: value for key, value in options.items() if key in schema_fields(Settings)
    }
    settings = build(Settings, given_settings | {"long": long}, f"{path}: measure")

    # The options among each other.
    try:
        settings.check()
    except ConfigError as error:
        raise ConfigError(f"{path}: measure, long={long}: {error}") from None

    # The window and the model.
    if settings.windows.has_all:  # windows are cut to what the model takes
        return
    num_available = model.settings.model.max_sequence_length
    # These windows have a fixed length, whatever the documents are.
    num_needed = settings.windows.num_positions(longest_document=0)
    if num_needed > num_available:
        windows = f"measure.long={long} with stride={settings.stride} takes {num_needed} positions"
        limit = f"{model.name} has model.max_sequence_length={num_available}"
        raise ConfigError(f"{path}: {windows}, and {limit}; lower long")
