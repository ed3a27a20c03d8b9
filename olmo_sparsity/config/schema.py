"""Declare settings once, as dataclasses, and build them from what a user has given.

A schema is a dataclass of fields with types, defaults and, with `option`, ranges and conditions:

    @dataclass
    class PositionsConfig:
        scheme: Literal["contiguous", "pose"] = "contiguous"
        num_chunks: int = option(2, least=1, only_if=("scheme", "pose"))

    build(PositionsConfig, {"scheme": "pose", "num_chunks": 3})
    build(PositionsConfig, {"num_chunks": 3})  # ConfigError: num_chunks is set, but scheme=…

Nothing given is ignored: an unknown key is an error that names the closest one, and so is a key
that would have no effect. `used` returns the settings that have one.

Place in the flow: below all settings. `yaml_files.py` reads what is given from files and
`--key.sub=value` words, `command_line.py` derives options from a schema.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from olmo_sparsity.base.conform import conform
from olmo_sparsity.base.errors import ConfigError

Schema = TypeVar("Schema")


# --- declare --------------------------------------------------------------------------------------


def option(default: Any, help: str = "", **properties: Any) -> Any:
    """Return a dataclass field with more than a type and a default. Its properties may be:

    least, most      the range of the value, or of each value of a list
    some, distinct   a list must have a value, and none twice
    only_if          (sibling, *values): the field has an effect only if its sibling has one of
                     these values
    refused          the reason why setting the field has no effect
    changes          for a field of the model: what it changes (config/model.py has the words)
    required         the field must be set; with only_if, where it has an effect
    blank            a text of white space alone is accepted
    several          the key of the sibling that takes one section, under which this field takes a
                     list of sections
    other_names      {name of the key in other programs: what to write here}
    other_values     {value of the key in other programs: what to write here}
    metavar          the placeholder of the value in --help
    parse            the function that reads the text of the value
    hidden           the command line has no such option
    """
    if help:
        properties["help"] = help
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=properties)
    return field(default=default, metadata=properties)


@cache
def kinds_of(schema: type) -> dict[str, tuple[Field, Any]]:
    """Return each field of a schema with its type, by name."""
    kinds = get_type_hints(schema)
    return {item.name: (item, kinds[item.name]) for item in fields(schema)}


def _list_fields(schema: type) -> dict[str, str]:
    """Return the fields that take a list of sections, by the key under which a file has the list.
    It is the key of the sibling that takes a single section: {"corpus": "corpora"}."""
    names = {}
    for name, (item, _) in kinds_of(schema).items():
        key = item.metadata.get("several")
        if key is not None:
            names[key] = name
    return names


def applies(section: Any, item: Field) -> bool:
    """Return whether a field has an effect next to its siblings."""
    if "refused" in item.metadata:
        return False
    if "only_if" not in item.metadata:
        return True
    sibling, *values = item.metadata["only_if"]
    return getattr(section, sibling) in values


# --- fill -----------------------------------------------------------------------------------------


def build(schema: type[Schema], given: Mapping[str, Any] | None, origin: str = "") -> Schema:
    """Return an instance of a schema with the values that a user has given, and defaults for the
    others. Raise ConfigError for an unknown key, a wrong type or range, and a setting without
    effect.

    origin: Where the values are from, such as a file. Messages begin with it.

    A null for a field that cannot be null counts as not given. Where a tuple is expected, one value
    is enough.
    """
    prefix = f"{origin}: " if origin else ""
    try:
        return conform(given, schema, "", _fill)
    except _UnknownKey as error:
        raise ConfigError(prefix + _explain_unknown(str(error), schema, given)) from None
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from None


def validate(section: Any) -> None:
    """Check types and ranges of a dataclass that was not made by `build`."""
    values = {item.name: getattr(section, item.name) for item in fields(section)}
    build(type(section), values)


Rules = Iterator[str]
"""Yields a message for each rule that settings break: field, value and remedy."""


def enforce(origin: str, rules: Rules) -> None:
    """Raise ConfigError with the message of the first rule that settings break."""
    for message in rules:
        raise ConfigError(f"{origin}: {message}")


class _UnknownKey(ValueError):
    """A key that the schema does not have; `build` explains it, as it knows the whole schema."""


def _fill(given: dict, schema: type, section_key: str) -> Any:
    """Return a section with the values given. `section_key`: its dotted key, such as "data.corpus",
    or "" for the whole config."""
    known = kinds_of(schema)
    list_fields = _list_fields(schema)
    values = {}
    for key, value in given.items():
        key_in_file = _join_keys(section_key, key)
        # `corpus: {…}` sets the field corpus, `corpus: [{…}, {…}]` the field corpora.
        name = list_fields.get(key, key) if isinstance(value, list) else key
        if name not in known or key in list_fields.values():
            raise _UnknownKey(key_in_file)
        item, kind = known[name]
        if value is None and not _may_be_null(kind):
            continue
        if "refused" in item.metadata:
            raise ValueError(f"{key_in_file} would be ignored: {item.metadata['refused']}")
        values[name] = _convert(value, item, kind, key_in_file)
        # An empty list of sections would silently become the default of the single one.
        if key != name and not value:
            (section_of_list,) = get_args(kind)
            names = ", ".join(kinds_of(section_of_list))
            raise ValueError(f"{key_in_file}=[] must be a list of sections with {names}")

    # Conditions between siblings can be checked once all of them have their values.
    section = schema(**values)
    for name, (item, _) in known.items():
        if values.get(name) is not None:
            _check_has_effect(section, item, section_key)
        _check_not_missing(section, item, section_key)
    return section


def _join_keys(section_key: str, key: str) -> str:
    """Return the dotted key of a key in a section."""
    return f"{section_key}.{key}".lstrip(".")


def _may_be_null(kind: Any) -> bool:
    return kind is Any or type(None) in (kind, *get_args(kind))


def _check_has_effect(section: Any, item: Field, section_key: str) -> None:
    """Raise ValueError if a field that was set has no effect next to its siblings."""
    if applies(section, item):
        return
    sibling, *values = item.metadata["only_if"]
    key = _join_keys(section_key, item.name)
    sibling_key = _join_keys(section_key, sibling)
    now = _in_yaml(getattr(section, sibling))
    used_with = " or ".join(map(_in_yaml, values))
    raise ValueError(
        f"{key} is set, but {sibling_key}={now} does not use it; unset it (--{key}=null), or set "
        f"{sibling_key} to {used_with}"
    )


def _check_not_missing(section: Any, item: Field, section_key: str) -> None:
    """Raise ValueError if a required field has an effect and is not set."""
    is_missing = "required" in item.metadata and getattr(section, item.name) is None
    if not is_missing or not applies(section, item):
        return
    key = _join_keys(section_key, item.name)
    if "only_if" not in item.metadata:
        raise ValueError(f"{key} is missing")
    sibling, *_ = item.metadata["only_if"]
    now = _in_yaml(getattr(section, sibling))
    raise ValueError(f"{_join_keys(section_key, sibling)}={now} needs {key}")


def _in_yaml(value: Any) -> str:
    """Return a value as YAML spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


