"""Declare settings once, as dataclasses; read them from YAML, the command line or keywords.

Place in the flow: ground. A schema is a dataclass of fields with types, defaults and, with
`option`, ranges and help. `build` fills it, `to_yaml` writes it back, `add_options` derives options
of the command line. Nothing given is ignored: an unknown key is an error that names the closest
one, and so is a key that would have no effect.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from olmo_sparsity.base.conform import conform
from olmo_sparsity.base.errors import ConfigError, one_line
from olmo_sparsity.base.files import read_bounded
from olmo_sparsity.base.renamed import current_config

Schema = TypeVar("Schema")

CONFIGS = Path(__file__).parents[1] / "configs"
"""Configs that are installed with the package, and found by name."""

_MADE_FOR = {"grid": "experiment", "models": "experiment", "run_folder": "train"}
"""The command that has this key in its configs."""


# --- declare --------------------------------------------------------------------------------------


def option(default: Any, help: str = "", **about: Any) -> Any:
    """Return a field with more than a type and a default. `about`:

    least, most   range of the value, or of each value of a list
    some, distinct   a list has at least one value, and none twice
    only_if       (sibling, *values): the field has an effect only if its sibling has such a value
    refused       why setting the field has no effect
    changes       of a field of the model: what it changes (config/sections.py has the words)
    required      it must be set, or with only_if: where it has an effect
    blank         a text of white space alone is a value, too
    several       the sibling key that holds a section, or as here a list of sections
    other_names, other_values   {what other programs call the key, or one of its values: what to
                  write here}
    metavar, parse, hidden   on the command line: its placeholder, what reads its text, not there"""
    if help:
        about["help"] = help
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


@cache
def kinds_of(schema: type) -> dict[str, tuple[Field, Any]]:
    """Return each field of a schema with its type, by name."""
    kinds = get_type_hints(schema)
    return {item.name: (item, kinds[item.name]) for item in fields(schema)}


def _lists(schema: type) -> dict[str, str]:
    """Return the keys that hold a section or a list of them, each with the field of the list."""
    lists = {}
    for name, (item, _) in kinds_of(schema).items():
        key = item.metadata.get("several")
        if key is not None:
            lists[key] = name
    return lists


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
    """Return the schema's defaults, replaced by the values given. ConfigError names unknown keys,
    wrong types and ranges, and settings without effect. A null for what cannot be null counts as
    not given. In a tuple's place one value is enough."""
    where = f"{origin}: " if origin else ""
    try:
        return conform(given, schema, "", _fill)
    except _UnknownKey as error:
        raise ConfigError(where + _explain_unknown(str(error), schema, given)) from None
    except ValueError as error:
        raise ConfigError(f"{where}{error}") from None


def validate(section: Any) -> None:
    """Check types and ranges of a dataclass that was not made by `build`."""
    values = {item.name: getattr(section, item.name) for item in fields(section)}
    build(type(section), values)


Rules = Iterator[str]
"""A message for each rule that does not hold: field, value and remedy."""


def enforce(origin: str, rules: Rules) -> None:
    """Raise the message of the first rule that does not hold."""
    for message in rules:
        raise ConfigError(f"{origin}: {message}")


class _UnknownKey(ValueError):
    pass


def _fill(given: dict, schema: type, where: str) -> Any:
    """Return a section of these values; `where` is the dotted key of the section."""
    known = kinds_of(schema)
    lists = _lists(schema)
    values = {}
    for key, value in given.items():
        # A key of a section may hold a list of sections, which is another field.
        name = lists.get(key, key) if isinstance(value, list) else key
        place = _place(where, key)
        if name not in known or key in lists.values():
            raise _UnknownKey(place)
        item, kind = known[name]
        if value is None and not _may_be_null(kind):
            continue
        if "refused" in item.metadata:
            raise ValueError(f"{place} would be ignored: {item.metadata['refused']}")
        values[name] = _value(value, item, kind, place)
        if key != name and not value:
            (section_of_list,) = get_args(kind)
            names = ", ".join(kinds_of(section_of_list))
            raise ValueError(f"{place}=[] must be a list of sections with {names}")
    section = schema(**values)
    for name, (item, _) in known.items():
        _check_use(section, item, _place(where, name), where, values.get(name) is not None)
    return section


