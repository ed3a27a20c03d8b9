"""Check values of JSON against a type, and build dataclasses from them. Imports nothing of ours."""

from __future__ import annotations

import json
import zlib
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_DEEPEST = 50
"""Our files are not nested so deep; deeper ones may exhaust the stack."""


def parse_json(content: bytes, kind: type[T]) -> T:
    """Raises ValueError with the reason."""
    try:
        value = json.loads(content.decode("utf-8"))
        too_deep = _depth(value) > _DEEPEST
    except RecursionError:
        too_deep = True
    except ValueError as error:
        raise ValueError(f"not readable JSON ({error})") from None
    if too_deep:
        raise ValueError("it is nested too deep")
    return conform(check_crc(value) if isinstance(value, dict) else value, kind)


def with_crc(value: dict[str, Any]) -> dict[str, Any]:
    """Add a CRC-32 of the content as last key, for a file or line without a manifest."""
    return {**value, "crc32": _crc(value)}


def check_crc(value: dict[str, Any]) -> dict[str, Any]:
    """Check and remove the CRC-32; ValueError if it differs. Older versions wrote none."""
    rest = {key: item for key, item in value.items() if key != "crc32"}
    if len(rest) < len(value) and value["crc32"] != _crc(rest):
        raise ValueError("it is not what was written (its crc32 differs)")
    return rest


def _crc(value: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"


def conform(value: Any, kind: Any, where: str = "") -> Any:
    """Check a JSON value against a type, and build dataclasses from objects. An int is accepted as
    a float, a bool as neither."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return _fill(value, kind, where)
    if origin is Literal and any(type(value) is type(item) and value == item for item in inner):
        return value
    if origin in (Union, UnionType):
        for choice in inner:
            if isinstance(value, _outer(choice)) and (value is None) == (choice is type(None)):
                return conform(value, choice, where)
    elif origin is dict and isinstance(value, dict):
        return {key: conform(item, inner[1], f"{where}.{key}") for key, item in value.items()}
    elif origin is list and isinstance(value, list):
        return [conform(item, inner[0], f"{where}[{i}]") for i, item in enumerate(value)]
    elif (kind is float and type(value) in (int, float)) or type(value) is kind:
        return value
    shown = repr(value)
    shown = shown if len(shown) < 60 else f"{shown[:60]}…"
    name = "an object" if is_dataclass(kind) else getattr(kind, "__name__", str(kind))
    raise ValueError(f"{where.lstrip('.') or 'it'} must be {name}, not {shown}")


def _outer(kind: Any) -> Any:
    return (
        dict if is_dataclass(kind) else (int, float) if kind is float else get_origin(kind) or kind
    )


def _fill(value: dict, kind: type, where: str) -> Any:
    known, types = {item.name: item for item in fields(kind)}, _types(kind)
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
    if not isinstance(value, dict | list):
        return 1
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
