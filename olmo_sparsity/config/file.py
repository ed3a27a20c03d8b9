"""Read a config from YAML and `--key.sub=value` overrides, and write it back complete.

Place in the flow: first; the fields are those of sections.py and text.py.

An unknown key is refused, with the closest known one as a hint, and so is a key that would be
ignored.
"""

from __future__ import annotations

import difflib
import fnmatch
import io
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from olmo_sparsity.config.check import check, check_range
from olmo_sparsity.config.names import translate
from olmo_sparsity.config.sections import REFUSED_FIELDS, RunConfig
from olmo_sparsity.config.shipped import find_config, shipped_configs
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.folders import leaves
from olmo_sparsity.io import read_bounded, write_atomically

Schema = TypeVar("Schema")


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read and check the settings of a run."""
    return config_from_dict(read_given(path, overrides), origin=str(path))


def load_saved_config(path: str | Path) -> RunConfig:
    """Read what `save_config` wrote. The folder may be anybody's, so the file is read by itself: no
    base, no variables of this process."""
    given = _read_yaml_file(Path(path))
    texts = [str(value) for _, value in leaves(given)]
    if "base" in given or any("${" in text for text in texts):
        raise ConfigError(f"{path} refers to something else (base, ${{…}}), which no run writes")
    return config_from_dict(given, origin=str(path))


def config_from_dict(given: dict, origin: str = "config") -> RunConfig:
    given = translate({str(key): value for key, value in given.items()}, origin)
    config = fill_in(RunConfig, given, origin)
    _refuse_unused(config, given, origin)
    check(config, origin)
    return config


def read_given(path: str | Path, overrides: list[str] | None = None) -> dict[Any, Any]:
    """YAML file, of the user's or shipped (with an optional `base:` file beneath it), +
    `--key.sub=value` overrides."""
    given = _read_yaml(find_config(path))
    for override in overrides or []:
        text = override.lstrip("-")
        if "=" not in text:
            raise ConfigError(
                f"'{override}' is no option of this command (see --help), nor a setting with a "
                f"value (--{text}=VALUE)"
            )
        try:
            key, _, value = text.partition("=")
            refuse_boundless(value, at_depth=key.count(".") + key.count("["))
            given = _merge(given, OmegaConf.to_container(OmegaConf.from_dotlist([text])))
        except (OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"override '{override}' cannot be read: {reason}") from None
    return given


def fill_in(schema: type[Schema], given: dict, origin: str) -> Schema:
    """The schema's defaults, overridden by `given`; unknown keys and wrong types are refused."""
    try:
        kept = _clean(given, schema, origin)
        config = OmegaConf.to_object(OmegaConf.merge(_defaults(schema), kept))
    except ConfigKeyError as error:
        _refuse_other_kind(given, schema, origin)
        raise ConfigError(f"{origin}: {_explain_unknown(str(error.full_key), schema)}") from None
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{origin}: {where}{str(error).splitlines()[0]}") from None
    except TypeError as error:
        if "incompatible container" not in str(error):
            raise  # a defect, perhaps of a user's own task
        raise ConfigError(  # OmegaConf gives no place
            f"{origin}: has a list where `key: value` lines belong, or the other way round"
        ) from None
    assert isinstance(config, schema)
    for key, section, item, value in _walk(config):
        check_range(origin, key, section, item, value)
        # OmegaConf accepts a nested list for any list.
        if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
            raise ConfigError(f"{origin}: {key} must be a plain list, not one that holds {value}")
    return config


_defaults: Callable[[Any], Any] = cache(OmegaConf.structured)  # a merge copies them
_TEXTS = (list[str], list[str] | None)


