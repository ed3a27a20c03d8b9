"""Read and write the tables of a measurement (schemas.py) as Parquet files, and check columns.

    table = to_table("losses", {"document": [0, 0], "target": [18, 19], …}, "document 0")
    write_table(folder / "losses.parquet", table)
    read_table(folder / "losses.parquet", "losses")    # DataError if a column is not as declared

Files of an earlier release have some columns under other names, and are read under today's. Never
imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from olmo_sparsity.analysis.results.schemas import SCHEMAS, Columns
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import read_parquet
from olmo_sparsity.base.renamed import current_name


def join_documents(rows_of_documents: Mapping[int, Columns]) -> pd.DataFrame:
    """Join the rows of several documents, by the number of each, into one frame with a column
    `document`."""
    tables = {number: pd.DataFrame(dict(rows)) for number, rows in rows_of_documents.items()}
    return pd.concat(tables, names=["document"]).reset_index("document")


def to_table(name: str, columns: Columns, origin: str) -> pa.Table:
    """Convert columns to a table of Arrow. Raise DataError if a number is not finite that must be.

    Args:
        name: The name of the table, which determines the schema.
        columns: All columns of the table.
        origin: How an error names the rows, such as "document 3, table losses".
    """
    # Rows come from code of ours, so wrong columns are a bug, and not a user's error.
    schema = SCHEMAS[name]
    assert columns.keys() == set(schema.names), f"{origin}: {set(schema.names) ^ columns.keys()}"
    lengths = {column: len(values) for column, values in columns.items()}
    assert len(set(lengths.values())) == 1, f"{origin}: columns of different lengths: {lengths}"
    arrays = []
    for field in schema:
        # from_pandas: NaN becomes null.
        array = pa.array(columns[field.name], type=field.type, from_pandas=True)
        num_wrong = 0 if field.nullable else _num_not_finite(array)
        if num_wrong:
            raise DataError(
                f"{origin}: {field.name} is not a finite number in {num_wrong} of {len(array)} "
                "rows; load the model with another dtype, such as fp32"
            )
        arrays.append(array)
    return pa.table(arrays, schema=schema)


def _num_not_finite(array: pa.Array) -> int:
    """Return how many values of a column are null, NaN or infinite."""
    if not pa.types.is_floating(array.type):
        return int(array.null_count)
    return int((~np.isfinite(array.to_numpy(zero_copy_only=False))).sum())


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as one Parquet file."""
    pq.write_table(table.combine_chunks(), path, compression="zstd")


def read_table(path: Path, name: str, omit: Collection[str] = ()) -> pa.Table:
    """Read the file of the table `name`, without the columns `omit`. The caller must have compared
    the file with the manifest of its folder."""
    table = with_current_columns(read_parquet(path, "measure again"))
    check_columns(path, name, table.schema, omit)
    return table.select([column for column in SCHEMAS[name].names if column not in omit])


def with_current_columns(table: pa.Table) -> pa.Table:
    """Rename columns and controls that an earlier release stored under other names."""
    table = table.rename_columns([current_name(name) for name in table.column_names])
    if "control" not in table.column_names:
        return table
    control_place = table.column_names.index("control")
    controls = map(current_name, table["control"].to_pylist())
    field = table.schema.field(control_place)
    return table.set_column(control_place, field, pa.array(controls, field.type))


def check_columns(
    path: Path, name: str, stored: pa.Schema | None = None, omit: Collection[str] = ()
) -> None:
    """Raise DataError if a file lacks a column of a table, or stores it as another type.

    Args:
        path: The file.
        name: The name of the table.
        stored: The schema of the file, if it was read already.
        omit: Columns that the file need not have.
    """
    stored_fields = pq.read_schema(path) if stored is None else stored
    types = {current_name(field.name): field.type for field in stored_fields}
    for field in SCHEMAS[name]:
        if field.name in omit:
            continue
        if types.get(field.name) != field.type:
            stored_type = types.get(field.name, "absent")
            raise DataError(
                f"{path}: column {field.name} must be {field.type}, not {stored_type}; run the "
                "command that wrote it again"
            )


def absent_columns(path: Path, names: Collection[str]) -> list[str]:
    """Return the columns among `names` that a file does not store."""
    stored = {current_name(field.name) for field in pq.read_schema(path)}
    return [name for name in names if name not in stored]
