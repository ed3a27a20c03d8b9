"""Parse and write the YAML of configs: version 1.2's numbers, no dates, nothing silently lost.

PyYAML reads YAML 1.1, where 010 is 8, 1:30 is 90, 1_0 is 10, and 1e-3 and 2026-01-01 are a text and
a date. Here numbers are those of YAML 1.2 (010 is 10, 1e-3 a number), and a date is a text. A key
that is there twice is an error, as are texts that would exhaust the stack or the memory.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import yaml

from olmo_sparsity.config.schema import LARGEST

MAX_DIGITS = 100
"""Of a whole number. One with more is a mistake that no message can show."""

MAX_ALIASES = 20
"""Of a text. An alias (*name) repeats a part, and ten levels of ten aliases are 10^10 parts."""

MAX_DEPTH = 50
"""Of mappings and lists within each other. Deeper ones exhaust the library's stack, which ends the
process without a message."""

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def dump_yaml(value: Any) -> str:
    """Return plain values as YAML, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, allow_unicode=True, sort_keys=False)


@lru_cache(maxsize=64)  # the models of an experiment have their base file in common
def parse_yaml(text: str, at_depth: int = 0) -> Any:
    """Return the value of a YAML text, which stands at a depth of a larger one. Raise ValueError,
    or an error of the library, for a text that cannot be read."""
    _check_nesting(text, at_depth)
    return yaml.load(text, _Loader)


def _check_nesting(text: str, at_depth: int) -> None:
    """Raise ValueError for deep nesting, and for parts that refer to themselves or many times
    over, before anything is built from them."""
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
            if event.anchor in open_anchors or num_aliases > MAX_ALIASES:
                raise ValueError(
                    f"an alias (*name) is part of itself, or there are more than {MAX_ALIASES}"
                )
        if len(open_anchors) > MAX_DEPTH or at_depth > MAX_DEPTH:
            raise ValueError("it is nested too deep")


class _Loader(_SafeLoader):
    """A safe loader that names duplicate keys and endless numbers with their lines."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        # PyYAML would silently take the last value of a key.
        line_of_key = dict[str, int]()
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
    """A safe dumper that quotes exactly the texts that `_Loader` would read as numbers."""


_WHOLE = re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_DECIMAL = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_FIRST_LETTERS = list("-+0123456789.")
"""PyYAML looks up patterns by the first letter of a text."""


def _read_numbers_of_yaml_1_2(dialect: Any) -> None:
    """Replace what a loader or dumper takes for numbers and dates."""
    dialect.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if not pair[0].endswith((":timestamp", ":int", ":float"))]
        for first, pairs in dialect.yaml_implicit_resolvers.items()
    }
    # The first pattern that matches counts, and a whole number is a decimal, too.
    for kind, pattern in (("int", _WHOLE), ("float", _DECIMAL)):
        dialect.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", pattern, _FIRST_LETTERS)


_read_numbers_of_yaml_1_2(_Loader)
_read_numbers_of_yaml_1_2(_Dumper)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
