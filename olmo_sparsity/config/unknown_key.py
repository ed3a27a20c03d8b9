"""Explain a key that a schema does not have: what the user may have meant, or which keys there are.

    training.num_step      did you mean 'training.num_steps'?                    (spelling)
    batch_size             did you mean 'training.batch_size'?                   (section)
    eos_token              the end-of-text token is the one in …                 (other program)
    grid                   belongs to `olmo-sparsity experiment`                 (other command)

Place in the flow: build.py → **`explain_unknown_key`** → the message of a ConfigError.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator
from typing import Any

from olmo_sparsity.config.schema import schema_fields, sections_in

_COMMAND_OF_KEY = {"grid": "experiment", "models": "experiment", "run_folder": "train"}
"""The command whose configs have this key, by which a config of another command is recognized."""

FEW_KEYS = 20
"""A message lists no more keys than this."""


def explain_unknown_key(key: str, schema: type, settings: Any) -> str:
    """Return the message for an unknown key.

    Args:
        key: The dotted key, with indices of lists: training.length[0].tokns.
        settings: All settings of the user, which may be those of another command.
    """
    for name, command in _COMMAND_OF_KEY.items():
        if name in settings and name not in schema_fields(schema):
            return f"'{name}' belongs to `olmo-sparsity {command}`"
    if key == "base":
        return "unknown key 'base': it is read from the config file; write it there"

    known_keys = [*dict.fromkeys(_known_keys(schema))]
    plain_key = re.sub(r"\[\d+\]", "", key)  # without the index of a list
    section, _, name = plain_key.rpartition(".")
    # It is known inside a list of sections, and here is a single section.
    if key in known_keys:
        return f"unknown key '{key}': only a list of sections has it ({section}[0].{name})"
    remedy = _remedies(schema).get(name)
    if remedy is not None:
        return f"unknown key '{key}': {remedy}"

    # The right name in the wrong section first, then the closest spelling.
    close = fnmatch.filter(known_keys, f"*.{name}")
    if not close:
        close = difflib.get_close_matches(plain_key, known_keys, n=1, cutoff=0.6)
    if close and close[0] == section:  # the closest match is the section itself
        close = []
        known_keys = [other for other in known_keys if other.startswith(f"{section}.")]
    if close:
        return f"unknown key '{key}'; did you mean '{close[0]}'?"
    choices = f"; choose from {', '.join(known_keys)}" if 0 < len(known_keys) <= FEW_KEYS else ""
    return f"unknown key '{key}'{choices}"


def _remedies(schema: type) -> dict[str, str]:
    """Return what to write here, by the names that other programs have for keys of this schema and
    of its sections."""
    remedies: dict[str, str] = {}
    for item in schema_fields(schema).values():
        remedies |= item.properties.other_names
        for section in sections_in(item.kind):
            remedies |= _remedies(section)
    return remedies


def _known_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield all dotted keys of a schema, sections included."""
    for item in schema_fields(schema).values():
        key = item.properties.shares_key_with or item.name
        yield prefix + key
        for section in sections_in(item.kind):
            yield from _known_keys(section, f"{prefix}{key}.")
