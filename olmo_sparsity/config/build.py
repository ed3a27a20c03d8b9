"""Build settings from what a user has written, and check each of them.

    build(PositionsConfig, {"scheme": "pose", "target_length": 512, "num_chunks": 3})
    build(PositionsConfig, {"num_chunks": 3})      # ConfigError: num_chunks is set, but scheme=…
    build(PositionsConfig, {"num_chunk": 3})       # ConfigError: unknown key …; did you mean …?
    build(PositionsConfig, {"num_chunks": "3a"})   # ConfigError: num_chunks must be a whole number

Nothing that a user writes is ignored: an unknown key is an error that names the closest one
(unknown_key.py), and so is a key that would have no effect.

Place in the flow: yaml_files.py reads what is given from files and `--key.sub=value` words →
**`build`** → rules.py, which checks rules between several settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_origin

from olmo_sparsity.base.conform import conform
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.schema import SchemaField, list_fields, schema_fields, spell
from olmo_sparsity.config.unknown_key import explain_unknown_key

Schema = TypeVar("Schema")


def build(schema: type[Schema], settings: Mapping[str, Any] | None, origin: str = "") -> Schema:
    """Return an instance of a schema with these settings, and defaults for the others. A null for a
    field that cannot be null counts as missing. Where a tuple is expected, one value is enough.

    Args:
        schema: A dataclass whose fields are declared with `option`.
        settings: What the user has written, as nested dictionaries.
        origin: Where it is from, such as a file. Messages begin with it.

    Raises:
        ConfigError: A key is unknown, a value has a wrong type or range, or a setting has no
            effect.
    """
    prefix = f"{origin}: " if origin else ""
    try:
        return conform(settings, schema, "", _build_section)
    except _UnknownKey as error:
        raise ConfigError(prefix + explain_unknown_key(str(error), schema, settings)) from None
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


# --- a section ------------------------------------------------------------------------------------


def _build_section(settings: dict, schema: type, section_key: str) -> Any:
    """Return a section with these settings. `section_key`: its dotted key, such as "data.corpus",
    or "" for the whole config."""
    known_fields = schema_fields(schema)
    names_of_lists = list_fields(schema)
    values = {}
    for key, value in settings.items():
        key_in_file = _join_keys(section_key, key)
        # `corpus: {…}` sets the field corpus, `corpus: [{…}, {…}]` the field corpora.
        name = names_of_lists.get(key, key) if isinstance(value, list) else key
        # A file cannot use the name `corpora` itself: one spelling is enough.
        if name not in known_fields or key in names_of_lists.values():
            raise _UnknownKey(key_in_file)

        item = known_fields[name]
        if value is None and not _may_be_null(item.kind):
            continue
        if item.properties.refused is not None:
            raise ValueError(f"{key_in_file} would be ignored: {item.properties.refused}")
        values[name] = _convert(value, item, key_in_file)
        # An empty list of sections would silently become the default of the single one.
        if key != name and not value:
            (section_of_list,) = get_args(item.kind)
            names = ", ".join(schema_fields(section_of_list))
            raise ValueError(f"{key_in_file}=[] must be a list of sections with {names}")

    # Conditions between siblings can be checked once all of them have their values.
    section = schema(**values)
    for name, item in known_fields.items():
        if values.get(name) is not None:
            _check_has_effect(section, item, section_key)
        _check_not_missing(section, item, section_key)
    return section


def _join_keys(section_key: str, key: str) -> str:
    """Return the dotted key of a key in a section."""
    return f"{section_key}.{key}".lstrip(".")


def _may_be_null(kind: Any) -> bool:
    return kind is Any or type(None) in (kind, *get_args(kind))


def _check_has_effect(section: Any, item: SchemaField, section_key: str) -> None:
    """Raise ValueError if a field that was set has no effect next to its siblings."""
    condition = item.properties.only_if
    if condition is None or item.applies(section):
        return
    key = _join_keys(section_key, item.name)
    sibling_key = _join_keys(section_key, condition.sibling)
    now = _in_yaml(getattr(section, condition.sibling))
    used_with = " or ".join(map(_in_yaml, condition.values))
    raise ValueError(
        f"{key} is set, but {sibling_key}={now} does not use it; unset it (--{key}=null), or set "
        f"{sibling_key} to {used_with}"
    )


def _check_not_missing(section: Any, item: SchemaField, section_key: str) -> None:
    """Raise ValueError if a required field has an effect and is not set."""
    is_missing = item.properties.required and getattr(section, item.name) is None
    if not is_missing or not item.applies(section):
        return
    key = _join_keys(section_key, item.name)
    condition = item.properties.only_if
    if condition is None:
        raise ValueError(f"{key} is missing")
    now = _in_yaml(getattr(section, condition.sibling))
    raise ValueError(f"{_join_keys(section_key, condition.sibling)}={now} needs {key}")


def _in_yaml(value: Any) -> str:
    """Return a value as YAML spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- a value --------------------------------------------------------------------------------------


def _convert(value: Any, item: SchemaField, key: str) -> Any:
    """Return the value of a field, converted to its type and checked. `key`: its dotted key."""
    if isinstance(value, str):
        value = _read_text(value, item, key)

    kinds = (item.kind, *get_args(item.kind))  # of a union its members, too
    takes_list = any(get_origin(kind) is list for kind in kinds)
    if get_origin(item.kind) is tuple:
        is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes)
        value = tuple(value) if is_list else (value,)
    elif takes_list and isinstance(value, str | int | float):
        raise ValueError(f"{key} must be a list: {key}=[{value}]")
    elif str in kinds and isinstance(value, int | float):
        # A folder named 007 or a tokenizer named true: YAML has lost how it was written.
        yaml_type = "boolean" if isinstance(value, bool) else "number"
        raise ValueError(f"{key} must be a string, but {value} is a {yaml_type} in YAML; quote it")
    value = conform(value, item.kind, key, _build_section)
    _check_range(value, item, key)
    return value


def _read_text(text: str, item: SchemaField, key: str) -> Any:
    """Return the value that a text means for a field: the text itself, unless the field has a
    function that reads it."""
    remedy = item.properties.other_values.get(text)
    if remedy is not None:
        raise ValueError(f"{key}={text}: {remedy}")
    if not text.strip() and text != item.default and not item.properties.blank:
        raise ValueError(f"{key}={text!r} is blank; write a name, or leave it out")
    return text if item.properties.parse is None else item.properties.parse(text)


def _check_range(value: Any, item: SchemaField, key: str) -> None:
    """Raise ValueError if a number, or one in a list, is out of range. Also raise it for a list
    that must not be empty and is, or that has a value twice where it must not."""
    properties = item.properties
    shown = spell(value) if isinstance(value, tuple) else value
    for number in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(number, int | float):
            continue
        if not number >= properties.least:  # rejects NaN too
            raise ValueError(f"{key}={shown} must be at least {properties.least}")
        if number > properties.most:
            raise ValueError(f"{key}={shown} must be at most {properties.most}")
    if properties.nonempty and not value:
        raise ValueError(f"{key} is empty; list at least one")
    if properties.distinct and any(value.count(entry) > 1 for entry in value):
        raise ValueError(f"{key}={shown} holds one value twice")
