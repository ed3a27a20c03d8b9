"""What a measurement found, as tables: written document by document, merged, read back.

Place in the flow: after recovery and dependencies, before figures and report. Never imports torch.

A folder of results is written in two stages. While documents are measured, `identity.json` says
what is being measured and `parts/000000/`, `parts/000005/`, … each hold the rows of the documents
listed in their `finished.json`, and are named after the first of them: processes that share the
documents can share the folder. Every part appears by one rename, so a process killed at any moment
leaves whole parts, and at worst a `.tmp` folder that `consolidate` removes. `consolidate` turns
parts into one Parquet file per table beside `finished.json` and `meta.json`. A document found in
both stages is taken from its part, so `consolidate` may be killed and repeated too.

The rows of a table are sorted by its columns from left to right. Who measured which document, and
in which order, leaves no trace in the bytes. docs/formats.md explains every column.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from olmo_sparsity.errors import DataError
from olmo_sparsity.files import publish, write_atomically, writing

Columns = Mapping[str, np.ndarray | list]

# fmt: off
_TYPES = {"int": pa.int32(), "large": pa.int64(), "real": pa.float32(), "wide": pa.float64(),
          "text": pa.string()}
# fmt: on


def _schema(**columns: str) -> pa.Schema:
    """`real?` may be null, `real` may not."""
    types = {name: (_TYPES[kind.rstrip("?")], kind[-1] == "?") for name, kind in columns.items()}
    return pa.schema([pa.field(name, *type_and_null) for name, type_and_null in types.items()])


# fmt: off
ROWS_BY_DOCUMENT = {
    "tokens": _schema(document="int", place="int", token_id="int", text="text"),
    "planted": _schema(document="int", place="int"),
    "losses": _schema(
        document="int", target="int", token_id="int", loss_long="real", loss_short="real",
        half="text",
    ),
    "influence": _schema(
        document="int", target="int", selector="text", control="text", rank="int",
        far_position="int", far_token_id="int", influence="real",
    ),
    "recovery": _schema(
        document="int", target="int", target_set="text", selector="text", control="text",
        draw="int", k="int", loss_set="real", kl_set="real?", kl_short="real?",
    ),
    "costs": _schema(document="int", selector="text", token_forwards="large", num_targets="int"),
}
ROWS_OF_SUMMARY = {
    "summary": _schema(
        target_set="text", selector="text", control="text", k="int", recovery="wide?", low="wide?",
        high="wide?", excess="wide?", excess_low="wide?", excess_high="wide?",
        excess_nats="wide?", excess_nats_low="wide?", excess_nats_high="wide?", kl_removed="wide?",
        hit_rate="wide?", hit_low="wide?", hit_high="wide?", gap="wide", num_targets="int",
        num_documents="int", token_forwards_per_target="wide?",
    ),
    "dependencies": _schema(
        target_set="text", selector="text", kind="text", share="wide?", base_share="wide?",
        enrichment="wide?", low="wide?", high="wide?", excess_recovery="wide?",
        excess_low="wide?", excess_high="wide?", num_targets="int",
    ),
}
# fmt: on
SCHEMAS = ROWS_BY_DOCUMENT | ROWS_OF_SUMMARY


@dataclass
class Results:
    """One finished measurement. Columns of the tables: `SCHEMAS` and docs/formats.md."""

    tokens: pd.DataFrame
    planted: pd.DataFrame
    losses: pd.DataFrame
    influence: pd.DataFrame
    recovery: pd.DataFrame
    costs: pd.DataFrame
    summary: pd.DataFrame
    dependencies: pd.DataFrame
    meta: dict[str, Any]


def main_set(target_sets: Iterable[str]) -> str | None:
    """The target set that a measurement is about; the others are controls."""
    return next((name for name in ("gap", "planted") if name in set(target_sets)), None)


class ResultWriter:
    """One process's measured documents, kept safe every `flush_every_s` seconds, or as soon as
    `part_size` of them wait.

    `identity` is all that makes two measurements comparable (model, data, windows, seed, …). A
    folder begun with another identity is refused.
    """

    def __init__(
        self, folder: Path, identity: dict, *, flush_every_s: float = 10, part_size: int = 64
    ) -> None:
        self.folder = Path(folder)
        self.flush_every_s, self.part_size = flush_every_s, part_size
        parts = self.folder / "parts"
        parts.mkdir(parents=True, exist_ok=True)
        identity_path = self.folder / "identity.json"
        if identity_path.exists():
            _refuse_other_identity(
                identity, "this measurement", _read_json(identity_path), str(identity_path)
            )
        else:
            if any(self.folder.glob("*.parquet")) or any(parts.iterdir()):
                raise DataError(f"{identity_path} is missing beside results; use another folder")
            _write_json(identity_path, identity)
        self._finished = set(_documents_of(self.folder))
        self._buffer: dict[int, dict[str, pa.Table]] = {}
        self._flushed_at = time.monotonic()

    def finished(self) -> set[int]:
        """Documents that need not be measured again, those still in the buffer included."""
        return self._finished | self._buffer.keys()

    def write(self, document: int, tables: Mapping[str, Columns]) -> None:
        """All rows of one document, without their `document` column. {} marks a document as
        finished that has none (shorter than the window, say)."""
        assert document not in self.finished(), f"document {document} is written twice"
        assert tables.keys() <= ROWS_BY_DOCUMENT.keys(), f"no such table among {list(tables)}"
        self._buffer[document] = {
            name: _document_table(name, document, columns)
            for name, columns in tables.items()
            if columns
        }
        late = time.monotonic() - self._flushed_at >= self.flush_every_s
        if late or len(self._buffer) >= self.part_size:
            self.flush()

    def flush(self) -> None:
        if self._buffer:
            held = list(self._buffer.values())
            tables = {
                name: pa.concat_tables([t[name] for t in held if name in t])
                for name in ROWS_BY_DOCUMENT
                if any(name in t for t in held)
            }
            _write_part(self.folder / "parts", tables, sorted(self._buffer))
            self._finished |= self._buffer.keys()
            self._buffer = {}
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        self.flush()


def consolidate(folder: Path, summary: dict[str, pd.DataFrame | dict], meta: dict) -> None:
    """Parts become one file per table; `summary` holds the tables `summary` and `dependencies`."""
    folder = Path(folder)
    assert summary.keys() <= ROWS_OF_SUMMARY.keys(), f"no such table among {list(summary)}"
    identity = _read_identity(folder)
    documents = _documents_of(folder)
    for name in ROWS_BY_DOCUMENT:
        _write_table(folder / f"{name}.parquet", _collect(folder, name))
    for name, schema in ROWS_OF_SUMMARY.items():
        rows = summary.get(name, {column: [] for column in schema.names})
        columns: Columns = {column: list(rows[column]) for column in schema.names}
        _write_table(folder / f"{name}.parquet", _to_table(name, columns, f"table {name}"))
    _write_json(folder / "finished.json", documents)
    _write_json(folder / "meta.json", meta | {"identity": identity})
    for part in _part_folders(folder):
        doomed = part.with_suffix(".tmp")  # from here on nobody reads it, however we are killed
        shutil.rmtree(doomed, ignore_errors=True)
        part.rename(doomed)
    for doomed in (folder / "parts").glob("*.tmp"):
        shutil.rmtree(doomed)


def finished_documents(folder: Path) -> set[int]:
    """Of all processes that measure into this folder."""
    return set(_documents_of(folder))


def read_parts(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables by document of everything finished so far, consolidated or not."""
    _read_identity(Path(folder))
    return {name: _collect(Path(folder), name).to_pandas() for name in ROWS_BY_DOCUMENT}


