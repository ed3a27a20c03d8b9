"""Pair the measurements of an experiment that `compare` subtracts, and sum up what seeds agree on.

Two models are paired if they have the same seed and differ in one thing, their config or one axis
of the grid: pose_seed0 with rope_seed0, pose_seed1 with rope_seed1. Where all models are seeds of
one scheme, seeds are paired with each other.

Place in the flow: after the measurements, next to the figure. The command `compare` prints.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class Comparison:
    """Two schemes at one long window: a pair of measurements for each seed."""

    first_scheme: str
    second_scheme: str
    long: Long
    pairs: Sequence[Pair]

    def title_of(self, experiment: Experiment, pair: Pair) -> str:
        """Return a line that names both models of a pair, by label and name, and the window."""
        names = []
        for measurement in pair:
            label = experiment.label_of(measurement)
            name = measurement.model.name
            names.append(name if label == name else f"{label} ({name})")
        step = pair.first.step
        shown_step = "last step" if step is None else f"step {step:,}"
        return f"{names[0]} minus {names[1]}, long={self.long}, {shown_step}"


def comparisons_of(experiment: Experiment) -> list[Comparison]:
    """Return all comparisons, by pair of schemes, then by long window, the shortest first. Raise
    ConfigError if there are no two measured models."""
    measurements = _measurements_by_model(experiment)
    groups: dict[tuple[str, str], list[tuple[Model, Model]]] = defaultdict(list)
    measured = [model for model in experiment.models if model.name in measurements]
    for first, second in _pairs_of_models(measured):
        groups[first.scheme, second.scheme].append((first, second))
    if not groups:
        raise ConfigError(
            f"{experiment.folder} has one measured model: pass two results to compare"
        )
    comparisons = []
    for (first_scheme, second_scheme), models in groups.items():
        for long in measurements[models[0][0].name]:
            pairs = [
                Pair(measurements[first.name][long], measurements[second.name][long])
                for first, second in models
            ]
            comparisons.append(Comparison(first_scheme, second_scheme, long, pairs))
    return comparisons


def _measurements_by_model(experiment: Experiment) -> dict[str, dict[Long, Measurement]]:
    """Return the measurements of each model at its last measured step, by name and long window:
    those of the first of distant_states, without those that evaluate another seed's tokens."""
    measured = [one for one in experiment.measurements if one.choices_of is None]
    if not measured:
        raise ConfigError(f"{experiment.path} measures nothing; add a section `measure`")
    last_step = max(_step_number(measurement) for measurement in measured)
    state = measured[0].distant_states
    by_model: dict[str, dict[Long, Measurement]] = defaultdict(dict)
    for measurement in sorted(measured, key=lambda one: long_window(one.long).length):
        if _step_number(measurement) == last_step and measurement.distant_states == state:
            by_model[measurement.model.name][measurement.long] = measurement
    return by_model


def _step_number(measurement: Measurement) -> float:
    return math.inf if measurement.step is None else measurement.step


def _pairs_of_models(models: Sequence[Model]) -> Iterator[tuple[Model, Model]]:
    """Yield pairs of one seed that differ in one thing; if there are none, as all models are seeds
    of one scheme, each pair."""
    pairs = list(itertools.combinations(models, 2))
    is_paired = False
    for first, second in pairs:
        if first.seed == second.seed and _num_differences(first, second) == 1:
            is_paired = True
            yield first, second
    if not is_paired:
        yield from pairs


def _num_differences(first: Model, second: Model) -> int:
    """Return in how many of config and axes of the grid, without the seed, two models differ."""
    return sum(ours != theirs for ours, theirs in zip(first.choices, second.choices, strict=True))


# --- what seeds agree on --------------------------------------------------------------------------

AGREEMENT = "net_equal"
"""The column whose sign seeds are to share: net excess at equal gaps, the strictest test of one
measurement."""

GAP = "mean_gap"
"""The column with the difference of L_short − L_long, which is the same in each row of a pair."""


def describe_agreement(comparison: Comparison, tables: Sequence[pd.DataFrame]) -> list[str]:
    """Return lines that say, for the mean gap and for each k, whether all seeds have the same sign,
    and how many intervals exclude 0. `tables`: of the pairs that are compared. Only the rows that
    the figure draws count: the first selector, and the main set of targets."""
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
    """Return the signs of a column's values of some seeds, and how many of their intervals exclude
    0."""
    values = of_seeds[column]
    low = of_seeds[f"{column}_low"]
    high = of_seeds[f"{column}_high"]
    num_above = int((values > 0).sum())
    num_below = int((values < 0).sum())
    if num_above == len(values):
        signs = f"above 0 in all {len(values)} seeds"
    elif num_below == len(values):
        signs = f"below 0 in all {len(values)} seeds"
    else:
        signs = f"not the same sign: above 0 in {num_above} of {len(values)} seeds"
    num_intervals = int(low.notna().sum())
    num_excluding = int(((low > 0) | (high < 0)).sum())
    return f"{signs}; {num_excluding} of {num_intervals} intervals exclude 0"
