"""Read JSON so that nothing in it is silently lost or changed.

    parse_json(b'{"step": 3}', dict[str, int])                          # {"step": 3}
    json.loads('{"a": 1, "a": 2}', object_pairs_hook=unique)            # DuplicateKey
    without_crc(with_crc({"step": 3}))                                  # {"step": 3}

Files and lines that no manifest lists have a CRC-32 as their last key, by which a damaged one is
noticed.

JSON files of ours are read by `parse_json`, for which conform.py compares values with a type.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, TypeVar

from olmo_sparsity.base.conform import conform

T = TypeVar("T")

MAX_DEPTH = 50
"""The deepest nesting of lists and mappings that is read, deeper than that of our files. More could
exhaust the stack."""


def parse_json(content: bytes, kind: type[T]) -> T:
    """Return the content of a JSON file as this type. Raise ValueError with the reason."""
    try:
        value = json.loads(content.decode("utf-8"))
        is_too_deep = _depth(value) > MAX_DEPTH
    except RecursionError:  # of the parser itself, at a depth of about a thousand
        is_too_deep = True
    except ValueError as error:
        raise ValueError(f"not readable JSON ({error})") from None
    if is_too_deep:
        raise ValueError("it is nested too deep")
    if isinstance(value, dict):
        value = without_crc(value)
    return conform(value, kind)


def _depth(value: Any) -> int:
    """Return how deep lists and mappings are nested: 1 for a plain value, 2 for a list of them."""
    if not isinstance(value, dict | list):
        return 1
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, items), default=0)


class DuplicateKey(ValueError):
    """An object of JSON has a key twice."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these keys and values. Raise DuplicateKey if a key is there twice, for
    which `json.loads` would take the last value. Pass this as its `object_pairs_hook`."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        first_duplicate = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise DuplicateKey(f"the key {first_duplicate!r:.40} is there twice; keep one")
    return value


def with_crc(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object with a CRC-32 of its content as the last key: {"step": 3, "crc32": "…"}."""
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
    """Return the CRC-32 of an object as eight hexadecimal digits."""
    # Of the object as JSON, in the order of its keys: what was written is compared, and reading and
    # writing keep that order.
    return f"{zlib.crc32(json.dumps(value).encode()):08x}"
