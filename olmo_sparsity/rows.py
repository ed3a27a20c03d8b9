"""Results whose rows are a dataclass: one Parquet file, and meta.json beside it.

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

from olmo_sparsity.errors import DataError
from olmo_sparsity.files import remove_partial, write_atomically, writing
from olmo_sparsity.json_files import read_json
from olmo_sparsity.manifest import MANIFEST, verify_manifest, write_manifest

Row = TypeVar("Row")

_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}


def schema_of(kind: type) -> pa.Schema:
    """Its module has `from __future__ import annotations`, so types are names."""
    types = {item.name: str(item.type) for item in fields(kind)}
    return pa.schema(
        (name, _TYPES[word.removesuffix(" | None")], word.endswith("None"))
        for name, word in types.items()
    )


def write_rows(path: Path, kind: type[Row], rows: Sequence[Row], meta: dict[str, Any]) -> None:
    """`path`: of the Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partial(path.parent)
    table = pa.Table.from_pylist([vars(row) for row in rows], schema=schema_of(kind))
    with writing(path) as partial:
        pq.write_table(table, partial)
    write_meta(path.with_name("meta.json"), meta)
    write_manifest(path.parent, (path.name, "meta.json"))


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(meta, indent=2, ensure_ascii=False) + "\n")


def read_rows(path: Path, kind: type[Row], made_by: str) -> tuple[list[Row], dict[str, Any]]:
    """`made_by`: the command that writes such a table."""
    for needed in (path, path.with_name("meta.json")):
        if not needed.is_file():
            raise DataError(f"'{path.parent}' has no {needed.name}; make it with `{made_by}`")
    remedy = f"make it again with `{made_by}`"
    # Copies that are kept to be read have no manifest.
    if (path.parent / MANIFEST).exists() and (problem := verify_manifest(path.parent)):
        raise DataError(f"{path.parent} is damaged: {problem}; {remedy}")
    table = read_parquet(path, remedy)
    meta = read_json(path.with_name("meta.json"), dict, remedy)
    names = schema_of(kind).names
    if table.schema.names != names:
        strange = sorted(set(table.schema.names) ^ set(names))
        raise DataError(
            f"{path}: columns {strange} are missing or unknown; it was written by another version: "
            f"{remedy}"
        )
    return [kind(**row) for row in table.to_pylist()], meta


def read_parquet(path: Path, remedy: str) -> pa.Table:
    try:
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} cannot be read ({reason}); {remedy}") from None


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table whose first line are the heads."""
    first, *others = lines
    every = [first, ["---"] * len(first), *others]
    return "\n".join("| " + " | ".join(line) + " |" for line in every)
