"""Read the section `measure` of an experiment's file.

    measure: {steps: [5000, last], long: 960, ks: [1, 2]}

    read_measure_section(…)
        .section     MeasureSection(steps=[5000, "last"], long=[960])     what is measured
        .options     {"ks": [1, 2]}                                       options of `measure`

Place in the flow: file.py → **`read_measure_section`** → measurements.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from olmo_sparsity.analysis.options import ModelOptions, Settings, TextOptions
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.renamed import current_keys
from olmo_sparsity.config.build import build
from olmo_sparsity.config.schema import schema_fields
from olmo_sparsity.experiment.sections import ExperimentFile, MeasureSection

_OPTION_SCHEMAS = (Settings, TextOptions, ModelOptions)
"""The schemas of what `measure` of an experiment may have besides `MeasureSection`."""


@dataclass(frozen=True)
class MeasureKeys:
    """The section `measure` of a file, divided by who reads its keys."""

    section: MeasureSection = field(default_factory=MeasureSection)
    """Keys that say what is measured."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are options of the command `measure`."""


def read_measure_section(file: ExperimentFile, path: str) -> MeasureKeys:
    """Return the section `measure`, checked; the defaults if the file has none.

    Args:
        file: What the file says.
        path: The path of the file, for messages.
    """
    values = current_keys(file.measure or {})
    keys_of_section = schema_fields(MeasureSection).keys()
    _refuse_unknown_keys(values, path)
    section_values = {key: value for key, value in values.items() if key in keys_of_section}
    for key in ("long", "steps", "distant_states"):
        # A single value may be written without brackets.
        if key in section_values and not isinstance(section_values[key], list):
            section_values[key] = [section_values[key]]
    section = build(MeasureSection, section_values, f"{path}: measure")

    options = {key: value for key, value in values.items() if key not in keys_of_section}
    for schema in _OPTION_SCHEMAS:  # for the messages alone: each measurement builds its own
        options_of_schema = {
            key: value for key, value in options.items() if key in schema_fields(schema)
        }
        build(schema, options_of_schema, f"{path}: measure")
    return MeasureKeys(section, options)


def _refuse_unknown_keys(values: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for a key that is neither one of `MeasureSection` nor an option of the
    command `measure`."""
    known = set(schema_fields(MeasureSection))
    for schema in _OPTION_SCHEMAS:
        known |= set(schema_fields(schema))
    known.remove("prefix_ids")  # follows from `prefix` and the tokenizer
    for key in sorted(values.keys() - known):
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else "; `measure --help` lists its options"
        raise ConfigError(f"{path}: unknown key 'measure.{key}'{hint}")
