"""Store a result in study/results: python -m study.pages.keep_results FOUND [NAME] [--no-rows]

FOUND is the folder of a measurement, of a task or theory result or of a training run, or a table
(.csv) or record (.json) of a benchmark; a result of the same NAME is replaced, a record added to.
Of a measurement: summary, mean losses, provenance, and the rows of its targets by `add_one` (else
of all selectors), from which the summary can be computed again. Of a run: its evaluations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from olmo_sparsity.analysis.results.tables import with_current_columns
from olmo_sparsity.analysis.results.target_rows import has_spans, tokens_of_targets
from olmo_sparsity.base.files import write_atomically, writing
from olmo_sparsity.base.locks import locked
from olmo_sparsity.base.renamed import with_current_names
from olmo_sparsity.training.metrics.read import read_metrics
from study.pages import stored
from study.pages.stored import RESULTS, ROWS
from study.theory.results import read_results as read_theory
from study.theory.results import summarise
from study.word_parts import parts_of_targets

GROUP = 32768
"""Rows of a row group, at most."""


def keep(found: Path, name: str, with_rows: bool = True) -> None:
    if found.suffix == ".csv":
        keep_other(name, pd.read_csv(found).replace({np.nan: None}).to_dict("list"))
    elif found.suffix == ".json":
        record, before = json.loads(found.read_text()), stored.others().get(name)
        both = isinstance(record, dict) and isinstance(before, dict)
        keep_other(name, before | record if both else record)
    elif (found / "metrics.jsonl").is_file():
        rows = [row for row in read_metrics(found / "metrics.jsonl") if "heldout" in row]
        keep_lines("evaluations.jsonl", "run", {name: rows})
    elif (found / "accuracy.parquet").is_file():
        keep_rows(RESULTS / "tasks.parquet", "result", {name: read(found / "accuracy.parquet")})
        about = {
            part: json.loads((found / f"{part}.json").read_text()) for part in ("meta", "manifest")
        }
        keep_lines("tasks.jsonl", "result", {name: [about]})
    elif (found / "table.parquet").is_file():
        theory_rows, meta = read_theory(found)
        columns = summarise(theory_rows).replace({np.nan: None}).to_dict("list")
        keep_other(name, {"meta": meta, "table": columns})
    else:
        keep_measurements({name: tables_of(found, with_rows)})


def read(path: Path) -> pa.Table:
    return pq.read_table(path).replace_schema_metadata(None)


def read_current(path: Path) -> pd.DataFrame:
    """Read a table of a measurement, which the last release may have made, under today's names."""
    return with_current_columns(pq.read_table(path)).to_pandas()


def tables_of(found: Path, with_rows: bool) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """The tables of a measurement that are stored of it, and what `meta.jsonl` says of it."""
    tables = {"summary": read_current(found / "summary.parquet").round(4)}
    losses = read_current(found / "losses.parquet")[["loss_short", "loss_long"]]
    for name in ROWS if with_rows else ():
        table = read_current(found / f"{name}.parquet")
        if name == "losses":
            tokens = tokens_of_targets(read_current(found / "targets.parquet"))
            places = tokens[["document", "place"]].rename(columns={"place": "target"})
            table = table.merge(places.drop_duplicates())
        if name == "targets":  # The text is not stored.
            tokens = read_current(found / "tokens.parquet")
            table = table.assign(part=parts_of_targets(table, tokens))
            if not has_spans(table):
                table = table.drop(columns="end", errors="ignore")
        if "selector" in table:
            is_add_one = table.selector.str.startswith("add_one")
            table = table[is_add_one] if is_add_one.any() else table
        if name == "influence":
            table = table[(table.control == "own") & (table["rank"] <= 4)]
        tables[name] = table.reset_index(drop=True)
    mean_losses = losses.agg(["mean", "count"]).round(4).to_dict()
    meta = with_current_names(json.loads((found / "meta.json").read_text()))
    return tables, {"mean_losses": mean_losses, "meta": meta}


