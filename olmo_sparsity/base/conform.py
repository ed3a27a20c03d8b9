"""Check values of JSON against a type, and build dataclasses from them.

Place in the flow: below everything that reads JSON or YAML. Imports nothing of ours.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Fill = Callable[[dict, type, str], Any]

_DEEPEST = 50
"""Our files are not nested so deep; deeper ones may exhaust the stack."""


def parse_json(content: bytes, kind: type[T]) -> T:
    """Return the content of a JSON file as this type. Raise ValueError with the reason."""
    try:
        value = json.loads(content.decode("utf-8"))
        too_deep = _depth(value) > _DEEPEST
    except RecursionError:
        too_deep = True
    except ValueError as error:
        raise ValueError(f"not readable JSON ({error})") from None
    if too_deep:
        raise ValueError("it is nested too deep")
    if isinstance(value, dict):
        value = without_crc(value)
    return conform(value, kind)


class DuplicateKey(ValueError):
    """An object of JSON has a key twice."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these keys and values; raise DuplicateKey for a key that is there twice.
    For `object_pairs_hook` of `json.loads`, which would take the last value."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        (first, *_) = [key for number, key in enumerate(keys) if key in keys[:number]]
        raise DuplicateKey(f"the key {first!r:.40} is there twice; keep one")
    return value


def with_crc(value: dict[str, Any]) -> dict[str, Any]:
    """Add a CRC-32 of the content as last key, for a file or line without a manifest."""
    return {**value, "crc32": _crc(value)}


def without_crc(value: dict[str, Any]) -> dict[str, Any]:
    """Check and remove the CRC-32; ValueError if it differs. Older versions wrote none."""
    rest = {key: item for key, item in value.items() if key != "crc32"}
    if len(rest) < len(value) and value["crc32"] != _crc(rest):
        raise ValueError("it is not what was written (its crc32 differs)")
    return rest


def _crc(value: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"


def conform(value: Any, kind: Any, where: str = "", fill: Fill | None = None) -> Any:
    """Return a value as this type, or raise ValueError: an int as a float, but a bool as neither;
    the name of an enum's member as that member. `fill` builds a dataclass from a dict."""
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(value, dict):
        # is_dataclass also accepts instances, and `kind` is a type.
        return (fill or _fill)(value, kind, where)  # type: ignore[arg-type]
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin is Literal:
        # The types are compared as well, since 1 == True in Python.
        if any(type(value) is type(item) and value == item for item in inner):
            return value
    elif origin in (Union, UnionType):
        for choice in inner:
            if _may_become(value, choice):
                return conform(value, choice, where, fill)
    elif origin is dict and isinstance(value, dict):
        return {k: conform(item, inner[1], f"{where}.{k}", fill) for k, item in value.items()}
    elif origin in (list, tuple) and isinstance(value, origin):
        items = enumerate(value)
        return origin(conform(item, inner[0], f"{where}[{i}]", fill) for i, item in items)
    else:
        plain = _plain(value, kind)
        if plain is not _NO_VALUE:
            return plain
    shown = repr(value)
    if len(shown) >= 60:
        shown = f"{shown[:60]}…"
    raise ValueError(f"{where.lstrip('.') or 'it'} must be {_called(kind)}, not {shown}")


_NO_VALUE = object()


def _plain(value: Any, kind: Any) -> Any:
    """Return a value as an enum's member, a number or another class; _NO_VALUE if it is none."""
    if isinstance(kind, type) and issubclass(kind, Enum) and str(value) in kind.__members__:
        return kind[str(value)]
    if kind in (int, float) and isinstance(value, _outer(kind)) and not isinstance(value, bool):
        with suppress(OverflowError):
            return kind(value)
    elif type(value) is kind:
        return value
    return _NO_VALUE


def _may_become(value: Any, choice: Any) -> bool:
    """Return whether a value is tried as this type of a union. The outer type alone decides, so
    that a mistake inside of a list is named, and not the union."""
    if get_origin(choice) is Literal and value not in get_args(choice):
        return False
    return isinstance(value, _outer(choice)) and (value is None) == (choice is type(None))


def _outer(kind: Any) -> Any:
    """Return the types of the values that may become a `kind`."""
    if get_origin(kind) is Literal:
        return tuple(map(type, get_args(kind)))
    if is_dataclass(kind):
        return dict
    if kind is float:
        return Real
    if kind is int:
        return Integral
    return get_origin(kind) or kind


_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    type(None): "null",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}


def _called(kind: Any) -> str:
    """Name a type as one who writes YAML knows it."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        accepted = ", ".join(map(str, inner or kind.__members__))
        return accepted if len(inner) == 1 else f"one of {accepted}"
    if origin in (Union, UnionType):
        return " or ".join(map(_called, inner))
    if is_dataclass(kind):
        return "a mapping"
    return _NAMES.get(origin or kind, str(kind))


def _fill(value: dict, kind: type, where: str) -> Any:
    """Build a dataclass from a dict, with defaults for what is absent."""
    known = {item.name: item for item in fields(kind)}
    types = _types(kind)
    for name in value.keys() - known.keys():
        raise ValueError(f"{where.lstrip('.') or 'it'} has an unknown key '{name}'")
    for name, item in known.items():
        if name not in value and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{where.lstrip('.') or 'it'} lacks '{name}'")
    return kind(**{n: conform(item, types[n], f"{where}.{n}") for n, item in value.items()})


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _depth(value: Any) -> int:
    """Return how deep lists and mappings are nested."""
    if not isinstance(value, dict | list):
        return 1
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, items), default=0)
