"""Nested dicts of settings: their leaves, and what of two of them differs. Imports nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key and its value; a section without keys is a value."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(then: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[str]:
    """For a message: each key that has another value now."""
    old, new = dict(leaves(then)), dict(leaves(now))
    return [
        f"{key}={old.get(key)} (now {new.get(key)})"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
