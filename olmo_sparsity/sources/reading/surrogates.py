"""Refuse texts with lone surrogates, which neither tokenizers nor files take.

UTF-16 writes a letter beyond 16 bits, such as an emoji, as two *surrogates*: code points from
U+D800 to U+DFFF that mean nothing by themselves. A Python text holds a lone one if JSON was cut
within an emoji, or if bytes that are not UTF-8 were read as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from olmo_sparsity.base.errors import ConfigError, printable

SURROGATE = re.compile("[\ud800-\udfff]")


def check_no_lone_surrogates(value: Any, description: str) -> None:
    """Raise ConfigError if a text, or any text in nested lists and objects, has a lone surrogate.

    Args:
        value: A text, list or object.
        description: What the value is, for the message.
    """
    # A list of what is left to check, not recursion: objects may be nested beyond its limit.
    waiting = [(description, value)]
    while waiting:
        where, item = waiting.pop()
        if isinstance(item, str):
            match = SURROGATE.search(item)
            if match is not None:
                letter = json.dumps(match[0])[1:-1]
                raise ConfigError(
                    f"{where}: character {match.start()} is {letter}, half of a letter (a lone "
                    "surrogate); write the whole letter, or remove it"
                )
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                name = printable(str(key))
                waiting.append((f"{where}, key '{name}'", inner))
                waiting.append((f"{where}, the name of key '{name}'", key))
        elif isinstance(item, list | tuple):
            waiting += [(f"{where}, number {i}", inner) for i, inner in enumerate(item)]
