"""The measured documents of one folder, written by any number of processes.

Place in the flow: rows of a document → **parts** → final tables. Never imports torch.

While documents are measured, `identity.json` says what is being measured, and `parts/losses/` and
`parts/recovery/` hold, for the two things that are asked of a document, folders with the rows of
the documents in their `finished.json`. A part appears by one rename, with a manifest that vouches
for its bytes: whatever moment a process is killed at, parts are whole, and one that was damaged
later is passed over, so that its documents are measured again. When all documents are there, one
process after the other may write the final tables, one Parquet file each, meta.json and last a
manifest of them. Parts stay: final tables can be made from them again, to the same bytes.

The rows of a table are sorted by its columns from left to right. Who measured which document, and
in which order, leaves no trace in the bytes. docs/formats.md explains every column.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from analysis.results import FILES, Meta
from analysis.tables import (
    MADE_OF_PARTS,
    PHASES,
    SCHEMAS,
    Columns,
    plain,
    read_table,
    to_table,
    write_json,
    write_table,
)
from olmo_sparsity.errors import DataError
from olmo_sparsity.files import is_partial, remove_partial, writing
from olmo_sparsity.json_files import read_json
from olmo_sparsity.manifest import MANIFEST, verify_manifest, write_manifest, writing_folder
from olmo_sparsity.nested import differences
from olmo_sparsity.progress import say


@dataclasses.dataclass(frozen=True)
class _Contents:
    """`finished.json` of a part: its documents, and how many rows it has of each table."""

    documents: list[int]
    rows: dict[str, int]
    identity: str
    """SHA-256 of the measurement's identity: a part of another one may have been copied here."""


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
            remove_partial(self.folder / "parts" / phase)
        remove_partial(self.folder)
        path = self.folder / "identity.json"
        if not path.exists():
            if any(self.folder.glob("*.parquet")) or any((self.folder / "parts").glob("*/*")):
                raise DataError(f"{path} is missing beside results; use another folder")
            write_json(path, identity)
        _refuse_other_identity(identity, path)  # another process may have written it just now
        said = json.dumps(plain(identity), sort_keys=True)
        self._identity = hashlib.sha256(said.encode()).hexdigest()
        self._buffer: dict[str, dict[int, dict[str, pa.Table]]] = {phase: {} for phase in PHASES}
        self._known: dict[str, dict[Path, _Contents | None]] = {phase: {} for phase in PHASES}
        """Of each part what is in it; None: it is damaged. Only `finished` looks for new ones, so
        that tables read after it are of the same parts."""

        for phase in PHASES:
            self.finished(phase)
        self._began = self._flushed = time.monotonic()

    def finished(self, phase: str) -> set[int]:
        """Documents that need not be measured again, those still in the buffer included."""
        known = self._known[phase]
        for part in sorted((self.folder / "parts" / phase).iterdir()):
            if part not in known and not is_partial(part):
                known[part] = self._prove(part)
        whole = (contents.documents for contents in known.values() if contents is not None)
        return set(self._buffer[phase]).union(*whole)

    def _prove(self, part: Path) -> _Contents | None:
        """A part never changes: once proven whole, it stays so for this process."""
        problem, found = verify_manifest(part, ["finished.json"]), None
        if problem is None:
            try:
                found = read_json(part / "finished.json", _Contents, "")
                problem = verify_manifest(part, [f"{name}.parquet" for name in found.rows])
            except DataError as error:
                problem = str(error).rstrip("; ")
        if found is not None and problem is None and found.identity != self._identity:
            problem = "it is of another measurement"
        if problem is None:
            return found
        say(f"{part} is passed over ({problem}); its documents are measured again")
        return None

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
            rows = {name: table.num_rows for name, table in whole.items()}
            contents = _Contents(sorted(buffer), rows, self._identity)
            name = f"{min(buffer):06d}-{uuid.uuid4().hex[:8]}"
            part = self.folder / "parts" / phase / name
            with writing_folder(part) as partial:
                for name, table in whole.items():
                    write_table(partial / f"{name}.parquet", table)
                write_json(partial / "finished.json", dataclasses.asdict(contents))
            self._known[phase][part] = contents
            buffer.clear()
        self._flushed = time.monotonic()

    def read(self, name: str) -> pd.DataFrame:
        """A table of everything that is finished and flushed."""
        return self._collect(name).to_pandas()

    def _collect(self, name: str) -> pa.Table:
        """Two processes may have measured one document: the rows of one are taken."""
        phase = next(phase for phase, tables in PHASES.items() if name in tables)
        tables, seen = [SCHEMAS[name].empty_table()], set[int]()
        for part, contents in sorted(self._known[phase].items()):
            if contents is None:
                continue
            if name in contents.rows:
                table = read_table(part / f"{name}.parquet", name)
                again = np.isin(table["document"].to_numpy(), list(seen))
                tables.append(table.filter(pa.array(~again)))
            seen.update(contents.documents)
        table = pa.concat_tables(tables)
        # Within a document the rows are sorted already.
        order = np.argsort(table["document"].to_numpy(), kind="stable")
        return table.take(order).combine_chunks()

    def finish(self, made: Mapping[str, pd.DataFrame], meta: Meta, out: Path | None = None) -> None:
        """The final tables in `out` (None: in the folder itself): those that parts hold, and those
        `made` from them. By one process at a time; the manifest comes last, and until then nothing
        reads them."""
        out = self.folder if out is None else out
        (out / MANIFEST).unlink(missing_ok=True)
        for name, schema in SCHEMAS.items():
            if name in MADE_OF_PARTS:
                table = self._collect(name)
            else:
                rows = made.get(name, pd.DataFrame(columns=schema.names))
                columns: Columns = {column: rows[column].tolist() for column in schema.names}
                table = to_table(name, columns, f"table {name}")
            with writing(out / f"{name}.parquet") as partial:
                write_table(partial, table)
        meta.identity = read_json(self.folder / "identity.json", dict, "measure again")
        write_json(out / "meta.json", dataclasses.asdict(meta))
        write_manifest(out, FILES)


def _document_table(name: str, document: int, columns: Columns) -> pa.Table:
    num_rows = len(next(iter(dict(columns).values()), []))
    given = {"document": np.full(num_rows, document)} | dict(columns)
    table = to_table(name, given, f"document {document}, table {name}")
    return table.sort_by([(column, "ascending") for column in table.schema.names])


def _refuse_other_identity(identity: dict, path: Path) -> None:
    changed = differences(
        read_json(path, dict, "restore it, or measure into another folder"), plain(identity)
    )
    if changed:
        raise DataError(
            f"{path} is of a measurement with {', '.join(changed)}; results of two measurements "
            "need two folders"
        )