def _place(where: str, key: str) -> str:
    """Return the dotted key of a key in a section."""
    return f"{where}.{key}".lstrip(".")


def _may_be_null(kind: Any) -> bool:
    return kind is Any or type(None) in (kind, *get_args(kind))


def _check_use(section: Any, item: Field, place: str, where: str, is_set: bool) -> None:
    """Raise if a field is set and has no effect next to its siblings, or is missing where it has
    one."""
    sibling, *uses = item.metadata.get("only_if", ("",))
    beside = _place(where, sibling)
    beside_it = f"{beside}={_in_yaml(getattr(section, sibling))}" if sibling else ""
    if is_set and not applies(section, item):
        used_with = " or ".join(map(_in_yaml, uses))
        raise ValueError(
            f"{place} is set, but {beside_it} does not use it; unset it (--{place}=null), or set "
            f"{beside} to {used_with}"
        )
    is_missing = "required" in item.metadata and getattr(section, item.name) is None
    if is_missing and applies(section, item):
        raise ValueError(f"{beside_it} needs {place}" if sibling else f"{place} is missing")


def _in_yaml(value: Any) -> str:
    """Return a value as YAML spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


LARGEST = 10**18
"""No setting has a larger number: 64 bits hold those that are computed from a few of them."""

MOST_DIGITS = 100
"""Of a whole number in YAML. Those of more are a mistake that no message can show."""


def _value(value: Any, item: Field, kind: Any, place: str) -> Any:
    """Return the value of a field, converted to its type and checked. `place` is its key."""
    if isinstance(value, str):
        remedy = item.metadata.get("other_values", {}).get(value)
        if remedy is not None:
            raise ValueError(f"{place}={value}: {remedy}")
        if not value.strip() and value != item.default and "blank" not in item.metadata:
            raise ValueError(f"{place}={value!r} is blank; write a name, or leave it out")
        if "parse" in item.metadata:
            value = item.metadata["parse"](value)
    kinds = (kind, *get_args(kind))
    if get_origin(kind) is tuple:
        is_list = isinstance(value, Iterable) and not isinstance(value, str)
        value = tuple(value) if is_list else (value,)
    elif any(get_origin(k) is list for k in kinds) and isinstance(value, str | int | float):
        raise ValueError(f"{place} must be a list: {place}=[{value}]")
    elif str in kinds and isinstance(value, int | float):
        what = "boolean" if isinstance(value, bool) else "number"
        raise ValueError(f"{place} must be a string, but {value} is a {what} in YAML; quote it")
    value = conform(value, kind, place, _fill)
    _check_range(value, item, place)
    return value


def _check_range(value: Any, item: Field, place: str) -> None:
    """Raise if a number, or one of a list, is out of range, or if a list is empty or has a value
    twice where it must not."""
    least = item.metadata.get("least", -LARGEST)
    most = item.metadata.get("most", LARGEST)
    shown = spell(value) if isinstance(value, tuple) else value
    for number in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(number, int | float):
            continue
        if not number >= least:  # rejects NaN too
            raise ValueError(f"{place}={shown} must be at least {least}")
        if number > most:
            raise ValueError(f"{place}={shown} must be at most {most}")
    if "some" in item.metadata and not value:
        raise ValueError(f"{place} is empty; list at least one")
    if "distinct" in item.metadata and any(value.count(entry) > 1 for entry in value):
        raise ValueError(f"{place}={shown} holds one value twice")


def _explain_unknown(key: str, schema: type, given: Any) -> str:
    """Return the message for an unknown key: what it may be meant for, or which keys there are."""
    for name, command in _MADE_FOR.items():
        if name in given and name not in kinds_of(schema):
            return f"'{name}' belongs to `olmo-sparsity {command}`"
    known = [*dict.fromkeys(_known_keys(schema))]
    plain = re.sub(r"\[\d+\]", "", key)  # without the index of a list
    section, _, name = plain.rpartition(".")
    if key == "base":
        return "unknown key 'base': it is read from the config file; write it there"
    if key in known:  # in a list of sections, and here is one section
        return f"unknown key '{key}': only a list of sections has it ({section}[0].{name})"
    remedy = _other_names(schema).get(name)
    if remedy is not None:
        return f"unknown key '{key}': {remedy}"
    # The right name in the wrong section first, then the closest spelling.
    close = fnmatch.filter(known, f"*.{name}")
    if not close:
        close = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    if close and close[0] == section:  # the closest match is the section itself
        close = []
        known = [other for other in known if other.startswith(f"{section}.")]
    if close:
        return f"unknown key '{key}'; did you mean '{close[0]}'?"
    few = f"; choose from {', '.join(known)}" if 0 < len(known) <= 20 else ""
    return f"unknown key '{key}'{few}"


def _other_names(schema: type) -> dict[str, str]:
    """Return what other programs call a key of this schema or its sections, and what to write."""
    remedies: dict[str, str] = {}
    for item, kind in kinds_of(schema).values():
        remedies |= item.metadata.get("other_names", {})
        for section in _sections(kind):
            remedies |= _other_names(section)
    return remedies


def _known_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield all dotted keys of a schema, sections included."""
    for name, (item, kind) in kinds_of(schema).items():
        name = item.metadata.get("several", name)
        yield prefix + name
        for section in _sections(kind):
            yield from _known_keys(section, f"{prefix}{name}.")


