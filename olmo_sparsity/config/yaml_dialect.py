"""Parse and write the YAML of configs: version 1.2's numbers, no dates, nothing silently lost.

PyYAML reads YAML 1.1, in which a learning rate of 1e-3 is a text. Here numbers are those of 1.2:

    in the file    YAML 1.1          here
    1e-3           text "1e-3"       0.001
    010            8                 10
    1:30           90                text "1:30"
    1_0            10                text "1_0"
    no             false             false: words for true and false are those of 1.1
    2026-01-01     a date            text "2026-01-01"

A key that is there twice is an error, as are texts that would exhaust the stack or the memory.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import yaml

from olmo_sparsity.config.schema import LARGEST

MAX_DIGITS = 100
"""The largest number of digits of a whole number. One with more is a mistake. A number of fewer
digits that is above `LARGEST` is refused by the schema, with the name of the key."""

MAX_ALIASES = 20
"""The largest number of aliases in a text. An alias (*name) repeats a value, so that ten levels of
ten aliases each would build 10^10 values. With twenty, each of which doubles what is before it, the
value has a million copies at most."""

MAX_DEPTH = 50
"""The largest number of mappings and lists within each other. Deeper ones exhaust the library's
stack, which ends the process without a message."""

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def dump_yaml(value: Any) -> str:
    """Return plain values as YAML, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, allow_unicode=True, sort_keys=False)


@lru_cache(maxsize=64)  # the models of an experiment have their base file in common
def parse_yaml(text: str, at_depth: int = 0) -> Any:
    """Return the value of a YAML text. Raise ValueError, or an error of the library, for a text
    that cannot be read.

    Calls with equal arguments return the same object: callers must not change it.

    Args:
        text: The YAML text.
        at_depth: How many mappings the value will be put into.
    """
    _check_size(text, at_depth)
    return yaml.load(text, _Loader)


def _check_size(text: str, at_depth: int) -> None:
    """Raise ValueError for a text that is nested too deep, has too many aliases, or an alias inside
    the value that it stands for. Only events are read, so nothing large is built before."""
    # The anchor (&name) of each collection around the current event; None if it has no anchor.
    open_anchors: list[str | None] = [None] * at_depth
    num_aliases = 0
    for event in yaml.parse(text, _SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            open_anchors.pop()
        elif isinstance(event, yaml.AliasEvent):
            num_aliases += 1
            if event.anchor in open_anchors:
                raise ValueError(f"the alias *{event.anchor} is part of itself")
            if num_aliases > MAX_ALIASES:
                raise ValueError(f"it has more than {MAX_ALIASES} aliases (*name)")
        if len(open_anchors) > MAX_DEPTH:
            raise ValueError(f"it is nested too deep: more than {MAX_DEPTH} levels")


_WHOLE = re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_DECIMAL = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_FIRST_LETTERS = list("-+0123456789.")
"""The letters with which a number can begin: PyYAML looks up patterns by the first letter."""


def _read_numbers_of_yaml_1_2(dialect: Any) -> None:
    """Make a loader or dumper take the numbers of YAML 1.2 for numbers, and no text for a date."""
    dialect.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if not pair[0].endswith((":timestamp", ":int", ":float"))]
        for first, pairs in dialect.yaml_implicit_resolvers.items()
    }
    # The first pattern that matches counts, and a whole number is a decimal, too.
    for kind, pattern in (("int", _WHOLE), ("float", _DECIMAL)):
        dialect.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", pattern, _FIRST_LETTERS)


class _Loader(_SafeLoader):
    """A safe loader that refuses duplicate keys, and numbers of more than MAX_DIGITS digits, and
    names their lines."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        # PyYAML would silently take the last value of a key.
        line_of_key: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in line_of_key:
                raise ValueError(f"it has {name} twice (lines {line_of_key[name]} and {line})")
            line_of_key[name] = line
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        text = self.construct_scalar(node)
        if len(text) > MAX_DIGITS:
            # Python refuses to read much longer ones, in words of its own.
            line = node.start_mark.line + 1
            raise ValueError(
                f"line {line} has a number of {len(text):,} digits, {text[:10]}…; the most is "
                f"{LARGEST:.0e}"
            )
        bases = {"0x": 16, "0o": 8}
        return int(text, bases.get(text[:2], 10))


class _Dumper(yaml.SafeDumper):
    """A safe dumper that also quotes the texts that `_Loader` would read as numbers."""


_read_numbers_of_yaml_1_2(_Loader)
_read_numbers_of_yaml_1_2(_Dumper)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
