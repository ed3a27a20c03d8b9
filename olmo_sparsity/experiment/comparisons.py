"""MeasurementPair the measurements of an experiment that `compare` subtracts.

Two models are paired if they have the same seed and differ in one thing, their config or one axis
of the grid. If all models are seeds of one scheme, seeds are paired with each other. For example:

    models        pose_seed0  pose_seed1  rope_seed0  rope_seed1, each measured at long=[960, 4032]
    comparisons   pose minus rope, long=960     pairs: the two models of seed 0, those of seed 1
                  pose minus rope, long=4032    the same

The windows of one model are paired, too: its loss with the shortest long window minus its loss with
a longer one is what the text beyond the shortest one saves.

Place in the flow: the measurements of an experiment → **`longer_windows_of`**, **`comparisons_of`**
→ the command `compare` (command/compare.py), which subtracts and prints them, with a line on what
seeds agree on (agreement_of_seeds.py).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.windows import Long
from olmo_sparsity.experiment.file import Experiment
from olmo_sparsity.experiment.measurements import Measurement
from olmo_sparsity.experiment.models import Model


class MeasurementPair(NamedTuple):
    """Two measurements whose difference is first minus second."""

    first: Measurement
    second: Measurement


class ModelPair(NamedTuple):
    """Two models that are compared."""

    first: Model
    second: Model


class SchemePair(NamedTuple):
    """Two schemes whose models are compared, seed by seed."""

    first: str
    second: str


@dataclass(frozen=True)
class Comparison:
    """Two schemes at one long window: a pair of measurements for each seed."""

    first_scheme: str
    second_scheme: str
    long: Long
    pairs: Sequence[MeasurementPair]

    def title_of(self, experiment: Experiment, pair: MeasurementPair) -> str:
        """Return a line that names both models of a pair, by label and name, and the window."""
        names = [name_of_model(experiment, measurement) for measurement in pair]
        step = pair.first.step
        shown_step = "last step" if step is None else f"step {step:,}"
        return f"{names[0]} minus {names[1]}, long={self.long}, {shown_step}"


def name_of_model(experiment: Experiment, measurement: Measurement) -> str:
    """Return the label and the name of the model of a measurement; if they are equal, once."""
    label = experiment.label_of(measurement)
    name = measurement.model.name
    return name if label == name else f"{label} ({name})"


class MeasuredWindows(NamedTuple):
    """Two measurements of one model: with a longer long window, and with the shortest one."""

    longer: Measurement
    shortest: Measurement


@dataclass(frozen=True)
class LongerWindow:
    """A long window that is compared with the shortest one. The loss of a model with the shortest
    window minus its loss with this one is what the text beyond the shortest one saves."""

    long: Long
    """The longer window."""

    shortest: Long

    windows: Mapping[str, MeasuredWindows]
    """The two measurements of each model, by its name."""

    pairs: Sequence[ModelPair]
    """The models whose savings are subtracted."""


def longer_windows_of(experiment: Experiment) -> list[LongerWindow]:
    """Return each long window except the shortest, the shorter ones first. The list is empty if all
    models are measured with one window."""
    measurements = _measurements_by_model(experiment)
    measured_models = [model for model in experiment.models if model.name in measurements]
    pairs = _pairs_of_models(measured_models)
    # All models are measured with the same windows, which are sorted by length.
    shortest, *longer_windows = next(iter(measurements.values()))
    longer = []
    for long in longer_windows:
        windows = {
            name: MeasuredWindows(longer=by_window[long], shortest=by_window[shortest])
            for name, by_window in measurements.items()
        }
        longer.append(LongerWindow(long, shortest, windows, pairs))
    return longer


def comparisons_of(experiment: Experiment) -> list[Comparison]:
    """Return all comparisons, pair of schemes by pair of schemes, and of each pair the shortest
    long window first. Raise ConfigError if fewer than two models are measured."""
    measurements = _measurements_by_model(experiment)
    measured_models = [model for model in experiment.models if model.name in measurements]
    model_pairs: dict[SchemePair, list[ModelPair]] = defaultdict(list)
    for pair in _pairs_of_models(measured_models):
        model_pairs[SchemePair(pair.first.scheme, pair.second.scheme)].append(pair)
    if not model_pairs:
        raise ConfigError(
            f"{experiment.folder} has one measured model: pass two results to compare"
        )
    comparisons = []
    for schemes, pairs_of_seeds in model_pairs.items():
        # All models are measured with the same windows.
        for long in measurements[pairs_of_seeds[0].first.name]:
            pairs = [
                MeasurementPair(measurements[first.name][long], measurements[second.name][long])
                for first, second in pairs_of_seeds
            ]
            comparisons.append(Comparison(schemes.first, schemes.second, long, pairs))
    return comparisons


def _measurements_by_model(experiment: Experiment) -> dict[str, dict[Long, Measurement]]:
    """Return the measurements that are compared, by the model's name, then by long window. They are
    those of the last measured step and of the first of `distant_states`. Measurements that evaluate
    the tokens of another seed are left out."""
    measured = [
        measurement for measurement in experiment.measurements if measurement.choices_of is None
    ]
    if not measured:
        raise ConfigError(f"{experiment.path} measures nothing; add a section `measure`")
    # Earlier checkpoints are measured to show how the gap grows, not to be compared.
    last_step = max(measurement.step_order for measurement in measured)
    first_states = measured[0].distant_states
    by_model: dict[str, dict[Long, Measurement]] = defaultdict(dict)
    for measurement in sorted(measured, key=lambda measurement: measurement.long_length):
        is_last = measurement.step_order == last_step
        if is_last and measurement.distant_states == first_states:
            by_model[measurement.model.name][measurement.long] = measurement
    return by_model


def _pairs_of_models(models: Sequence[Model]) -> list[ModelPair]:
    """Return the pairs of models with the same seed that differ in one thing. If there are none, as
    all models are seeds of one scheme, return all pairs."""
    all_pairs = [ModelPair(*pair) for pair in itertools.combinations(models, 2)]
    # Models that differ in two things show the effect of neither.
    comparable = [
        pair
        for pair in all_pairs
        if pair.first.seed == pair.second.seed and _num_differences(*pair) == 1
    ]
    return comparable or all_pairs


def _num_differences(first: Model, second: Model) -> int:
    """Return in how many things two models differ: their config, and each axis of the grid but the
    seed."""
    choices = zip(first.choices, second.choices, strict=True)
    return sum(first_choice != second_choice for first_choice, second_choice in choices)
