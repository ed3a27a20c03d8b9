"""Derive options of the command line from a schema, and their help from docstrings.

A function of `analysis/api.py` describes its arguments once, under `Args:` of its docstring. The
schema of its settings gives their types, defaults and choices. Both together are the options:

    add_options(parser, Settings, help=arguments_of(measure))
    Settings(**given_options(parser.parse_args(), names))

An option that the user leaves out is absent, so that defaults are in one place, the schema. A word
that is not of the option's type, such as --draws=many, is kept as it is: `build` then rejects it,
in the same words as a wrong value in a file. argparse itself rejects a word outside of an option's
choices.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal, get_args, get_origin

from olmo_sparsity.config.schema import SchemaField, schema_fields, spell


def arguments_of(function: Callable[..., Any]) -> dict[str, str]:
    """Return what the docstring of a function says of each of its arguments, by name. They are
    listed under `Args:`, several with one description as `device, dtype: …`."""
    _, _, section = (inspect.getdoc(function) or "").partition("Args:")
    help_of: dict[str, str] = {}
    # Entries are indented by four spaces, and their further lines by eight. Before the first entry
    # there is nothing.
    for entry in re.split(r"\n    (?=\w)", section)[1:]:
        names, _, description = entry.partition(": ")
        help_text = " ".join(description.split()).removesuffix(".")
        help_of |= dict.fromkeys(names.split(", "), help_text[:1].lower() + help_text[1:])
    return help_of


def add_options(
    parser: argparse.ArgumentParser, *schemas: type, help: Mapping[str, str] | None = None
) -> None:
    """Add an option to the parser for each field of the schemas. If several schemas have a field of
    the same name, the first one counts.

    Args:
        parser: The parser of a command.
        schemas: Dataclasses whose fields are declared with `option`.
        help: Name of a field → its help. Required for each field that has none of its own.
    """
    added: set[str] = set()
    for schema in schemas:
        for name, item in schema_fields(schema).items():
            if item.properties.hidden or name in added:
                continue
            added.add(name)
            help_text = item.properties.help or (help or {})[name]
            flag = f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"
            parser.add_argument(flag, dest=name, **_keywords_of(item, help_text))


def _keywords_of(item: SchemaField, help_text: str) -> dict[str, Any]:
    """Return the keywords of argparse's `add_argument` for a field.

    Args:
        item: The field.
        help_text: Its help, to which the default is added.
    """
    default = spell(item.default)
    if default:
        help_text += f" ({default})"
    # argparse formats the help with %.
    keywords: dict[str, Any] = {"help": help_text.replace("%", "%%"), "default": argparse.SUPPRESS}
    kind = item.kind
    if item.properties.parse is not None:
        keywords["metavar"] = item.properties.metavar  # `build` reads the text
    elif kind is bool:
        keywords["action"] = "store_true"
    elif get_origin(kind) is Literal:
        keywords["choices"] = get_args(kind)
    else:
        usual_metavar = "A,B,…" if get_origin(kind) is tuple else None
        keywords["metavar"] = item.properties.metavar or usual_metavar
        keywords["type"] = partial(_read_value, kind)
    return keywords


def _read_value(kind: Any, text: str) -> Any:
    """Return the value of an option.

    Args:
        kind: The type of the field, such as `float`, `int | None` or `tuple[int, ...]`.
        text: What the user typed: "4", or "1,2,4" for a tuple. It is returned unchanged if it is
            not of this type, so that `build` rejects it.
    """
    if get_origin(kind) is tuple:
        kind_of_items = get_args(kind)[0]
        return tuple(_read_value(kind_of_items, word) for word in text.split(","))
    # `int` first, so that "4" is 4 and not 4.0 where a field takes both.
    for number_type in (int, float):
        if number_type in (kind, *get_args(kind)):
            try:
                return number_type(text)
            except ValueError:
                continue
    return text


def given_options(options: argparse.Namespace, names: Collection[str]) -> dict[str, Any]:
    """Return the values of the options that the user has given, of those with these names."""
    return {name: value for name, value in vars(options).items() if name in names}
