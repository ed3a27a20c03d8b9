"""Pair the measurements of an experiment that `compare` subtracts, and sum up what seeds agree on.

Two models are paired if they have the same seed and differ in one thing, their config or one axis
of the grid. If all models are seeds of one scheme, seeds are paired with each other. For example:

    models        pose_seed0  pose_seed1  rope_seed0  rope_seed1, each measured at long=[960, 4032]
    comparisons   pose minus rope, long=960     pairs: the two models of seed 0, those of seed 1
                  pose minus rope, long=4032    the same

The windows of one model are paired, too: its loss with the shortest long window minus its loss with
a longer one is what the text beyond the shortest one saves.

Place in the flow: finished measurements → **`longer_windows_of`**, **`comparisons_of`**, and for
each comparison **`describe_agreement`** → the command `compare` (command/compare.py), which prints
them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from olmo_sparsity.analysis.results.meta import main_set
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.windows import Long, long_window
from olmo_sparsity.experiment.file import Experiment
from olmo_sparsity.experiment.measurements import Measurement
from olmo_sparsity.experiment.models import Model


class Pair(NamedTuple):
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
    pairs: Sequence[Pair]

    def title_of(self, experiment: Experiment, pair: Pair) -> str:
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
    """What the text beyond the shortest long window saves: of each model, and between schemes."""

    long: Long
    """The longer window."""

    shortest: Long

    windows: Mapping[str, MeasuredWindows]
    """By the model's name."""

    pairs: Sequence[ModelPair]
    """The models whose savings are subtracted."""


def longer_windows_of(experiment: Experiment) -> list[LongerWindow]:
    """Return each long window but the shortest; none if only one is measured."""
    measurements = _measurements_by_model(experiment)
    measured = [model for model in experiment.models if model.name in measurements]
    pairs = _pairs_of_models(measured)
    # All models are measured with the same windows, which are sorted by length.
    shortest, *longer = next(iter(measurements.values()))
    return [
        LongerWindow(
            long,
            shortest,
            {
                name: MeasuredWindows(by_window[long], by_window[shortest])
                for name, by_window in measurements.items()
            },
            pairs,
        )
        for long in longer
    ]


def comparisons_of(experiment: Experiment) -> list[Comparison]:
    """Return all comparisons, pair of schemes by pair of schemes, and of each pair the shortest
    long window first. Raise ConfigError if fewer than two models are measured."""
    measurements = _measurements_by_model(experiment)
    measured = [model for model in experiment.models if model.name in measurements]
    model_pairs: dict[SchemePair, list[ModelPair]] = defaultdict(list)
    for pair in _pairs_of_models(measured):
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
                Pair(measurements[first.name][long], measurements[second.name][long])
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
    last_step = max(_step_number(measurement) for measurement in measured)
    state = measured[0].distant_states
    by_model: dict[str, dict[Long, Measurement]] = defaultdict(dict)
    for measurement in sorted(measured, key=_length_of_window):
        if _step_number(measurement) == last_step and measurement.distant_states == state:
            by_model[measurement.model.name][measurement.long] = measurement
    return by_model


def _length_of_window(measurement: Measurement) -> float:
    return long_window(measurement.long).length


def _step_number(measurement: Measurement) -> float:
    """Return the step of a measurement as a number, infinity for the last step."""
    return math.inf if measurement.step is None else measurement.step


def _pairs_of_models(models: Sequence[Model]) -> list[ModelPair]:
    """Return the pairs of models with the same seed that differ in one thing. If there are none, as
    all models are seeds of one scheme, return all pairs."""
    all_pairs = [ModelPair(*pair) for pair in itertools.combinations(models, 2)]
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


# --- what seeds agree on --------------------------------------------------------------------------

AGREEMENT = "net_equal"
"""The column whose sign seeds are to share: net excess at equal gaps, the strictest test of one
measurement."""

GAP = "mean_gap"
"""The column with the difference of L_short − L_long, which is the same in each row of a pair."""


def describe_agreement(comparison: Comparison, tables: Sequence[pd.DataFrame]) -> list[str]:
    """Return lines that say, for the mean gap and for each k, whether all seeds have the same sign,
    and how many intervals exclude 0. Only the rows that the figure draws count: those of the first
    selector, and of the main set of targets.

    Args:
        tables: What `describe_comparison` returned for each pair that is finished.
    """
    # All seeds below each other; grouping by k puts the same k of all seeds together.
    rows = pd.concat([_drawn_rows(table) for table in tables])
    rows = rows[rows[AGREEMENT].notna()]
    schemes = f"{comparison.first_scheme} minus {comparison.second_scheme}"
    seeds = f"{len(tables)} seeds"
    if len(tables) < len(comparison.pairs):
        seeds = f"{len(tables)} of {len(comparison.pairs)} seeds"
    lines = [f"{seeds}: {schemes}, long={comparison.long}"]
    gaps = pd.concat([table.head(1) for table in tables])
    lines.append(f"  L_short - L_long: {_describe_signs(gaps, GAP)}")
    if not len(rows):
        return [*lines, "  net at equal gaps: no value"]
    for (units, k), of_seeds in rows.groupby(["units", "k"], sort=False):
        signs = _describe_signs(of_seeds, AGREEMENT)
        lines.append(f"  net at equal gaps, {units}, k={k}: {signs}")
    return lines


def _drawn_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the main target set and the first selector."""
    rows = table[table.target_set == main_set(table.target_set)]
    return rows[rows.selector == rows.selector.iloc[0]]


def _describe_signs(of_seeds: pd.DataFrame, column: str) -> str:
    """Return which signs the values of a column have, and how many of their intervals exclude 0.

    Args:
        of_seeds: One row of each seed.
        column: The column, which has an interval.
    """
    values = of_seeds[column]
    low = of_seeds[f"{column}_low"]
    high = of_seeds[f"{column}_high"]
    num_above = int((values > 0).sum())
    num_below = int((values < 0).sum())
    seeds = "the only seed" if len(values) == 1 else f"all {len(values)} seeds"
    if num_above == len(values):
        signs = f"above 0 in {seeds}"
    elif num_below == len(values):
        signs = f"below 0 in {seeds}"
    else:
        signs = f"not the same sign: above 0 in {num_above} of {len(values)} seeds"
    # An interval may be missing where too few documents were measured.
    num_intervals = int(low.notna().sum())
    num_excluding = int(((low > 0) | (high < 0)).sum())
    return f"{signs}; {num_excluding} of {num_intervals} intervals exclude 0"
