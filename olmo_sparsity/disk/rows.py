"""Store a list of dataclass rows as a Parquet file with a meta.json beside it.

Place in the flow: beneath the results of tasks and theory. Never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from olmo_sparsity.disk.files import write_atomically, writing
from olmo_sparsity.disk.json_files import read_json
from olmo_sparsity.disk.manifest import verify_manifest, write_manifest
from olmo_sparsity.errors import DataError

Row = TypeVar("Row")

_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}


def schema_of(kind: type) -> pa.Schema:
    """Types are names, because of `from __future__ import annotations` in the module of `kind`."""
    types = {item.name: str(item.type) for item in fields(kind)}
    return pa.schema(
        (name, _TYPES[word.removesuffix(" | None")], word.endswith("None"))
        for name, word in types.items()
    )


def write_rows(path: Path, kind: type[Row], rows: Sequence[Row], meta: dict[str, Any]) -> None:
    table = pa.Table.from_pylist([vars(row) for row in rows], schema=schema_of(kind))
    with writing(path) as partial:
        pq.write_table(table, partial)
    write_meta(path.with_name("meta.json"), meta)
    write_manifest(path.parent, (path.name, "meta.json"))


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(meta, indent=2, ensure_ascii=False) + "\n")


def read_rows(path: Path, kind: type[Row], made_by: str) -> tuple[list[Row], dict[str, Any]]:
    """`made_by`: the command that writes such a table."""
    if not path.is_file():
        raise DataError(f"'{path.parent}' has no {path.name}; make it with `{made_by}`")
    remedy = f"make it again with `{made_by}`"
    if problem := verify_manifest(path.parent, (path.name, "meta.json")):
        raise DataError(f"{path.parent} is damaged: {problem}; {remedy}")
    table = read_parquet(path, remedy)
    meta = read_json(path.with_name("meta.json"), dict, remedy)
    names = schema_of(kind).names
    if table.schema.names != names:
        differing = sorted(set(table.schema.names) ^ set(names))
        raise DataError(
            f"{path}, of another version: columns {differing} are missing or unknown; {remedy}"
        )
    return [kind(**row) for row in table.to_pylist()], meta


def read_parquet(path: Path, remedy: str) -> pa.Table:
    try:
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} cannot be read ({reason}); {remedy}") from None


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first line is the header."""
    first, *others = lines
    rows = [first, ["---"] * len(first), *others]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
