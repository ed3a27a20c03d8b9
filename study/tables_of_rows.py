"""Rows in a Parquet table, with its settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import read_json, read_parquet, write_json, writing
from olmo_sparsity.base.manifest import find_damage, write_manifest

Row = TypeVar("Row")


def write_rows(path: Path, rows: Sequence[Any], meta: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([vars(row) for row in rows])
    with writing(path) as partial:
        pq.write_table(table, partial)
    write_json(path.with_name("meta.json"), meta)
    write_manifest(path.parent, (path.name, "meta.json"))


def read_rows(path: Path, kind: type[Row], made_by: str) -> tuple[list[Row], dict[str, Any]]:
    """`made_by`: the command that writes such a table."""
    if not path.is_file():
        raise DataError(f"'{path.parent}' has no {path.name}; make it with `{made_by}`")
    remedy = f"make it again with `{made_by}`"
    if problem := find_damage(path.parent, (path.name, "meta.json")):
        raise DataError(f"{path.parent} is damaged: {problem}; {remedy}")
    table = read_parquet(path, remedy)
    meta = read_json(path.with_name("meta.json"), dict, remedy)
    return [kind(**row) for row in table.to_pylist()], meta


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with a header in its first line."""
    first, *others = lines
    rows = [first, ["---"] * len(first), *others]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