LARGEST = 10**18
"""No setting has a larger number: 64 bits hold those that are computed from a few of them."""


def _convert(value: Any, item: Field, kind: Any, key: str) -> Any:
    """Return the value of a field, converted to its type and checked. `key`: its dotted key."""
    if isinstance(value, str):
        remedy = item.metadata.get("other_values", {}).get(value)
        if remedy is not None:
            raise ValueError(f"{key}={value}: {remedy}")
        if not value.strip() and value != item.default and "blank" not in item.metadata:
            raise ValueError(f"{key}={value!r} is blank; write a name, or leave it out")
        if "parse" in item.metadata:
            value = item.metadata["parse"](value)

    kinds = (kind, *get_args(kind))
    if get_origin(kind) is tuple:
        is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes)
        value = tuple(value) if is_list else (value,)
    elif any(get_origin(k) is list for k in kinds) and isinstance(value, str | int | float):
        raise ValueError(f"{key} must be a list: {key}=[{value}]")
    elif str in kinds and isinstance(value, int | float):
        # A folder named 007 or a tokenizer named true: YAML has lost how it was written.
        yaml_type = "boolean" if isinstance(value, bool) else "number"
        raise ValueError(f"{key} must be a string, but {value} is a {yaml_type} in YAML; quote it")
    value = conform(value, kind, key, _fill)
    _check_range(value, item, key)
    return value


