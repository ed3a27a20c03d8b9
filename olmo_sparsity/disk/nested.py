"""Flatten and compare nested dicts of settings. Imports nothing of ours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any


def leaves(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All dotted keys with their values; an empty section is a value, and so is a plain list."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            for number, one in enumerate(value):
                yield from leaves(one, f"{prefix}{key}[{number}].")
        else:
            yield f"{prefix}{key}", value


def differences(then: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[str]:
    """Each key with a changed value, for a message."""
    old, new = dict(leaves(then)), dict(leaves(now))
    return [
        f"{key}={old.get(key)} (now {new.get(key)})"
        for key in sorted({*old, *new})
        if not _same(old.get(key), new.get(key))
    ]


def _same(then: Any, now: Any) -> bool:
    """One path has several spellings: `runs/a`, `./runs/a`, and with the folder before it."""
    if isinstance(then, str) and isinstance(now, str) and "/" in then + now:
        return os.path.abspath(then) == os.path.abspath(now)
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return all(map(_same, then, now))
    return bool(then == now)