def keep_measurements(found: dict[str, tuple[dict[str, pd.DataFrame], dict[str, Any]]]) -> None:
    for table in (*ROWS, "summary"):
        some = {name: tables[table] for name, (tables, _) in found.items() if table in tables}
        as_arrow = {
            name: pa.Table.from_pandas(rows, preserve_index=False) for name, rows in some.items()
        }
        if as_arrow:
            keep_rows(RESULTS / f"{table}.parquet", "measurement", as_arrow)
    lines = {}
    for name, (tables, about) in found.items():
        types = {table: types_to_tell(table, rows) for table, rows in tables.items()}
        lines[name] = [{"columns": {table: told for table, told in types.items() if told}, **about}]
    keep_lines("meta.jsonl", "measurement", lines)
    for name, (tables, _) in found.items():
        for table, rows in tables.items():
            pd.testing.assert_frame_equal(stored.read_table(table, name), rows, check_like=True)


def types_to_tell(table: str, rows: pd.DataFrame) -> dict[str, str]:
    """The types of columns without a value, and of integers that others store as floats."""
    of_all = pq.read_schema(RESULTS / f"{table}.parquet")
    here = pa.Schema.from_pandas(rows, preserve_index=False)
    return {
        str(name): str(rows[name].dtype)
        for name in rows
        if rows[name].isna().all() or here.field(name).type != of_all.field(name).type
    }


def keep_rows(path: Path, column: str, tables: dict[str, pa.Table]) -> None:
    """Add tables to a Parquet file, or replace tables of the same names. Row groups without them
    keep their bytes, so that git stores only what is new."""
    groups = []
    if path.exists():
        before = pq.ParquetFile(path)
        for i in range(before.num_row_groups):
            group = before.read_row_group(i)
            groups.append(group.filter(~pc.field(column).isin(list(tables))))
    names = sorted(name for name, rows in tables.items() if len(rows))
    new = [tables[name].add_column(0, column, pa.repeat(name, len(tables[name]))) for name in names]
    in_order = sorted(new, key=lambda rows: -rows.num_columns)  # the order of most columns
    schema = pa.unify_schemas(
        [rows.schema.remove_metadata() for rows in (*groups, *in_order)],
        promote_options="permissive",
    )
    added = pa.concat_tables([schema.empty_table(), *new], promote_options="permissive")
    groups += [added.slice(start, GROUP) for start in range(0, len(added), GROUP)]
    kinds = {"DELTA_BINARY_PACKED": pa.types.is_integer, "BYTE_STREAM_SPLIT": pa.types.is_floating}
    of_rows = path.stem in ROWS  # numbers of others, which are rounded, recur
    split = {f.name: kind for f in schema for kind, of in kinds.items() if of_rows and of(f.type)}
    small: dict[str, Any] = {"use_dictionary": [name for name in schema.names if name not in split]}
    small |= {"column_encoding": split, "compression": "zstd", "compression_level": 19}
    with (
        writing(path) as partial,
        pq.ParquetWriter(partial, schema, **small) as file,
    ):
        for group in groups:
            rows = pa.concat_tables([schema.empty_table(), group], promote_options="permissive")
            if len(rows):
                file.write_table(rows.cast(schema), row_group_size=len(rows))


def keep_lines(file: str, key: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    """`rows`: the lines of each name; they replace the stored ones."""
    path = RESULTS / file
    lines = stored.read_lines(path)
    lines = [line for line in lines if line[key] not in rows]
    lines += [{key: name, **line} for name, of_name in rows.items() for line in of_name]
    lines.sort(key=lambda line: line[key])
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    stored.forget()


def keep_other(name: str, value: Any) -> None:
    others = stored.others() | {name: value}
    entries = (f"{json.dumps(key)}: {json.dumps(others[key])}" for key in sorted(others))
    write_atomically(RESULTS / "others.json", "{\n" + ",\n".join(entries) + "\n}\n")
    stored.forget()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("found", type=Path)
    parser.add_argument("name", nargs="?", help="what the pages call it (default: as FOUND)")
    parser.add_argument("--no-rows", action="store_true")
    options = parser.parse_args()
    with locked(RESULTS, waits=True):
        found = options.found
        named = found.stem if found.is_file() else found.name
        keep(found, options.name or named, not options.no_rows)
