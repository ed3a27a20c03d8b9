"""Define the tables of a measurement, and read and write them as Parquet and JSON files. Never
imports torch."""

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

from olmo_sparsity.analysis.results.columns import kinds_of_columns
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import read_parquet, write_atomically
from olmo_sparsity.base.renamed import current_name

Columns = Mapping[str, np.ndarray | list | pd.Series]

_TYPES = {
    "int": pa.int32(),
    "large": pa.int64(),
    "real": pa.float32(),
    "wide": pa.float64(),
    "text": pa.string(),
    "bool": pa.bool_(),
}


def _schema(**columns: str) -> pa.Schema:
    """Return a schema from the kind of each column: `real?` may be null, `real` may not."""
    fields = []
    for name, kind in columns.items():
        fields.append(pa.field(name, _TYPES[kind.rstrip("?")], nullable=kind.endswith("?")))
    return pa.schema(fields)


# fmt: off
PHASES = {
    "losses": {
        "documents": _schema(document="int", name="text"),
        "losses": _schema(
            document="int", target="int", token_id="int", loss_short="real", loss_long="real",
            bigram="bool", placebo_loss_long="real", placebo_bigram="bool",
        ),
    },
    "recovery": {
        "tokens": _schema(document="int", place="int", token_id="int", text="text"),
        "influence": _schema(
            document="int", target="int", distant_part="text", units="text", selector="text",
            control="text", rank="int", distant_first="int", distant_end="int", distant_text="text",
            influence="real",
        ),
        "recovery": _schema(
            document="int", target="int", distant_part="text", units="text", selector="text",
            control="text", draw="int", k="int", num_tokens="int", loss_set="real",
            loss_without="real?",
        ),
        "lds": _schema(
            document="int", target="int", units="text", selector="text", lds="real",
        ),
        "costs": _schema(
            document="int", units="text", selector="text", token_forwards="large",
            num_targets="int",
        ),
    },
}
"""The two phases of a measurement, with the tables of each."""

MADE_OF_PARTS = PHASES["losses"] | PHASES["recovery"]
SCHEMAS = MADE_OF_PARTS | {
    "targets": _schema(
        document="int", target="int", distant_part="text", target_set="text", end="int"
    ),
    "summary": _schema(**kinds_of_columns()),
}
# fmt: on


def joined(rows_of_documents: Mapping[int, Columns]) -> pd.DataFrame:
    """Join the rows of documents, by their numbers, into one frame with a column `document`."""
    tables = {number: pd.DataFrame(dict(rows)) for number, rows in rows_of_documents.items()}
    return pd.concat(tables, names=["document"]).reset_index("document")


def to_table(name: str, columns: Columns, origin: str) -> pa.Table:
    """Convert columns to a table of the schema `name`. `origin`: what an error calls the rows."""
    schema = SCHEMAS[name]
    assert columns.keys() == set(schema.names), f"{origin}: {set(schema.names) ^ columns.keys()}"
    lengths = {column: len(values) for column, values in columns.items()}
    assert len(set(lengths.values())) == 1, f"{origin}: columns of different lengths: {lengths}"
    arrays = []
    for field in schema:
        # from_pandas: NaN becomes null.
        array = pa.array(columns[field.name], type=field.type, from_pandas=True)
        num_wrong = 0 if field.nullable else array.null_count
        if not field.nullable and pa.types.is_floating(field.type):
            num_wrong = int((~np.isfinite(array.to_numpy(zero_copy_only=False))).sum())
        if num_wrong:
            raise DataError(
                f"{origin}: {field.name} is not a finite number in {num_wrong} of {len(array)} "
                "rows; load the model with another dtype, such as fp32"
            )
        arrays.append(array)
    return pa.table(arrays, schema=schema)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as one Parquet file."""
    pq.write_table(table.combine_chunks(), path, compression="zstd")


def read_table(path: Path, name: str, omit: Collection[str] = ()) -> pa.Table:
    """Read a file of a folder with a verified manifest, without the columns `omit`."""
    table = with_current_columns(read_parquet(path, "measure again"))
    check_columns(path, name, table.schema, omit)
    return table.select([column for column in SCHEMAS[name].names if column not in omit])


def with_current_columns(table: pa.Table) -> pa.Table:
    """Rename columns and controls that an earlier release stored under other names."""
    table = table.rename_columns([current_name(name) for name in table.column_names])
    if "control" not in table.column_names:
        return table
    place = table.column_names.index("control")
    controls = map(current_name, table["control"].to_pylist())
    field = table.schema.field(place)
    return table.set_column(place, field, pa.array(controls, field.type))


def check_columns(
    path: Path, name: str, stored: pa.Schema | None = None, omit: Collection[str] = ()
) -> None:
    """Raise DataError if a file lacks a column of the table `name`, or stores it as another type.
    `stored`: the schema of the file, if it was read already; `omit`: columns not to look for."""
    if stored is None:
        stored = pq.read_schema(path)
    types = {current_name(field.name): field.type for field in stored}
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
    """Return those of the columns that a file does not store."""
    stored = {current_name(field.name) for field in pq.read_schema(path)}
    return [name for name in names if name not in stored]


def to_json_value(value: Any) -> Any:
    """Convert to standard JSON values; NaN and infinities become null."""
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return to_json_value(value.tolist())
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, atomically: a list on one line, as it may have an item a document, and
    anything else for readers."""
    indent = None if isinstance(value, list) else 2
    write_atomically(
        path, json.dumps(to_json_value(value), ensure_ascii=False, indent=indent) + "\n"
    )
