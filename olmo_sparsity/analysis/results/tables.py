"""Define the tables of a measurement, and read and write them as Parquet and JSON files. Never
imports torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import read_parquet, write_atomically

Columns = Mapping[str, np.ndarray | list | pd.Series]

# fmt: off
_TYPES = {"int": pa.int32(), "large": pa.int64(), "real": pa.float32(), "wide": pa.float64(),
          "text": pa.string(), "bool": pa.bool_()}
# fmt: on


def _schema(**columns: str) -> pa.Schema:
    """`real?` may be null, `real` may not."""
    types = {name: (_TYPES[kind.rstrip("?")], kind[-1] == "?") for name, kind in columns.items()}
    return pa.schema([pa.field(name, *type_and_null) for name, type_and_null in types.items()])


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
            document="int", target="int", far_part="text", units="text", selector="text",
            control="text", rank="int", far_first="int", far_end="int", far_text="text",
            influence="real",
        ),
        "recovery": _schema(
            document="int", target="int", far_part="text", units="text", selector="text",
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
_INTERVALS = {
    f"{name}{end}": "wide?"
    for name in (
        "recovery", "foreign", "excess", "excess_nats", "placebo", "net", "net_equal", "net_nats",
        "removal", "placebo_removal",
    )
    for end in ("", "_low", "_high")
}
SCHEMAS = MADE_OF_PARTS | {
    "targets": _schema(
        document="int", target="int", far_part="text", target_set="text", end="int"
    ),
    "summary": _schema(
        target_set="text", units="text", selector="text", k="int", num_tokens="wide",
        **{name.replace("recovery_", ""): kind for name, kind in _INTERVALS.items()},
        mean_ratio="wide?", share_enough="wide?",
        lds="wide?", lds_low="wide?",
        lds_high="wide?", gap="wide", num_targets="int", num_documents="int",
        num_placebo_targets="int", num_placebo_documents="int", token_forwards_per_target="wide?",
    ),
}
# fmt: on


def joined(of_documents: Mapping[int, Columns]) -> pd.DataFrame:
    """One frame of the rows of documents, by number."""
    tables = {number: pd.DataFrame(dict(rows)) for number, rows in of_documents.items()}
    return pd.concat(tables, names=["document"]).reset_index("document")


def to_table(name: str, columns: Columns, origin: str) -> pa.Table:
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
            rows = f"is not a finite number in {num_wrong} of {len(array)} rows"
            raise DataError(f"{origin}: {field.name} {rows}; load the model with another dtype")
        arrays.append(array)
    return pa.table(arrays, schema=schema)


def write_table(path: Path, table: pa.Table) -> None:
    pq.write_table(table.combine_chunks(), path, compression="zstd")


def read_table(path: Path, name: str) -> pa.Table:
    """Read a file of a folder with a verified manifest."""
    table = read_parquet(path, "measure again")
    check_columns(path, name, table.schema)
    return table.select(SCHEMAS[name].names)


def check_columns(path: Path, name: str, found: pa.Schema | None = None) -> None:
    found = pq.read_schema(path) if found is None else found
    types = {field.name: field.type for field in found}
    for field in SCHEMAS[name]:
        if types.get(field.name) != field.type:
            rule = f"must be {field.type}, not {types.get(field.name, 'absent')}"
            raise DataError(f"{path}: column {field.name} {rule}; run its command again")


def plain(value: Any) -> Any:
    """Convert to standard JSON values; NaN and infinities become null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def write_json(path: Path, value: Any) -> None:
    indent = None if isinstance(value, list) else 2  # a list of documents may be long: one line
    write_atomically(path, json.dumps(plain(value), ensure_ascii=False, indent=indent) + "\n")