def _sections(kind: Any) -> Iterator[type]:
    """Yield the section that a key holds, or the sections in its list or mapping."""
    if is_dataclass(kind):
        yield kind  # type: ignore[misc] # also accepts instances, which a type hint never is
    for inner in get_args(kind):
        yield from _sections(inner)


# --- write ----------------------------------------------------------------------------------------


def used(section: Any) -> dict[str, Any]:
    """Return every setting that has an effect as nested plain values. `build` reads them back."""
    # Of a section and a list of sections under one key, only one is used.
    unused = set()
    for key, name in _lists(type(section)).items():
        unused.add(key if getattr(section, name) else name)
    return {
        item.metadata.get("several", item.name): _plain(getattr(section, item.name))
        for item in fields(section)
        if item.name not in unused and applies(section, item)
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return used(value)
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [used(inner) for inner in value]
    return str(value) if isinstance(value, Enum) else value


def to_yaml(section: Any) -> str:
    """Return every setting that has an effect as YAML."""
    return yaml.dump(used(section), Dumper=_Dumper, allow_unicode=True, sort_keys=False)


# --- read YAML ------------------------------------------------------------------------------------


def load(schema: type[Schema], path: str | Path, overrides: list[str] | None = None) -> Schema:
    """Read settings from a YAML file and `--key.sub=value` words."""
    return build(schema, read_given(path, overrides), str(path))


def read_given(path: str | Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Read a YAML file, of the user's or installed, that may name a file below it (`base:`).
    `--key.sub=value` words replace its values. `${key.sub}` in a text is replaced by that value."""
    given = _read_with_base(find_config(path))
    for override in overrides or []:
        given = _with_override(given, override)
    return _interpolate(given, given, str(path))


def _with_override(given: dict[str, Any], override: str) -> dict[str, Any]:
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
        nested = _parse_yaml(value, len(names))
        for name in reversed(names):
            nested = {name: nested}
        merged: dict[str, Any] = merge(given, nested)
    except Exception as error:  # the YAML library raises several kinds
        reason = one_line(error)
        raise ConfigError(f"override '{override}' cannot be read: {reason}") from None
    return merged


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one file by itself: no base, no references."""
    if not path.is_file():
        state = "does not exist"
        if path.is_dir():
            state = "is a folder"
        elif path.exists():
            state = "is not a regular file"
        raise ConfigError(f"config file '{path}' {state}{_closest_file(path)}")
    try:
        loaded = _parse_yaml(read_bounded(path, 2**24).decode())
    except Exception as error:  # the YAML library raises several kinds
        reason = one_line(error)
        raise ConfigError(f"config file '{path}' is not readable YAML: {reason}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file '{path}' must hold `key: value` lines")
    return {str(key): value for key, value in loaded.items()}


def _read_with_base(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file over the one that it names as its base. `above`: the files that led here."""
    loaded = dict(read_yaml(path))
    if "base" not in loaded:
        return loaded
    base_name = loaded.pop("base")
    if not isinstance(base_name, str) or not base_name:
        raise ConfigError(f"config file '{path}': base={base_name!r} must be the path of a config")
    beneath = find_config(base_name, path)
    if beneath in (path, *above):
        raise ConfigError(f"config file '{path}' is a base of its own base, '{beneath}'")
    base = _read_with_base(beneath, (path, *above))
    try:
        return merge(base, loaded)
    except TypeError as error:
        raise ConfigError(f"config file '{path}' over '{beneath}': {error}") from None


def merge(beneath: Any, above: Any, name: str = "") -> Any:
    """Replace values, section by section. A list replaces what is below it; a section over a list
    is an error."""
    if not isinstance(above, dict):
        return above
    if isinstance(beneath, list):
        raise TypeError(f"{name} is a list there; give all of it")
    if not isinstance(beneath, dict):
        return above
    changed = {key: merge(beneath.get(key), value, str(key)) for key, value in above.items()}
    return {**beneath, **changed}


def _interpolate(node: Any, root: dict[str, Any], origin: str, above: tuple[str, ...] = ()) -> Any:
    """Return a value in which each reference is replaced by what `root` has of that key. `above`:
    the references that led here, which must not be met again."""
    if isinstance(node, dict):
        return {key: _interpolate(value, root, origin, above) for key, value in node.items()}
    if isinstance(node, list):
        return [_interpolate(value, root, origin, above) for value in node]

    def value_of(match: re.Match[str]) -> Any:
        value: Any = root
        for name in match[1].split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if match[1] in above or value is None or isinstance(value, dict | list):
            raise ConfigError(f"{origin}: '{match[0]}' must name another key that has one value")
        return _interpolate(value, root, origin, (*above, match[1]))

    if not isinstance(node, str):
        return node
    whole = _REFERENCE.fullmatch(node)
    if whole:  # a number stays a number
        return value_of(whole)
    return _REFERENCE.sub(lambda match: str(value_of(match)), node)


_REFERENCE = re.compile(r"\$\{([^{}]*)\}")


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        # PyYAML would silently take the last value of a key.
        line_of = dict[str, int]()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in line_of:
                raise ValueError(f"it has {name} twice (lines {line_of[name]} and {line})")
            line_of[name] = line
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        text = self.construct_scalar(node)
        if len(text) > MOST_DIGITS:
            # Python refuses to read much longer ones, in words of its own.
            line = node.start_mark.line + 1
            raise ValueError(
                f"line {line} has a number of {len(text):,} digits, {text[:10]}…; the most is "
                f"{LARGEST:.0e}"
            )
        bases = {"0x": 16, "0o": 8}
        return int(text, bases.get(text[:2], 10))


class _Dumper(yaml.SafeDumper):
    pass


# Numbers are those of YAML 1.2. PyYAML reads YAML 1.1, where 010 is 8, 1:30 is 90, 1_0 is 10 and
# 1e-3 is a text.
_WHOLE = re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_DECIMAL = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
for _dialect in (_Loader, _Dumper):  # and a date is a text
    _dialect.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if not pair[0].endswith((":timestamp", ":int", ":float"))]
        for first, pairs in _dialect.yaml_implicit_resolvers.items()
    }
    # The first that matches counts: a whole number is a decimal, too.
    for _kind, _pattern in (("int", _WHOLE), ("float", _DECIMAL)):
        _tag = f"tag:yaml.org,2002:{_kind}"
        _dialect.add_implicit_resolver(_tag, _pattern, list("-+0123456789."))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


@lru_cache(maxsize=64)  # the models of an experiment share theirs
def _parse_yaml(text: str, at_depth: int = 0) -> Any:
    """Return the value of a YAML text, at this depth of a larger one. Reject what exhausts the
    stack of the library, which ends the process, or fills the memory: deep nesting, and texts that
    refer to themselves or many times over."""
    opened: list[str | None] = [None] * at_depth  # the anchor of each collection around an event
    num_aliases = 0
    for event in yaml.parse(text, _SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            opened.pop()
        elif isinstance(event, yaml.AliasEvent):
            num_aliases += 1
            if event.anchor in opened or num_aliases > 20:
                raise ValueError("an alias (*name) is part of itself, or there are more than 20")
        if len(opened) > 50 or at_depth > 50:
            raise ValueError("it is nested too deep")
    return yaml.load(text, _Loader)


# --- installed configs ----------------------------------------------------------------------------


def shipped_configs() -> dict[str, Path]:
    """Return shipped configs by name: figure2.yaml, experiments/c4_ladder.yaml."""
    return {path.relative_to(CONFIGS).as_posix(): path for path in sorted(CONFIGS.rglob("*.yaml"))}


def find_config(name: str | Path, seen_from: Path | None = None) -> Path:
    """Return the file of this name, as seen from the folder of another one, or else the installed
    config of this name."""
    path = Path(name) if seen_from is None else seen_from.parent / name
    if path.exists() and path != seen_from:
        return path
    installed = current_config(Path(name).as_posix().removeprefix("configs/"))
    return shipped_configs().get(installed, path)


def list_configs() -> str:
    """Return a line for each installed config: its name, and the first sentence of its comment."""
    configs = shipped_configs()
    width = max(map(len, configs))
    return "\n".join(f"{name:<{width}}  {_purpose(path)}" for name, path in configs.items())


def _purpose(path: Path) -> str:
    """Return the first sentence of a config's comment."""
    lines = path.read_text().split("\n")
    comment = " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))
    return shorten(re.split(r"(?<=[.?])\s", comment, maxsplit=1)[0], 90, placeholder=" …")


def read_config(name: str) -> str:
    """Return the text of an installed config. What it builds on is named as installed, and is found
    wherever a copy lies."""
    path = shipped_configs().get(current_config(name.removeprefix("configs/")))
    if path is None:
        raise ConfigError(f"no config '{name}' is installed; `olmo-sparsity configs` lists them")
    return path.read_text().replace("../", "")


def _closest_file(path: Path) -> str:
    """Return a hint at the config that a missing one may be meant for; empty without any."""
    if path.exists():
        return ""
    names = [*map(str, path.parent.glob("*.yaml")), *shipped_configs()]
    close = difflib.get_close_matches(str(path).removeprefix("configs/"), names, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


# --- options of the command line ------------------------------------------------------------------


def arguments_of(function: Callable[..., Any]) -> dict[str, str]:
    """Return what the docstring of a function says of each of its arguments (`Args:`)."""
    _, _, section = (inspect.getdoc(function) or "").partition("Args:")
    help_of: dict[str, str] = {}
    for entry in re.split(r"\n    (?=\w)", section):
        names, _, text = entry.partition(": ")
        text = " ".join(text.split()).removesuffix(".")
        help_of |= dict.fromkeys(names.split(", "), text[:1].lower() + text[1:])
    return help_of


def add_options(
    parser: argparse.ArgumentParser, *schemas: type, help: Mapping[str, str] | None = None
) -> None:
    """Add an option for each field; of a name that several schemas have, the first. `help` is for
    fields that have none. Options that are not given are absent from the parsed ones, so that
    defaults are in one place."""
    known = set[str]()
    for schema in schemas:
        for name, (item, kind) in kinds_of(schema).items():
            if item.metadata.get("hidden") or name in known:
                continue
            known.add(name)
            text = item.metadata.get("help") or (help or {})[name]
            flag = f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"
            parser.add_argument(flag, dest=name, **_words_of(item, kind, text))


def _words_of(item: Field, kind: Any, text: str) -> dict[str, Any]:
    """Return what argparse needs to know of a field. `text`: its help."""
    default = spell(item.default)
    if default:
        text += f" ({default})"
    words: dict[str, Any] = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
    if "parse" in item.metadata:
        words["metavar"] = item.metadata.get("metavar")  # `build` reads the text
    elif kind is bool:
        words["action"] = "store_true"
    elif get_origin(kind) is Literal:
        words["choices"] = get_args(kind)
    else:
        metavar = "A,B,…" if get_origin(kind) is tuple else None
        words["metavar"] = item.metadata.get("metavar", metavar)
        words["type"] = _reader(kind)
    return words


def spell(value: Any) -> str:
    """Return a default as one would type it; nothing for none."""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _reader(kind: Any) -> Any:
    """Return the parser of an option's text. It leaves wrong values as they are; `build` names
    them."""

    def read(text: str, kind: Any = kind) -> Any:
        if get_origin(kind) is tuple:
            return tuple(read(word, get_args(kind)[0]) for word in text.split(","))
        for number in (int, float):
            if number in (kind, *get_args(kind)):
                try:
                    return number(text)
                except ValueError:
                    continue
        return text

    return read


def given_options(options: argparse.Namespace, names: Collection[str]) -> dict[str, Any]:
    """Return the options of these names that were given."""
    return {name: value for name, value in vars(options).items() if name in names}
