"""Define the tables of a measurement, and read and write them as Parquet and JSON files.

`SCHEMAS` names all tables with their columns. A measurement runs in two phases over the documents,
and each phase fills some of the tables document by document (`PHASES`); the tables `targets` and
`summary` are computed from those at the end:

    phase "losses"      documents, losses
    phase "recovery"    tokens, influence, recovery, lds, costs
    at the end          targets, summary

docs/measure.md explains the columns. Never imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from olmo_sparsity.analysis.results.columns import (
    BOOL,
    FLOAT32,
    INT32,
    INT64,
    TEXT,
    ColumnType,
    types_of_columns,
)
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import read_parquet, write_atomically
from olmo_sparsity.base.renamed import current_name

Columns = Mapping[str, np.ndarray | list | pd.Series]
"""Name of a column → its values."""

_ARROW_TYPES = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "text": pa.string(),
    "bool": pa.bool_(),
}


def _schema(**columns: ColumnType) -> pa.Schema:
    """Return a schema from the type of each column."""
    fields = []
    for name, column_type in columns.items():
        arrow_type = _ARROW_TYPES[column_type.name]
        fields.append(pa.field(name, arrow_type, nullable=column_type.is_nullable))
    return pa.schema(fields)


PHASES = {
    "losses": {
        "documents": _schema(document=INT32, name=TEXT),
        "losses": _schema(
            document=INT32,
            target=INT32,
            token_id=INT32,
            loss_short=FLOAT32,
            loss_long=FLOAT32,
            bigram=BOOL,
            placebo_loss_long=FLOAT32,
            placebo_bigram=BOOL,
        ),
    },
    "recovery": {
        "tokens": _schema(document=INT32, place=INT32, token_id=INT32, text=TEXT),
        "influence": _schema(
            document=INT32,
            target=INT32,
            distant_part=TEXT,
            units=TEXT,
            selector=TEXT,
            control=TEXT,
            rank=INT32,
            distant_first=INT32,
            distant_end=INT32,
            distant_text=TEXT,
            influence=FLOAT32,
        ),
        "recovery": _schema(
            document=INT32,
            target=INT32,
            distant_part=TEXT,
            units=TEXT,
            selector=TEXT,
            control=TEXT,
            draw=INT32,
            k=INT32,
            num_tokens=INT32,
            loss_set=FLOAT32,
            loss_without=FLOAT32.or_null,
        ),
        "lds": _schema(
            document=INT32,
            target=INT32,
            units=TEXT,
            selector=TEXT,
            lds=FLOAT32,
        ),
        "costs": _schema(
            document=INT32,
            units=TEXT,
            selector=TEXT,
            token_forwards=INT64,
            num_targets=INT32,
        ),
    },
}
"""The two phases of a measurement, with the tables of each."""

MADE_OF_PARTS = PHASES["losses"] | PHASES["recovery"]
"""The tables that are filled document by document, and stored in parts until the end."""

SCHEMAS = MADE_OF_PARTS | {
    "targets": _schema(document=INT32, target=INT32, distant_part=TEXT, target_set=TEXT, end=INT32),
    "summary": _schema(**types_of_columns()),
}


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


def to_json_value(value: Any) -> Any:
    """Convert arrays, NumPy numbers, tuples and paths to what JSON can hold. NaN and infinities
    become null, as JSON has no word for them."""
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return to_json_value(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    # `json` would write NaN, which other readers of JSON refuse.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def write_as_json(path: Path, value: Any) -> None:
    """Write a JSON file, atomically, of a value that may hold arrays, NaN and paths."""
    text = json.dumps(to_json_value(value), ensure_ascii=False, indent=2)
    write_atomically(path, text + "\n")
