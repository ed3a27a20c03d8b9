"""Check values of JSON and YAML against a type, and build dataclasses from them.

    @dataclass
    class Window:
        long: int | Literal["all"]
        short: int = 8

    conform({"long": 32}, Window)         # Window(long=32, short=8)
    conform({"long": "none"}, Window)     # ValueError: long must be …, not 'none'

A ValueError names the key of a wrong value (`a.b[2]`), what it must be, and what it is. Files of
ours have a CRC-32 as their last key (`with_crc`), by which a damaged one is noticed.

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
"""Builds a dataclass of a type from the values under a dotted key: (values, type, key)."""

MAX_DEPTH = 50
"""The deepest nesting of lists and mappings that is read, deeper than that of our files. More could
exhaust the stack."""

LONGEST_SHOWN = 60
"""The number of characters of a wrong value that a message shows."""


def parse_json(content: bytes, kind: type[T]) -> T:
    """Return the content of a JSON file as this type. Raise ValueError with the reason."""
    try:
        value = json.loads(content.decode("utf-8"))
        is_too_deep = _depth(value) > MAX_DEPTH
    except RecursionError:
        is_too_deep = True
    except ValueError as error:
        raise ValueError(f"not readable JSON ({error})") from None
    if is_too_deep:
        raise ValueError("it is nested too deep")
    if isinstance(value, dict):
        value = without_crc(value)
    return conform(value, kind)


class DuplicateKey(ValueError):
    """An object of JSON has a key twice."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these keys and values. Raise DuplicateKey if a key is there twice, for
    which `json.loads` would take the last value. Pass this as its `object_pairs_hook`."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        (first, *_) = [key for number, key in enumerate(keys) if key in keys[:number]]
        raise DuplicateKey(f"the key {first!r:.40} is there twice; keep one")
    return value


def with_crc(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object with a CRC-32 of its content as the last key. Files and lines that no
    manifest lists are stored like this."""
    return {**value, "crc32": _crc(value)}


def without_crc(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object without its CRC-32. Raise ValueError if the content has another one. An
    object of an older version, which has none, is accepted."""
    content = {key: item for key, item in value.items() if key != "crc32"}
    has_crc = len(content) < len(value)
    if has_crc and value["crc32"] != _crc(content):
        raise ValueError("it is not what was written (its crc32 differs)")
    return content


def _crc(value: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"


def conform(value: Any, kind: Any, place: str = "", fill: Fill | None = None) -> Any:
    """Return a value as this type, or raise ValueError if it is of another one.

    kind: A class, or a type hint such as `list[int] | None`.
    place: The dotted key of the value in its file, for the error.
    fill: Builds dataclasses from mappings, in place of `_fill`.

    An int is accepted as a float, but a bool as neither, and the name of an enum's member as that
    member.
    """
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(value, dict):
        # is_dataclass also accepts instances, and `kind` is a type.
        return (fill or _fill)(value, kind, place)  # type: ignore[arg-type]
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        # The types are compared as well, since 1 == True in Python.
        if any(type(value) is type(item) and value == item for item in arguments):
            return value
    elif origin in (Union, UnionType):
        for choice in arguments:
            if _may_become(value, choice):
                return conform(value, choice, place, fill)
    elif origin is dict and isinstance(value, dict):
        _, kind_of_values = arguments
        return {
            key: conform(item, kind_of_values, f"{place}.{key}", fill)
            for key, item in value.items()
        }
    elif origin in (list, tuple) and isinstance(value, origin):
        kind_of_items = arguments[0]  # a tuple is declared as tuple[T, ...]
        return origin(
            conform(item, kind_of_items, f"{place}[{index}]", fill)
            for index, item in enumerate(value)
        )
    else:
        plain = _as_plain(value, kind)
        if plain is not _NO_VALUE:
            return plain
    shown = repr(value)
    if len(shown) >= LONGEST_SHOWN:
        shown = f"{shown[:LONGEST_SHOWN]}…"
    raise ValueError(f"{place.lstrip('.') or 'it'} must be {_describe(kind)}, not {shown}")


_NO_VALUE = object()
"""The result of `_as_plain` for a value of another type. (None is a value.)"""


def _as_plain(value: Any, kind: Any) -> Any:
    """Return a value as a member of an enum, as a number, or as an instance of another class.
    Return _NO_VALUE if it is of another type."""
    if isinstance(kind, type) and issubclass(kind, Enum) and str(value) in kind.__members__:
        return kind[str(value)]
    if kind in (int, float) and isinstance(value, _accepted(kind)) and not isinstance(value, bool):
        with suppress(OverflowError):  # an int of thousands of digits as a float
            return kind(value)
    elif type(value) is kind:
        return value
    return _NO_VALUE


def _may_become(value: Any, choice: Any) -> bool:
    """Return whether a value is tried as this type of a union. Only its outer type decides. So for
    [1, "x"] as `list[int] | str` the error names the "x", and not the union."""
    if get_origin(choice) is Literal and value not in get_args(choice):
        return False
    return isinstance(value, _accepted(choice)) and (value is None) == (choice is type(None))


def _accepted(kind: Any) -> Any:
    """Return the classes of the values that may become a `kind`."""
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


def _describe(kind: Any) -> str:
    """Return a type in the words of somebody who writes YAML, such as "a whole number or null"."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        accepted = ", ".join(map(str, arguments or kind.__members__))
        return accepted if len(arguments) == 1 else f"one of {accepted}"
    if origin in (Union, UnionType):
        return " or ".join(map(_describe, arguments))
    if is_dataclass(kind):
        return "a mapping"
    return _NAMES.get(origin or kind, str(kind))


def _fill(value: dict, kind: type, place: str) -> Any:
    """Return a dataclass with the values of a mapping, and defaults for fields that it lacks. Raise
    ValueError for an unknown key, and for a field that has no default."""
    known = {item.name: item for item in fields(kind)}
    types = _types(kind)
    for name in value.keys() - known.keys():
        raise ValueError(f"{place.lstrip('.') or 'it'} has an unknown key '{name}'")
    for name, item in known.items():
        has_default = item.default is not MISSING or item.default_factory is not MISSING
        if name not in value and not has_default:
            raise ValueError(f"{place.lstrip('.') or 'it'} lacks '{name}'")
    return kind(
        **{name: conform(item, types[name], f"{place}.{name}") for name, item in value.items()}
    )


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _depth(value: Any) -> int:
    """Return how deep lists and mappings are nested: 1 for a plain value, 2 for a list of them."""
    if not isinstance(value, dict | list):
        return 1
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, items), default=0)
