"""Compare nested settings, and name each key whose value has changed.

Settings are compared at their leaves, the dotted keys that have a value:

    {"seed": 3, "windows": {"long": 64, "short": 16}}   has   seed, windows.long and windows.short

Imports nothing of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any


def leaves(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key with its value. A list of mappings is numbered, as in
    training.length[0].tokens; any other list is a value, and so is an empty mapping. `prefix`: the
    beginning of all keys."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        elif _is_list_of_sections(value):
            for index, section in enumerate(value):
                yield from leaves(section, f"{prefix}{key}[{index}].")
        else:
            yield f"{prefix}{key}", value


def _is_list_of_sections(value: Any) -> bool:
    """Return whether a value is a list that is not empty and has mappings only."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, Mapping) for item in value)


def differences(stored: Mapping[Any, Any], current: Mapping[Any, Any]) -> list[str]:
    """Return a text for each key whose value differs, such as `seed=3 (now 4)`, sorted by key."""
    return list(differences_by_key(stored, current).values())


def differences_by_key(stored: Mapping[Any, Any], current: Mapping[Any, Any]) -> dict[str, str]:
    """Return the texts of `differences` by the dotted key that each is about."""
    stored_leaves = dict(leaves(stored))
    current_leaves = dict(leaves(current))
    changes = {}
    for key in sorted({*stored_leaves, *current_leaves}):
        # A missing key counts as null: settings are stored without those that have no effect.
        old = stored_leaves.get(key)
        new = current_leaves.get(key)
        if not _are_equal(old, new):
            changes[key] = f"{key}={old} (now {new})"
    return changes


def _are_equal(old: Any, new: Any) -> bool:
    """Return whether two values are equal. Texts with a slash are compared as paths: `runs/a` and
    `./runs/a` are equal, and so is the absolute path."""
    if isinstance(old, str) and isinstance(new, str) and "/" in old + new:
        return os.path.abspath(old) == os.path.abspath(new)
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(map(_are_equal, old, new))
    return bool(old == new)
