"""Write docs/keys.md, the table of all keys of a run's config: `python -m docs.write_keys`.

Keys, types and defaults come from the schema, sentences from the docstrings below its fields. A
test fails when the page no longer follows from them.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.config.schema import SchemaField, schema_fields
from olmo_sparsity.config.sections import RunConfig

PAGE = Path(__file__).parent / "keys.md"
HEAD = """<!-- Written by `python -m docs.write_keys` from olmo_sparsity/config. -->
# All keys of a config

Each key may be in a YAML file or follow a command as `--key=value`. `null` unsets one that has it \
among its types. Complete files: [your own run](train.md#your-own-run).
"""


def page() -> str:
    return HEAD + "".join(_sections(RunConfig, ""))


def _sections(schema: type, above: str) -> Iterator[str]:
    """Yield the table of a section's own keys, then those of the sections in it."""
    sentences = _sentences(schema)
    title = f"`{above.rstrip('.')}`" if above else "The run"
    fields_shown = list(schema_fields(schema))
    if above.endswith("[]."):
        title += ", each of a list"
        # A section of a list may extend that of a single one, whose keys are shown above.
        fields_shown = list(inspect.get_annotations(schema))
        if len(fields_shown) < len(schema_fields(schema)):
            title += f", beside the keys of `{above.removesuffix('[].')}`"
    in_stages = {item.properties.shares_key_with for item in schema_fields(schema).values()}
    rows = []
    inner: list[tuple[Any, str]] = []
    for name in fields_shown:
        item = schema_fields(schema)[name]
        kind = item.kind
        if is_dataclass(kind):
            inner.append((kind, f"{above}{name}."))
        elif item.properties.shares_key_with is not None:
            inner.append((*get_args(kind), f"{above}{item.properties.shares_key_with}[]."))
        elif item.properties.refused is None:
            shown_kind = _kind(kind) + (" or list of stages" if name in in_stages else "")
            cells = (f"`{above}{name}`", shown_kind, _default(item), sentences.get(name, ""))
            rows.append(f"| {' | '.join(cells)} |\n")
    if rows:
        yield f"\n## {title}\n\n| key | type | default | what it does |\n|---|---|---|---|\n"
        yield from rows
    for section, place in inner:
        yield from _sections(section, place)


def _sentences(schema: type) -> dict[str, str]:
    """Return the docstring below each field of a class, on one line, as a table's cell."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(schema)))
    body = tree.body[0].body  # type: ignore[attr-defined] # of the class
    sentences: dict[str, str] = {}
    for node, below in pairwise(body):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
            text = " ".join(str(below.value.value).split())
            text = re.sub(r"\bNone:", "null:", text)
            sentences[node.target.id] = text.replace("|", r"\|")
    return sentences


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return f"list: {_kind(get_args(kind)[0])}"
    if get_origin(kind) is not dict and get_args(kind):
        return " or ".join(map(_kind, get_args(kind)))
    names = {int: "whole number", float: "number", str: "text", bool: "true, false"}
    return {**names, NoneType: "`null`"}.get(kind, "mapping")


def _default(item: SchemaField) -> str:
    value = item.default
    if value == 0 and item.properties.parse is not None:
        value = "auto"
    if value is None or isinstance(value, bool):
        value = {None: "null", True: "true", False: "false"}[value]
    return f"`{value}`"


if __name__ == "__main__":
    write_atomically(PAGE, page())
