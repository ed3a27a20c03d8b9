"""Check values of JSON and YAML against a type, and build dataclasses from them.

    @dataclass
    class Window:
        long: int | Literal["all"]
        short: int = 8

    conform({"long": 32}, Window)         # Window(long=32, short=8)
    conform({"long": "none"}, Window)     # ValueError: long must be …, not 'none'

A ValueError names the key of a wrong value (`a.b[2]`), what it must be, and what it is.

json_text.py calls it for files of JSON, and config/build.py for YAML, with its own `fill`. Imports
nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Fill = Callable[[dict, type, str], Any]
"""A function that builds a dataclass of a type from a mapping: (mapping, type, dotted key) →
dataclass."""

LONGEST_SHOWN = 60
"""The number of characters of a wrong value that a message shows."""


def conform(value: Any, kind: Any, key: str = "", fill: Fill | None = None) -> Any:
    """Return a value as this type, or raise ValueError if it is of another one.

    Args:
        kind: A class, or a type hint such as `list[int] | None`.
        key: The dotted key of the value in its file, for the error. Empty: the file itself.
        fill: Builds dataclasses from mappings, as config/build.py does by its own rules. With None
            each key of the mapping is a field.

    Where a float is expected, an int is accepted, too; a bool is accepted as neither. The name of
    an enum's member becomes that member.
    """
    converted = _convert(value, kind, key, fill or _fill)
    if converted is _OTHER_TYPE:
        shown = repr(value)
        if len(shown) >= LONGEST_SHOWN:
            shown = f"{shown[:LONGEST_SHOWN]}…"
        raise ValueError(f"{_spell_key(key)} must be {_describe(kind)}, not {shown}")
    return converted


_OTHER_TYPE = object()
"""The result of `_convert` for a value of another type. (None is a value.)"""


def _spell_key(key: str) -> str:
    """Return a key as a message names it. Keys below the file itself begin with a dot."""
    return key.lstrip(".") or "it"


def _convert(value: Any, kind: Any, key: str, fill: Fill) -> Any:
    """Return a value as this type; `_OTHER_TYPE` if it is of another one. Raise ValueError if the
    type is right and that of a value inside is not, so that the message names the inner key."""
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        return fill(value, kind, key)

    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Literal:
        # The types are compared as well, since 1 == True in Python.
        is_member = any(type(value) is type(member) and value == member for member in arguments)
        return value if is_member else _OTHER_TYPE
    if origin in (Union, UnionType):
        # The first type that may fit is taken, so that an error names what is wrong inside of it.
        member_kind = next((member for member in arguments if _may_become(value, member)), None)
        return _OTHER_TYPE if member_kind is None else conform(value, member_kind, key, fill)

    # Collections are converted item by item.
    if origin is dict and isinstance(value, dict):
        _, kind_of_values = arguments
        return {
            name: conform(item, kind_of_values, f"{key}.{name}", fill)
            for name, item in value.items()
        }
    if origin in (list, tuple) and isinstance(value, origin):
        kind_of_items = arguments[0]  # a tuple is declared as tuple[T, ...]
        return origin(
            conform(item, kind_of_items, f"{key}[{index}]", fill)
            for index, item in enumerate(value)
        )
    return _convert_plain(value, kind)


def _convert_plain(value: Any, kind: Any) -> Any:
    """Return a value as a member of an enum, as a number, or as an instance of another class.
    Return `_OTHER_TYPE` if it is of another type."""
    if isinstance(kind, type) and issubclass(kind, Enum) and str(value) in kind.__members__:
        return kind[str(value)]
    if kind in (int, float):
        is_number = isinstance(value, _accepted(kind)) and not isinstance(value, bool)
        if is_number:
            with suppress(OverflowError):  # an int of thousands of digits as a float
                return kind(value)
        return _OTHER_TYPE
    # Not isinstance: True is an int, and a subclass of str may write itself in another way.
    return value if type(value) is kind else _OTHER_TYPE


def _may_become(value: Any, kind: Any) -> bool:
    """Return whether a value is taken for this member of a union. Only its outer type decides. So
    for [1, "x"] as `list[int] | str` the error names the "x", and not the union."""
    if value is None or kind is NoneType:
        return value is None and kind is NoneType
    if get_origin(kind) is Literal and value not in get_args(kind):
        return False
    return isinstance(value, _accepted(kind))


def _accepted(kind: Any) -> Any:
    """Return the classes of the values that may become a `kind`."""
    if get_origin(kind) is Literal:
        return tuple(map(type, get_args(kind)))
    if is_dataclass(kind):
        return dict
    # Not int and float: numpy's numbers are of these classes, too.
    if kind is float:
        return Real
    if kind is int:
        return Integral
    return get_origin(kind) or kind


_TYPES_IN_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    NoneType: "null",
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
    return _TYPES_IN_WORDS.get(origin or kind, str(kind))


def _fill(value: dict, kind: type, key: str) -> Any:
    """Return a dataclass with the values of a mapping, and defaults for fields that it lacks. Raise
    ValueError for an unknown key, and for a field that has no default."""
    known_fields = {item.name: item for item in fields(kind)}
    types = _types(kind)
    for name in value.keys() - known_fields.keys():
        raise ValueError(f"{_spell_key(key)} has an unknown key '{name}'")
    for name, item in known_fields.items():
        has_default = item.default is not MISSING or item.default_factory is not MISSING
        if name not in value and not has_default:
            raise ValueError(f"{_spell_key(key)} lacks '{name}'")
    return kind(
        **{name: conform(item, types[name], f"{key}.{name}") for name, item in value.items()}
    )


@cache
def _types(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields. They are kept: each is evaluated from text."""
    return get_type_hints(kind)