def _check_range(value: Any, item: Field, key: str) -> None:
    """Raise ValueError if a number, or one in a list, is out of range. Also raise it for a list
    that must not be empty and is, or that has a value twice where it must not."""
    smallest = item.metadata.get("least", -LARGEST)
    largest = item.metadata.get("most", LARGEST)
    shown = spell(value) if isinstance(value, tuple) else value
    for number in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(number, int | float):
            continue
        if not number >= smallest:  # rejects NaN too
            raise ValueError(f"{key}={shown} must be at least {smallest}")
        if number > largest:
            raise ValueError(f"{key}={shown} must be at most {largest}")
    if "some" in item.metadata and not value:
        raise ValueError(f"{key} is empty; list at least one")
    if "distinct" in item.metadata and any(value.count(entry) > 1 for entry in value):
        raise ValueError(f"{key}={shown} holds one value twice")


def spell(value: Any) -> str:
    """Return a value as one would type it after an option. It is empty for None and for a switch,
    after which nothing is typed."""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


# --- explain an unknown key -----------------------------------------------------------------------


_COMMAND_OF_KEY = {"grid": "experiment", "models": "experiment", "run_folder": "train"}
"""The command whose configs have this key, by which a config of another command is recognized."""

FEW_KEYS = 20
"""A message lists no more keys than this."""


def _explain_unknown(key: str, schema: type, given: Any) -> str:
    """Return the message for an unknown key: what the user may have meant, or which keys there are.

    key: The dotted key, with indices of lists: training.length[0].tokns.
    given: All settings of the user, which may be those of another command.
    """
    for name, command in _COMMAND_OF_KEY.items():
        if name in given and name not in kinds_of(schema):
            return f"'{name}' belongs to `olmo-sparsity {command}`"
    if key == "base":
        return "unknown key 'base': it is read from the config file; write it there"

    known = [*dict.fromkeys(_known_keys(schema))]
    plain_key = re.sub(r"\[\d+\]", "", key)  # without the index of a list
    section, _, name = plain_key.rpartition(".")
    if key in known:  # known inside a list of sections, but here is a single section
        return f"unknown key '{key}': only a list of sections has it ({section}[0].{name})"
    remedy = _other_names(schema).get(name)
    if remedy is not None:
        return f"unknown key '{key}': {remedy}"

    # The right name in the wrong section first, then the closest spelling.
    close = fnmatch.filter(known, f"*.{name}")
    if not close:
        close = difflib.get_close_matches(plain_key, known, n=1, cutoff=0.6)
    if close and close[0] == section:  # the closest match is the section itself
        close = []
        known = [other for other in known if other.startswith(f"{section}.")]
    if close:
        return f"unknown key '{key}'; did you mean '{close[0]}'?"
    choices = f"; choose from {', '.join(known)}" if 0 < len(known) <= FEW_KEYS else ""
    return f"unknown key '{key}'{choices}"


def _other_names(schema: type) -> dict[str, str]:
    """Return the names that other programs have for keys of this schema and of its sections, with
    what to write here."""
    remedies: dict[str, str] = {}
    for item, kind in kinds_of(schema).values():
        remedies |= item.metadata.get("other_names", {})
        for section in _sections(kind):
            remedies |= _other_names(section)
    return remedies


def _known_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield all dotted keys of a schema, sections included."""
    for name, (item, kind) in kinds_of(schema).items():
        key = item.metadata.get("several", name)
        yield prefix + key
        for section in _sections(kind):
            yield from _known_keys(section, f"{prefix}{key}.")


def _sections(kind: Any) -> Iterator[type]:
    """Yield the section that is a field's type, or that its list or mapping has as values."""
    if is_dataclass(kind):
        yield kind  # type: ignore[misc] # also accepts instances, which a type hint never is
    for inner in get_args(kind):
        yield from _sections(inner)


# --- write ----------------------------------------------------------------------------------------


def used(section: Any) -> dict[str, Any]:
    """Return every setting that has an effect, as nested dictionaries of plain values, which
    `build` reads back."""
    # A section and a list of sections share a key, and only one of them is used.
    unused = set()
    for key, name in _list_fields(type(section)).items():
        unused.add(key if getattr(section, name) else name)
    return {
        item.metadata.get("several", item.name): _plain(getattr(section, item.name))
        for item in fields(section)
        if item.name not in unused and applies(section, item)
    }


def _plain(value: Any) -> Any:
    """Return a value as YAML and JSON know it."""
    if is_dataclass(value):
        return used(value)
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [used(inner) for inner in value]
    return str(value) if isinstance(value, Enum) else value
