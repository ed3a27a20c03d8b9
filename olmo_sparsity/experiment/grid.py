"""Expand the grid of an experiment: all combinations of one choice of each axis.

An axis is a key and its values, or a name and named sets of keys:

    grid:                                       choices (label: settings)
      seed: [1, 2]                              1: {seed: 1}, 2: {seed: 2}
      positions:
        pose: {positions.scheme: pose}          pose: {positions.scheme: pose}
        rope: {positions.scheme: contiguous}    rope: {positions.scheme: contiguous}

These are four combinations. A model is named by its choices: that of seed 1 with PoSE, of the
config c4.yaml, is c4_seed1_pose.

Place in the flow: file.py → **`expand_grid`** → models.py, which makes a model of each combination.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from olmo_sparsity.base.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """One of the values, or of the sets of keys, of an axis."""

    label: str
    """The value as text, or the name of the set."""

    settings: Mapping[str, Any]
    """The dotted keys that it sets, with their values."""


@dataclass(frozen=True)
class Combination:
    """A choice of each axis."""

    name_parts: Mapping[str, str]
    """The part of a model's name that says what is chosen, by axis; empty for an axis with one
    value."""

    settings: Mapping[str, str]
    """The dotted keys that are set, with their values as on the command line."""


def expand_grid(origin: str, grid: Mapping[str, Any]) -> Iterator[Combination]:
    """Yield all combinations, the last axis changing fastest.

    Args:
        origin: What messages call the grid, such as `c4_1b.yaml: grid`.
        grid: The section of the file.
    """
    # Axes in the order of the file: names of models, and their indices in a SLURM array, follow it.
    axes = [_choices_of(origin, axis, values) for axis, values in grid.items()]
    for choices in itertools.product(*axes):
        name_parts = {}
        settings: dict[str, str] = {}
        for axis, choice in zip(grid, choices, strict=True):
            name_parts[axis] = _name_part(axis, grid[axis], choice.label)
            settings |= {key: _as_text(value) for key, value in choice.settings.items()}
        yield Combination(name_parts, settings)


def _choices_of(origin: str, axis: str, values: Any) -> list[Choice]:
    """Return the choices of an axis."""
    has_names = isinstance(values, dict) and all(isinstance(v, dict) for v in values.values())
    # An empty axis would leave no combination at all.
    if not values or not (has_names or isinstance(values, list)):
        raise ConfigError(f"{origin}.{axis} must be a list of values, or named sets of keys")
    if has_names:
        return [Choice(str(label), settings) for label, settings in values.items()]
    return [Choice(_as_text(value), {axis: value}) for value in values]


def _name_part(axis: str, values: Any, label: str) -> str:
    """Return the part of a model's name for a choice: `seed1`, `pose`; empty if the axis has one
    value only, so that nothing is chosen.

    Args:
        axis: The name of the axis.
        values: Its values or sets of keys.
        label: The label of the choice.
    """
    if isinstance(values, dict):
        return as_name(label)  # the name that the user has given the set
    if len(values) == 1:
        return ""
    # Of optimizer.learning_rate the last word is enough.
    key = axis.rsplit(".", 1)[-1]
    return as_name(key + label)


def as_name(label: str) -> str:
    """Return a label as a part of a folder's name. All characters but letters, digits and `_.+-`
    become hyphens: "a b/c" is a-b-c."""
    return re.sub(r"[^\w.+-]", "-", label)


def _as_text(value: Any) -> str:
    """Return a value as it is written in an option of the command line."""
    # Options are read as YAML, of which JSON is a part: true, null, [1, 2]. A string needs no
    # quotes.
    return value if isinstance(value, str) else json.dumps(value)


# --- options that would overrule the grid ---------------------------------------------------------


def check_overrides(path: str, grid: Mapping[str, Any], overrides: list[str]) -> None:
    """Raise ConfigError for an option that sets a key of the grid, as models would then be equal,
    and for a grid in which two axes set one key.

    Args:
        path: The experiment's file, for messages.
        overrides: `--key.sub=value` words for all models.
    """
    axis_of_key = _axes_by_key(path, grid)
    for word in overrides:
        key = word.lstrip("-").partition("=")[0]
        if key == "run_folder":
            raise ConfigError(f"{word}: an experiment has several runs; set `runs` in {path}")
        for key_of_grid, axis in axis_of_key.items():
            # Either may be a section that holds the other, as `--optimizer={…}` does.
            if _is_within(key_of_grid, key) or _is_within(key, key_of_grid):
                raise ConfigError(
                    f"{word}: grid.{axis} of {path} sets {key_of_grid}; change it there"
                )
    if "run_folder" in axis_of_key:
        raise ConfigError(f"{path}: grid.run_folder has no effect; runs are named by their choices")


def _axes_by_key(path: str, grid: Mapping[str, Any]) -> dict[str, str]:
    """Return the axis that sets each key; raise ConfigError if two axes set one."""
    axis_of_key: dict[str, str] = {}
    for axis, values in grid.items():
        keys = [axis]  # an axis with a list of values is called like its key
        if isinstance(values, dict):
            keys = []
            for settings in values.values():
                keys += settings if isinstance(settings, dict) else []
        for key in keys:
            other_axis = axis_of_key.setdefault(key, axis)
            if other_axis != axis:
                raise ConfigError(
                    f"{path}: grid.{other_axis} and grid.{axis} set {key}; set it in one of them"
                )
    return axis_of_key


def _is_within(key: str, section: str) -> bool:
    """Return whether a dotted key is the section, or in it."""
    return f"{key}.".startswith(f"{section}.")