def _clean(given: dict, schema: type, origin: str, section: str = "") -> dict:
    """A null for what cannot be null, as a section (`--data.repeated=null`), counts as if no file
    had set it. A number for a text is refused: YAML has changed it (007 is 7, 2024_01 is 202401).
    """
    key: Any
    kinds: dict[Any, Any] = get_type_hints(schema)
    lists = _lists(schema)
    kept = {}
    for key, value in given.items():
        kind, name = kinds.get(key), f"{section}{key}"
        if key in lists.values():
            raise ConfigError(f"{origin}: unknown key '{name}'")
        if key in lists and isinstance(value, list):
            (inner,) = get_args(kinds[lists[key]])
            kept[lists[key]] = _clean_list(value, inner, origin, name)
            continue
        if is_dataclass(kind) and isinstance(value, dict):
            value = _clean(value, kinds[key], origin, f"{name}.")
        texts = [value] if kind in (str, str | None) else []
        if kind in _TEXTS and isinstance(value, list):
            texts = value
        if any(isinstance(text, int | float) for text in texts):
            raise ConfigError(
                f"{origin}: {name}={value} is no text to YAML; quote it (on the command line: "
                f"'--{name}=\"…\"')"
            )
        is_list = any(get_origin(one) is list for one in (kind, *get_args(kind)))
        if is_list and not (value is None or isinstance(value, list) or "${" in str(value)):
            example = "" if isinstance(value, dict) else f": {name}=[{value}]"
            raise ConfigError(f"{origin}: {name} must be a list{example}")
        if value is not None or kind in (None, Any) or type(None) in get_args(kind):
            kept[key] = value
    return kept


def _clean_list(given: list, schema: type, origin: str, name: str) -> list[dict]:
    if not given or not all(isinstance(one, dict) for one in given):
        known = ", ".join(item.name for item in fields(schema))
        raise ConfigError(f"{origin}: {name}={given} must be a list of sections with {known}")
    for number, one in enumerate(given):
        fill_in(schema, one, f"{origin}: {name}[{number}]")  # names what is wrong in it
    return [_clean(one, schema, origin, f"{name}[{i}].") for i, one in enumerate(given)]


def _lists(schema: Any) -> dict[str, str]:
    """Keys that are given once or as a list, and the field that holds the list."""
    return {
        item.metadata["several"]: item.name for item in fields(schema) if "several" in item.metadata
    }


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write all fields that apply, resolved, such that the file gives the same run."""
    write_atomically(Path(path), config_text(config))


def config_text(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(_written(config)))


def _written(section: Any, prefix: str = "") -> dict[str, Any]:
    written: dict[str, Any] = {}
    for item, value in _given_fields(section):
        key = item.metadata.get("several", item.name)
        if f"{prefix}{key}" in REFUSED_FIELDS or not _applies(section, item):
            continue
        if is_dataclass(value):
            written[key] = _written(value, f"{prefix}{key}.")
        elif key != item.name:
            written[key] = [_written(inner, f"{prefix}{key}.") for inner in value]
        else:
            is_enum = prefix == "model." and hasattr(value, "name")
            written[key] = str(value) if is_enum else value
    return written


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every dotted key that is read, and its value."""
    return {
        key: value
        for key, section, item, value in _walk(config)
        if key not in REFUSED_FIELDS and _applies(section, item)
    }


def _read_yaml(path: Path, above: tuple[Path, ...] = ()) -> dict[Any, Any]:
    loaded = _read_yaml_file(path)
    if "base" not in loaded:
        return loaded
    beneath = find_config(str(loaded.pop("base")), path)
    if beneath in (path, *above):
        raise ConfigError(f"config file '{path}' is a base of its own base, '{beneath}'")
    base = _read_yaml(beneath, (path, *above))
    try:
        return _merge(base, loaded)
    except TypeError as error:
        raise ConfigError(f"config file '{path}' over '{beneath}': {error}") from None


def _merge(beneath: Any, above: Any, name: str = "") -> Any:
    """A list replaces a section beneath it (`data.corpus`); a section over a list is an error."""
    if not isinstance(above, dict):
        return above
    if isinstance(beneath, list):
        raise TypeError(f"{name} is a list there; give all of it")
    if not isinstance(beneath, dict):
        return above
    changed = {key: _merge(beneath.get(key), value, str(key)) for key, value in above.items()}
    return {**beneath, **changed}


def _read_yaml_file(path: Path) -> dict[Any, Any]:
    if not path.is_file():
        state = "is no regular file" if path.exists() else "does not exist"
        state = "is a folder" if path.is_dir() else state
        raise ConfigError(f"config file '{path}' {state}{_closest_file(path)}")
    try:
        text = read_bounded(path, 2**24).decode()
        loaded = deepcopy(_parse_yaml(text))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config file '{path}' is not readable YAML: {reason}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file '{path}' must hold `key: value` lines")
    return loaded


@lru_cache(maxsize=64)  # the runs of a sweep share theirs
def _parse_yaml(text: str) -> Any:
    refuse_boundless(text)
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))


