"""Fields with a range, fields that are one or several, and those that are read only beside others.

Place in the flow: beneath the sections; check.py and file.py read the metadata. A key that would be
ignored is refused. The `only_if` metadata serves this: `num_chunks` is used only if `scheme` is
`pose`, so setting it with `contiguous` is an error.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def within(least: float, most: float | None = None) -> dict[str, Any]:
    """Metadata of a field: the range of its value, or of each value of a list."""
    return {"within": (least, most)}


def number(default: Any, least: float, most: float | None = None) -> Any:
    """A field with a range. An optional field may also be None."""
    return field(default=default, metadata=within(least, most))


def several(key: str) -> Any:
    """A field that holds what its sibling `key` is given as a list of sections. Files, messages and
    the command line know only that key."""
    return field(default_factory=list, metadata={"several": key})


def only_if(
    sibling: str, *values: str, default: Any, least: float | None = None, most: float | None = None
) -> Any:
    """A field that is read only when its sibling field has one of these values."""
    range_of = {} if least is None else within(least, most)
    return field(default=default, metadata={"only_if": (sibling, values)} | range_of)
