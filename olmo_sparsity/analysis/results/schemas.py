"""Declare the tables of a measurement: their columns and types.

A measurement runs in two phases over the documents, and each phase fills some of the tables
document by document (`PHASES`); the tables `targets` and `summary` are computed from those at the
end:

    phase "losses"      documents, losses
    phase "recovery"    tokens, influence, recovery, lds, costs
    at the end          targets, summary

docs/measure.md explains the columns; columns.py declares those of `summary`, and tables.py reads
and writes the files. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pyarrow as pa

from olmo_sparsity.analysis.results.columns import (
    BOOL,
    FLOAT32,
    INT32,
    INT64,
    TEXT,
    ColumnType,
    types_of_columns,
)

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
"""All tables. Each is one Parquet file of a finished measurement."""
