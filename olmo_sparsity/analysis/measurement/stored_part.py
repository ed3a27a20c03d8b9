"""Write and read one part: a folder with the rows of some documents.

    parts/losses/000000-1f2e3d4c/
        losses.parquet, documents.parquet    the rows, a file for each table that has some
        finished.json                        `PartContents`: which documents, how many rows
        manifest.json                        sizes and hashes of these files

A part is a folder that appears by one rename, so it is whole or not there. `write_part` writes one,
`read_contents` checks one, and `read_rows` reads a table of it. `UnfinishedDocument` uses the same
folders for pieces of one document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from olmo_sparsity.analysis.results.json_values import write_as_json
from olmo_sparsity.analysis.results.schemas import Columns
from olmo_sparsity.analysis.results.tables import check_columns, read_table, to_table, write_table
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import read_json
from olmo_sparsity.base.launch import forget_deaths
from olmo_sparsity.base.manifest import find_damage, writing_folder
from olmo_sparsity.base.progress import say


@dataclasses.dataclass(frozen=True)
class PartContents:
    """The content of `finished.json`, which says what a part holds."""

    documents: list[int]
    rows: dict[str, int]
    """The number of rows of each table that has some. Named `rows`, not `num_rows`, as stored files
    have this key."""

    identity: str
    """SHA-256 of identity.json, or of what identifies an unfinished document. A part whose
    identity differs belongs to another measurement."""

    texts: list[str] = dataclasses.field(default_factory=list)
    """For a piece of an unfinished document: the names of the texts whose rows it holds."""


def table_of_document(name: str, document: int, columns: Columns) -> pa.Table:
    """Return a table of the rows of one document, sorted by all its columns, with the column
    `document` added.

    Args:
        name: The name of the table, which determines its columns and their types.
        document: The number of the document.
        columns: The rows, by column.
    """
    columns = dict(columns)
    first_column = next(iter(columns.values()), [])
    with_document = {"document": np.full(len(first_column), document)} | columns
    table = to_table(name, with_document, f"document {document}, table {name}")
    return table.sort_by([(column, "ascending") for column in table.schema.names])


def write_part(part: Path, tables: Mapping[str, pa.Table], contents: PartContents) -> None:
    """Write a part.

    Args:
        part: Its folder, which must not exist.
        tables: Name of a table → its rows.
        contents: What the part holds.
    """
    with writing_folder(part) as partial:
        for name, table in tables.items():
            write_table(partial / f"{name}.parquet", table)
        write_as_json(partial / "finished.json", dataclasses.asdict(contents))
    # A launch gives up after some deaths of its processes. A written part is progress, so the count
    # begins anew.
    forget_deaths()


def read_rows(part: Path, name: str) -> pa.Table:
    """Return the rows that a part has of a table."""
    return read_table(part / f"{name}.parquet", name)


def read_contents(part: Path, identity: str, consequence: str) -> PartContents | None:
    """Return the contents of a part. Return None if it is damaged or of another measurement, and
    print the reason.

    Args:
        identity: The identity that the part must have.
        consequence: What follows from a damage, such as "its documents are measured again".
    """
    try:
        return _check_and_read(part, identity)
    except DataError as problem:
        say(f"{part} is passed over ({problem}); {consequence}")
        return None


def _check_and_read(part: Path, identity: str) -> PartContents:
    """Return the contents of a part. Raise DataError if it is damaged or of another measurement."""
    # This file first: it says which others there are.
    _check_files(part, ["finished.json"])
    # No remedy: `read_contents` prints what follows.
    contents = read_json(part / "finished.json", PartContents, remedy="")
    _check_files(part, [f"{name}.parquet" for name in contents.rows])
    for name in contents.rows:
        check_columns(part / f"{name}.parquet", name)
    if contents.identity != identity:
        raise DataError("it is of another measurement")
    return contents


def _check_files(part: Path, names: Sequence[str]) -> None:
    """Raise DataError if a file of a part differs from the manifest, or is not there."""
    problem = find_damage(part, names)
    if problem is not None:
        raise DataError(problem)
