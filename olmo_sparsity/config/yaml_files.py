"""Read settings from YAML files, and from `--key.sub=value` words of the command line.

    load(RunConfig, "mine.yaml", ["--seed=4"])

    c4.yaml      seed: 0                                     the base: defaults for mine.yaml
                 data: {folder: data/c4}
    mine.yaml    base: c4.yaml
                 run_folder: runs/seed${seed}                a reference to another key
    --seed=4                                                 replaces the value of both files

    together     {"seed": 4, "data": {"folder": "data/c4"}, "run_folder": "runs/seed4"}

find_config → read_yaml → merge over its base → merge the words → references → `build`
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from olmo_sparsity.base.errors import ConfigError, one_line
from olmo_sparsity.base.files import read_bounded
from olmo_sparsity.config.build import Schema, build
from olmo_sparsity.config.installed import find_config, suggest_config
from olmo_sparsity.config.schema import used
from olmo_sparsity.config.yaml_dialect import dump_yaml, parse_yaml

LARGEST_FILE = 2**24
"""The largest size of a config, in bytes."""


def load(schema: type[Schema], path: str | Path, overrides: list[str] | None = None) -> Schema:
    """Read settings from a YAML file and `--key.sub=value` words."""
    return build(schema, read_given(path, overrides), str(path))


def to_yaml(section: Any) -> str:
    """Return the YAML of every setting that has an effect."""
    return dump_yaml(used(section))


def read_given(path: str | Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Return the settings of a YAML file as nested dictionaries, without a check of their names.

    Args:
        path: A file of the user, or the name of an installed config. The settings of the file that
            it names as its `base:` are filled in.
        overrides: `--key.sub=value` words, which replace values of the file.

    `${key.sub}` in a text is replaced by the value of that key.
    """
    settings = _read_with_base(find_config(path))
    for override in overrides or []:
        settings = _with_override(settings, override)
    return _resolve_references(settings, settings, str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings of one file by itself, with neither its base nor its references
    resolved."""
    if not path.is_file():
        state = "does not exist"
        if path.is_dir():
            state = "is a folder"
        elif path.exists():
            state = "is not a regular file"
        raise ConfigError(f"config file '{path}' {state}{suggest_config(path)}")
    try:
        settings = parse_yaml(read_bounded(path, LARGEST_FILE).decode())
    except Exception as error:  # the YAML library raises several kinds
        reason = one_line(error)
        raise ConfigError(f"config file '{path}' is not readable YAML: {reason}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"config file '{path}' must hold `key: value` lines")
    return {str(key): value for key, value in settings.items()}


# --- a file over its base -------------------------------------------------------------------------


def _read_with_base(path: Path, built_on_it: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the settings of a file, over those of the one that it names as its base.
    `built_on_it`: the files whose bases led to this one."""
    settings = dict(read_yaml(path))
    if "base" not in settings:
        return settings
    base_name = settings.pop("base")
    if not isinstance(base_name, str) or not base_name:
        raise ConfigError(f"config file '{path}': base={base_name!r} must be the path of a config")

    base_path = find_config(base_name, path)
    if base_path in (path, *built_on_it):
        raise ConfigError(f"config file '{path}' is a base of its own base, '{base_path}'")
    base = _read_with_base(base_path, (path, *built_on_it))
    try:
        return merge(base, settings)
    except TypeError as error:
        raise ConfigError(f"config file '{path}' over '{base_path}': {error}") from None


def merge(base: Any, changes: Any, name: str = "") -> Any:
    """Return `base` with values replaced by those of `changes`, section by section. A list replaces
    all of the base's; a section over a list raises TypeError. `name`: the key of both."""
    if not isinstance(changes, dict):
        return changes
    if isinstance(base, list):
        raise TypeError(f"{name} is a list there; give all of it")
    if not isinstance(base, dict):
        return changes
    changed = {key: merge(base.get(key), value, str(key)) for key, value in changes.items()}
    return {**base, **changed}


def _with_override(settings: dict[str, Any], override: str) -> dict[str, Any]:
    """Return settings in which a `--key.sub=value` word has replaced a value."""
    text = override.lstrip("-")
    key, equals, value = text.partition("=")
    if not equals:
        kinds = f"an option (see --help), nor a setting with a value (--{text}=VALUE)"
        raise ConfigError(f"'{override}' is neither {kinds}")
    if not value.strip():
        # A variable of the shell that is not set would otherwise choose the schema's default.
        remedy = f"write --{key}=VALUE, or --{key}=null to unset it"
        raise ConfigError(f"override '{override}' has no value; {remedy}")
    names = key.split(".")
    try:
        nested = parse_yaml(value, len(names))
        for name in reversed(names):
            nested = {name: nested}
        merged: dict[str, Any] = merge(settings, nested)
    except Exception as error:  # the YAML library raises several kinds
        reason = one_line(error)
        raise ConfigError(f"override '{override}' cannot be read: {reason}") from None
    return merged


# --- references -----------------------------------------------------------------------------------


_REFERENCE = re.compile(r"\$\{([^{}]*)\}")


def _resolve_references(
    node: Any, settings: dict[str, Any], origin: str, followed: tuple[str, ...] = ()
) -> Any:
    """Return a value in which each reference, such as `${data.folder}`, is replaced by the value of
    that key in the settings. `followed`: the references that led to this value. One that is met
    again would never end."""
    if isinstance(node, dict):
        return {
            key: _resolve_references(value, settings, origin, followed)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [_resolve_references(value, settings, origin, followed) for value in node]
    if not isinstance(node, str):
        return node

    def value_of(reference: re.Match[str]) -> Any:
        """Return the value of the key in `${…}`, in which references are replaced, too."""
        key = reference[1]
        value: Any = settings
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if key in followed or value is None or isinstance(value, dict | list):
            raise ConfigError(
                f"{origin}: '{reference[0]}' must name another key that has one value"
            )
        return _resolve_references(value, settings, origin, (*followed, key))

    whole = _REFERENCE.fullmatch(node)
    if whole:  # a number stays a number
        return value_of(whole)
    return _REFERENCE.sub(lambda reference: str(value_of(reference)), node)
