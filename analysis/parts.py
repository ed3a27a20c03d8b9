"""The measured documents of one folder, written by any number of processes.

Place in the flow: rows of a document → **parts** → final tables. Never imports torch.

While documents are measured, `identity.json` says what is being measured, and `parts/losses/` and
`parts/recovery/` hold, for the two things that are asked of a document, folders with the rows of
the documents in their `finished.json`. A part appears by one rename, so a process killed at any
moment leaves parts that are complete. When all documents are there, any process writes the final
tables, one Parquet file each, and last meta.json. Parts stay: final tables can be made from them
again, to the same bytes.

The rows of a table are sorted by its columns from left to right. Who measured which document, and
in which order, leaves no trace in the bytes. docs/formats.md explains every column.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
import uuid
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from analysis.results import Meta
from analysis.tables import (
    MADE_OF_PARTS,
    PHASES,
    SCHEMAS,
    Columns,
    plain,
    read_object,
    read_table,
    to_table,
    write_json,
    write_table,
)
from olmo_sparsity.errors import DataError
from olmo_sparsity.files import publish
from olmo_sparsity.nested import differences


class Parts:
    """The measured documents of one folder, of all processes that write to it.

    `identity` is all that makes two measurements comparable (model, data, windows, seed, …). A
    folder begun with another identity is refused. What this process writes is kept safe every
    `flush_every_s` seconds (more, when the measurement has gone on for long), or as soon as
    `part_size` documents wait.
    """

    def __init__(
        self, folder: Path, identity: dict, *, flush_every_s: float = 10, part_size: int = 64
    ) -> None:
        self.folder = Path(folder)
        self.flush_every_s, self.part_size = flush_every_s, part_size
        for phase in PHASES:
            (self.folder / "parts" / phase).mkdir(parents=True, exist_ok=True)
        path = self.folder / "identity.json"
        if not path.exists():
            if any(self.folder.glob("*.parquet")) or any((self.folder / "parts").glob("*/*")):
                raise DataError(f"{path} is missing beside results; use another folder")
            write_json(path, identity)
        _refuse_other_identity(identity, path)  # another process may have written it just now
        self._buffer: dict[str, dict[int, dict[str, pa.Table]]] = {phase: {} for phase in PHASES}
        self._began = self._flushed = time.monotonic()

    def finished(self, phase: str) -> set[int]:
        """Documents that need not be measured again, those still in the buffer included."""
        found = set(self._buffer[phase])
        for part in _part_folders(self.folder, phase):
            found.update(_read_contents(part)[0])
        return found

    def write(self, phase: str, document: int, tables: Mapping[str, Columns]) -> None:
        """All rows of one document, without their `document` column."""
        schemas = PHASES[phase]
        assert tables.keys() <= schemas.keys(), f"no such table among {list(tables)}"
        self._buffer[phase][document] = {
            name: _document_table(name, document, columns)
            for name, columns in tables.items()
            if len(columns)
        }
        now = time.monotonic()
        pause = min(max(self.flush_every_s, (now - self._began) / 20), 30)  # others wait for it
        if now - self._flushed >= pause or len(self._buffer[phase]) >= self.part_size:
            self.flush()

    def flush(self) -> None:
        for phase, buffer in self._buffer.items():
            if not buffer:
                continue
            tables = {
                name: [t[name] for t in buffer.values() if name in t] for name in PHASES[phase]
            }
            whole = {name: pa.concat_tables(some) for name, some in tables.items() if some}
            _write_part(self.folder / "parts" / phase, whole, sorted(buffer))
            buffer.clear()
        self._flushed = time.monotonic()

    def read(self, name: str) -> pd.DataFrame:
        """A table of everything that is finished and flushed."""
        return collect(self.folder, name).to_pandas()


def collect(folder: Path, name: str) -> pa.Table:
    """The sorted rows of one table in all parts. Two processes may have measured one document, with
    equal rows: those of one are taken."""
    phase = next(phase for phase, tables in PHASES.items() if name in tables)
    tables, seen = [SCHEMAS[name].empty_table()], set[int]()
    for part in _part_folders(folder, phase):
        documents, num_rows = _read_contents(part)
        if name in num_rows:
            table = read_table(part / f"{name}.parquet", name)
            document = table["document"].to_numpy()
            if len(document) != num_rows[name] or not np.isin(document, documents).all():
                raise DataError(
                    f"{part}: {name}.parquet holds other rows than were written; {_REMEDY}"
                )
            tables.append(table.filter(pa.array(~np.isin(document, list(seen)))))
        seen.update(documents)
    table = pa.concat_tables(tables)
    # Within a document the rows are sorted already.
    order = np.argsort(table["document"].to_numpy(), kind="stable")
    return table.take(order).combine_chunks()


def finish(
    folder: Path, made: Mapping[str, pd.DataFrame], meta: Meta, out: Path | None = None
) -> None:
    """The final tables in `out` (None: in `folder`): those that the parts of `folder` hold, and
    those `made` from them."""
    out = folder if out is None else out
    out.mkdir(exist_ok=True)
    for name in MADE_OF_PARTS:
        write_table(out / f"{name}.parquet", collect(folder, name))
    for name, schema in SCHEMAS.items():
        if name not in MADE_OF_PARTS:
            table = made.get(name, pd.DataFrame(columns=schema.names))
            columns: Columns = {column: table[column].tolist() for column in schema.names}
            write_table(out / f"{name}.parquet", to_table(name, columns, f"table {name}"))
    meta.identity = read_object(folder / "identity.json")
    write_json(out / "meta.json", dataclasses.asdict(meta))


# --- files ----------------------------------------------------------------------------------------


def _document_table(name: str, document: int, columns: Columns) -> pa.Table:
    num_rows = len(next(iter(dict(columns).values()), []))
    given = {"document": np.full(num_rows, document)} | dict(columns)
    table = to_table(name, given, f"document {document}, table {name}")
    return table.sort_by([(column, "ascending") for column in table.schema.names])


def _part_folders(folder: Path, phase: str) -> list[Path]:
    parts = (folder / "parts" / phase).glob("*")
    return sorted(path for path in parts if path.suffix != ".tmp")


_REMEDY = "remove this folder, and the same command measures its documents again"


@cache
def _read_contents(part: Path) -> tuple[list[int], dict[str, int]]:
    """The documents of a part, and how many rows it has of each table. A part never changes."""
    found = read_object(part / "finished.json")
    documents, rows = found.get("documents"), found.get("rows")
    if not (
        isinstance(documents, list)
        and isinstance(rows, dict)
        and all(isinstance(number, int) for number in [*documents, *rows.values()])
    ):
        raise DataError(f"{part / 'finished.json'}: must list documents and rows; {_REMEDY}")
    return documents, rows


def _write_part(parts: Path, tables: dict[str, pa.Table], documents: list[int]) -> None:
    final = parts / f"{min(documents):06d}-{uuid.uuid4().hex[:8]}"
    partial = final.with_suffix(".tmp")
    partial.mkdir()
    try:
        for name, table in tables.items():
            write_table(partial / f"{name}.parquet", table)
        rows = {name: table.num_rows for name, table in tables.items()}
        write_json(partial / "finished.json", {"documents": documents, "rows": rows})
        publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_other_identity(identity: dict, path: Path) -> None:
    changed = differences(read_object(path), plain(identity))
    if changed:
        raise DataError(
            f"{path} is of a measurement with {', '.join(changed)}; results of two measurements "
            "need two folders"
        )
