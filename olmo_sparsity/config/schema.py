"""Declare settings once, as dataclasses, whose fields have ranges and conditions.

    @dataclass
    class PositionsConfig:
        scheme: Literal["contiguous", "pose"] = "contiguous"
        num_chunks: int = option(2, least=1, only_if=("scheme", "pose"))

    schema_fields(PositionsConfig)["num_chunks"].kind                # int
    schema_fields(PositionsConfig)["num_chunks"].properties.least    # 1

From such a schema follow the keys of a YAML file, their checks (build.py), the options of the
command line (command_line.py), and what is stored:

    used(PositionsConfig("contiguous"))     # {"scheme": "contiguous"}: num_chunks has no effect
    used(PositionsConfig("pose", 3))        # {"scheme": "pose", "num_chunks": 3}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

LARGEST = 10**18
"""No setting has a larger number: 64 bits hold those that are computed from a few of them."""


# --- declare --------------------------------------------------------------------------------------


class Condition(NamedTuple):
    """A field has an effect only if its sibling, another field of the section, has one of these
    values."""

    sibling: str
    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Properties:
    """What a field of a schema has beside its type and default."""

    help: str = ""
    """Its help on the command line. Empty: the docstring of a function has it."""

    least: float = -LARGEST
    most: float = LARGEST
    """The range of the value, or of each value of a list."""

    nonempty: bool = False
    """Whether a list must have at least one value."""

    distinct: bool = False
    """Whether a list must have no value twice."""

    only_if: Condition | None = None
    """When the field has an effect. None: always."""

    refused: str | None = None
    """Why setting the field has no effect; None if it has one."""

    changes: str | None = None
    """For a field of the model: what it changes (config/model.py has the words)."""

    required: bool = False
    """Whether the field must be set; with `only_if`, where it has an effect."""

    blank: bool = False
    """Whether a text of white space alone is accepted."""

    shares_key_with: str | None = None
    """For a field that takes a list of sections: the sibling that takes a single section. In a file
    both have the sibling's name as their key: `corpus: {…}` sets the field `corpus`, and
    `corpus: [{…}, {…}]` the field `corpora`."""

    other_names: Mapping[str, str] = field(default_factory=dict)
    """What to write here, by the name of the key in other programs."""

    other_values: Mapping[str, str] = field(default_factory=dict)
    """What to write here, by the value of the key in other programs."""

    metavar: str | None = None
    """The placeholder of the value in --help."""

    parse: Callable[[str], Any] | None = None
    """Function that reads the text of the value."""

    hidden: bool = False
    """Whether the command line has no such option."""


_PLAIN = Properties()


def option(
    default: Any, help: str = "", *, only_if: tuple[Any, ...] | None = None, **properties: Any
) -> Any:
    """Return a dataclass field with more than a type and a default.

    Args:
        only_if: (sibling, *values): the field has an effect only if its sibling has one of these
            values.
        properties: Other fields of `Properties`, such as `least=1`.
    """
    condition = None
    if only_if is not None:
        sibling, *values = only_if
        condition = Condition(sibling, tuple(values))
    metadata = {"properties": Properties(help=help, only_if=condition, **properties)}
    # A dataclass accepts no list as a default, which all of its instances would share.
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


# --- ask ------------------------------------------------------------------------------------------


class SchemaField(NamedTuple):
    """A field of a schema."""

    name: str
    kind: Any
    """Its type, as a class or a type hint."""

    default: Any
    """`dataclasses.MISSING` if there is none."""

    properties: Properties

    def applies(self, section: Any) -> bool:
        """Return whether the field has an effect in this section, next to its siblings."""
        if self.properties.refused is not None:
            return False
        condition = self.properties.only_if
        return condition is None or getattr(section, condition.sibling) in condition.values


def properties_of(item: Field) -> Properties:
    """Return the properties of a dataclass field, also of one that `option` has not made."""
    properties: Properties = item.metadata.get("properties", _PLAIN)
    return properties


def schema_fields(schema: type) -> dict[str, SchemaField]:
    """Return the fields of a schema by name."""
    return _read_fields(schema)


# Kept, as each type hint is a text that must be evaluated.
@cache
def _read_fields(schema: type) -> dict[str, SchemaField]:
    kinds = get_type_hints(schema)
    by_name = {}
    for item in fields(schema):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        by_name[item.name] = SchemaField(item.name, kinds[item.name], default, properties_of(item))
    return by_name


def list_fields(schema: type) -> dict[str, str]:
    """Return the fields that take a list of sections, by the key under which a file has the list.
    It is the key of the sibling that takes a single section: {"corpus": "corpora"}."""
    return {
        item.properties.shares_key_with: item.name
        for item in schema_fields(schema).values()
        if item.properties.shares_key_with is not None
    }


def sections_in(kind: Any) -> Iterator[type]:
    """Yield the section that is a field's type, or that its list or mapping has as values."""
    if is_dataclass(kind):
        yield kind  # type: ignore[misc] # also accepts instances, which a type hint never is
    for inner in get_args(kind):
        yield from sections_in(inner)


# --- write ----------------------------------------------------------------------------------------


def used(section: Any) -> dict[str, Any]:
    """Return every setting that has an effect, as nested dictionaries of plain values, which
    `build` reads back."""
    # A section and a list of sections share a key, and only one of them is used.
    unused = set()
    for key, name in list_fields(type(section)).items():
        unused.add(key if getattr(section, name) else name)
    return {
        item.properties.shares_key_with or item.name: _plain(getattr(section, item.name))
        for item in schema_fields(type(section)).values()
        if item.name not in unused and item.applies(section)
    }


def _plain(value: Any) -> Any:
    """Return a value as YAML and JSON know it."""
    if is_dataclass(value):
        return used(value)
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [used(inner) for inner in value]
    return str(value) if isinstance(value, Enum) else value


def spell(value: Any) -> str:
    """Return a value as one would type it after an option. It is empty for None and for a switch,
    after which nothing is typed."""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)