def read_results(folder: str | Path) -> Results:
    folder = Path(folder)
    remedy = "run the same `olmo-sparsity measure` command again to finish it"
    if not (folder / "meta.json").exists():
        _read_identity(folder)
        raise DataError(f"{folder}: the measurement has no meta.json yet; {remedy}")
    if _part_folders(folder):
        raise DataError(f"{folder}: has documents that its summary does not count; {remedy}")
    if (folder / "summary.csv").exists() and not (folder / "losses.parquet").exists():
        raise DataError(
            f"{folder} is the summary of a measurement, kept to be read; it has no rows"
        )
    tables = {name: _read_table(folder / f"{name}.parquet", name).to_pandas() for name in SCHEMAS}
    return Results(**tables, meta=_read_object(folder / "meta.json"))


def merge(folders: list[Path], out: Path) -> None:
    """Several shards of one measurement become one folder of parts, ready to be summarised."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists; merge into a new folder, or remove it")
    if not folders:
        raise DataError("no folders to merge; name the folder of each shard")
    identity = _read_identity(Path(folders[0]))
    held_by: dict[int, Path] = {}
    for folder in map(Path, folders):
        _refuse_other_identity(identity, str(folders[0]), _read_identity(folder), str(folder))
        for document in _documents_of(folder):
            if document in held_by:
                raise DataError(
                    f"document {document} is in {held_by[document]} and in {folder}; "
                    "leave one of them out"
                )
            held_by[document] = folder
    partial = out.with_name(out.name + ".tmp")
    if partial.exists():
        shutil.rmtree(partial)
    (partial / "parts").mkdir(parents=True)
    _write_json(partial / "identity.json", identity)
    for folder in map(Path, folders):
        tables = {name: _collect(folder, name) for name in ROWS_BY_DOCUMENT}
        if documents := _documents_of(folder):
            _write_part(partial / "parts", tables, documents)
    if out.exists():
        out.rmdir()
    publish(partial, out)


def _document_table(name: str, document: int, columns: Columns) -> pa.Table:
    num_rows = len(next(iter(columns.values()), []))
    given = {"document": np.full(num_rows, document), **columns}
    return _sort(_to_table(name, given, f"document {document}, table {name}"))


def _to_table(name: str, columns: Columns, origin: str) -> pa.Table:
    schema = SCHEMAS[name]
    assert columns.keys() == set(schema.names), f"{origin}: {set(schema.names) ^ columns.keys()}"
    lengths = {column: len(values) for column, values in columns.items()}
    assert len(set(lengths.values())) == 1, f"{origin}: columns of different lengths: {lengths}"
    arrays = []
    for field in schema:
        # from_pandas: NaN, the only way a NumPy array has to say it, means null.
        array = pa.array(columns[field.name], type=field.type, from_pandas=True)
        num_wrong = 0 if field.nullable else array.null_count
        if not field.nullable and pa.types.is_floating(field.type):
            num_wrong = int((~np.isfinite(array.to_numpy(zero_copy_only=False))).sum())
        if num_wrong:
            raise DataError(
                f"{origin}: {field.name} is no finite number in {num_wrong} of {len(array)} "
                "rows; a model whose loss overflows needs another --dtype"
            )
        arrays.append(array)
    return pa.table(arrays, schema=schema)


def _sort(table: pa.Table) -> pa.Table:
    return table.sort_by([(name, "ascending") for name in table.schema.names])


def _collect(folder: Path, name: str) -> pa.Table:
    """The sorted rows of one table, parts and consolidated file together."""
    tables = [SCHEMAS[name].empty_table()]
    if (folder / "finished.json").exists():
        old = _read_table(folder / f"{name}.parquet", name)
        again = np.isin(old["document"].to_numpy(), _documents_in_parts(folder))
        tables.append(old.filter(pa.array(~again)))
    for part in _part_folders(folder):
        if (part / f"{name}.parquet").exists():
            tables.append(_read_table(part / f"{name}.parquet", name))
    table = pa.concat_tables(tables)
    # Within a document the rows are sorted already.
    order = np.argsort(table["document"].to_numpy(), kind="stable")
    return table.take(order).combine_chunks()


def _part_folders(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "parts").glob("*") if path.suffix != ".tmp")


def _documents_in_parts(folder: Path) -> list[int]:
    held_by: dict[int, Path] = {}
    for part in _part_folders(folder):
        for document in _read_documents(part / "finished.json"):
            if document in held_by:
                raise DataError(
                    f"document {document} is in {held_by[document]} and in {part}: two processes "
                    "wrote to one folder; remove one of the two parts, and give each shard its own"
                )
            held_by[document] = part
    return sorted(held_by)


def _documents_of(folder: Path) -> list[int]:
    documents = set(_documents_in_parts(folder))
    if (folder / "finished.json").exists():
        documents |= set(_read_documents(folder / "finished.json"))
    return sorted(documents)


def _read_documents(path: Path) -> list[int]:
    documents = _read_json(path)
    if not isinstance(documents, list) or not all(isinstance(d, int) for d in documents):
        raise DataError(f"{path}: must be a list of document numbers; measure again")
    return documents


def _write_part(parts: Path, tables: dict[str, pa.Table], documents: list[int]) -> None:
    # Two processes that measured the same document: the second rename fails, loudly.
    final = parts / f"{min(documents):06d}"
    partial = final.with_suffix(".tmp")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    for name, table in tables.items():
        _write_table(partial / f"{name}.parquet", table)
    _write_json(partial / "finished.json", documents)
    publish(partial, final)


def _write_table(path: Path, table: pa.Table) -> None:
    with writing(path) as partial:
        pq.write_table(
            table.combine_chunks(), partial, compression="zstd", write_page_checksum=True
        )


def _read_table(path: Path, name: str) -> pa.Table:
    if not path.exists():
        raise DataError(f"{path} is missing; measure again, or copy the folder whole")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: not a readable Parquet file ({reason}); measure again") from None
    found = {field.name: field.type for field in table.schema}
    for field in SCHEMAS[name]:
        if found.get(field.name) != field.type:
            raise DataError(
                f"{path}: column {field.name} must be {field.type}, not "
                f"{found.get(field.name, 'absent')}; if an older version wrote it, the command of "
                "its measurement writes it anew from what is measured (schema: docs/formats.md)"
            )
    return table.select(SCHEMAS[name].names)


def _read_identity(folder: Path) -> dict:
    path = folder / "identity.json"
    if not path.exists():
        raise DataError(f"{folder} holds no results ({path.name} is missing)")
    return _read_object(path)


def _refuse_other_identity(ours: dict, our_name: str, theirs: Any, their_name: str) -> None:
    left, right = dict(_leaves(_plain(ours))), dict(_leaves(theirs))
    for field in [*left, *(field for field in right if field not in left)]:
        ours_here, theirs_here = left.get(field, "nothing"), right.get(field, "nothing")
        if ours_here != theirs_here:
            raise DataError(
                f"{field} differs: {ours_here} in {our_name}, {theirs_here} in {their_name}; "
                "results of two measurements need two folders"
            )


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, dict) and node:
        for key in node:
            yield from _leaves(node[key], f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix or "identity", json.dumps(node, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Only what every JSON reader knows: a number that is none (NaN) becomes null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _write_json(path: Path, value: Any) -> None:
    indent = None if isinstance(value, list) else 2  # a list of documents may be long: one line
    text = json.dumps(_plain(value), ensure_ascii=False, indent=indent)
    write_atomically(path, text + "\n")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable JSON ({error}); measure again") from None


def _read_object(path: Path) -> dict:
    value = _read_json(path)
    if not isinstance(value, dict):
        raise DataError(f"{path}: must hold one JSON object; measure again")
    return value