def refuse_boundless(text: str, at_depth: int = 0) -> None:
    """What is nested too deep exhausts the stack of the YAML library, which ends the process; what
    refers to itself many times over fills the memory."""
    depth, num_aliases = at_depth, 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        num_aliases += isinstance(event, yaml.AliasEvent)
        if depth > 50:
            raise ValueError("it is nested too deep")
        if num_aliases > 20:
            raise ValueError("it has more than 20 aliases (*name)")


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Every leaf field as (dotted key, its section, its field, its value)."""
    for item, value in _given_fields(node):
        if is_dataclass(value):
            yield from _walk(value, f"{prefix}{item.name}.")
        elif key := item.metadata.get("several"):
            for number, inner in enumerate(value):
                yield from _walk(inner, f"{prefix}{key}[{number}].")
        else:
            yield f"{prefix}{item.name}", node, item, value


def _given_fields(section: Any) -> Iterator[tuple[Any, Any]]:
    """Fields and values; of a key that is one or several, the field that holds it."""
    unused = {key if getattr(section, name) else name for key, name in _lists(section).items()}
    for item in fields(section):
        if item.name not in unused:
            yield item, getattr(section, item.name)


def _applies(section: Any, item: Any) -> bool:
    condition = item.metadata.get("only_if")
    return condition is None or getattr(section, condition[0]) in condition[1]


def _refuse_unused(config: RunConfig, given: dict, origin: str) -> None:
    given_keys = {key: value for key, value in leaves(given) if value is not None}
    for key, reason in REFUSED_FIELDS.items():
        if any(f"{name}.".startswith(f"{key}.") for name in given_keys):
            raise ConfigError(f"{origin}: {key} would be ignored: {reason}")
    for key, section, item, _ in _walk(config):
        if key not in given_keys:
            continue  # `--key=null` unsets a key of the base file
        if not _applies(section, item):
            sibling, values = item.metadata["only_if"]
            sibling_key = key.rsplit(".", 1)[0] + "." + sibling
            raise ConfigError(
                f"{origin}: {key} is set, but {sibling_key}={getattr(section, sibling)} does not "
                f"use it; remove it, unset it with --{key}=null, or set {sibling_key} to "
                f"{' or '.join(values)}"
            )


_MADE_FOR = {
    "grid": "sweep",
    "experiments": "sweep",
    "schemes": "task",
    "run_folder": "train",
    "figure": "theory",
}
"""The command whose configs have this key."""


def _refuse_other_kind(given: dict, schema: type, origin: str) -> None:
    known = get_type_hints(schema)
    for key, command in _MADE_FOR.items():
        if key in given and key not in known:
            raise ConfigError(f"{origin}: '{key}' belongs to `olmo-sparsity {command}`")


def _explain_unknown(key: str, schema: type) -> str:
    known = list(_known_keys(schema))
    plain = re.sub(r"\[\d+\]", "", key)
    # The right name in the wrong section first, then the closest spelling.
    close = fnmatch.filter(known, f"*.{plain.rsplit('.', 1)[-1]}")
    close = close or difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
    section = plain.rpartition(".")[0]
    if section and close == [section]:  # the closest match is the section itself
        names = [name.removeprefix(f"{section}.") for name in known if name.startswith(section)]
        names = [name for name in names if "." not in name and name != section]
        return f"unknown key '{key}'; {section} has {', '.join(names)}"
    if close:
        return f"unknown key '{key}'; did you mean '{close[0]}'?"
    few = f"; choose from {', '.join(known)}" if 0 < len(known) <= 12 else ""
    return f"unknown key '{key}'{few}"


def _known_keys(schema: type, prefix: str = "") -> Iterator[str]:
    kinds, lists = get_type_hints(schema), _lists(schema)
    for name in (item.name for item in fields(schema)):
        kind = kinds[name]
        name = next((key for key, holder in lists.items() if holder == name), name)
        yield prefix + name
        for inner in (kind, *get_args(kind)):  # a section, or a list of sections
            if is_dataclass(inner):
                assert isinstance(inner, type)
                yield from _known_keys(inner, f"{prefix}{name}.")


def _closest_file(path: Path) -> str:
    if path.exists():
        return ""
    names = [*map(str, path.parent.glob("*.yaml")), *shipped_configs()]
    close = difflib.get_close_matches(str(path).removeprefix("configs/"), names, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
