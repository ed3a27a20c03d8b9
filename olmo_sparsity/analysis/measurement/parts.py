"""Store the rows of measured documents in one folder, to which any number of processes write.

    identity.json                      what all processes must share: model, text, settings
    parts/losses/000000-1f2e3d4c/      a part: the rows of some documents, a file for each table
    parts/recovery/000001-…/           the same of the second phase
    parts/unfinished/000001/…          rows of a document of which some texts are evaluated
    losses.parquet, …, manifest.json   the final tables, of all parts

A part is a folder that appears by one rename, so it is whole or not there. The documents of a
damaged part are measured again. Rows are sorted, so the final tables do not depend on which process
measured a document, or in which order (docs/measure.md). A document that takes long is stored in
pieces until it is finished, so that a stop loses seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.results import FILES
from olmo_sparsity.analysis.results.tables import (
    MADE_OF_PARTS,
    PHASES,
    SCHEMAS,
    Columns,
    check_columns,
    read_table,
    to_json_value,
    to_table,
    write_as_json,
    write_table,
)
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import is_partial, read_json, writing
from olmo_sparsity.base.launch import forget_deaths
from olmo_sparsity.base.manifest import MANIFEST, find_damage, write_manifest, writing_folder
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.provenance import versions_of_numbers
from olmo_sparsity.base.renamed import with_current_names
from olmo_sparsity.base.work_folder import WorkFolder


def results_folder(out: str | Path) -> WorkFolder:
    """Return the folder of a measurement. Its file identity.json tells it from other folders."""
    return WorkFolder(Path(out), "out", "identity.json")


UNFINISHED = "unfinished"
"""The folder for documents of which some texts are evaluated; it lies beside those of the
phases."""


@dataclasses.dataclass(frozen=True)
class _Contents:
    """The content of `finished.json`, which says what a part holds."""

    documents: list[int]
    rows: dict[str, int]
    """The number of rows of each table."""

    identity: str
    """SHA-256 of identity.json, or of what identifies an unfinished document."""

    texts: list[str] = dataclasses.field(default_factory=list)
    """For a piece of an unfinished document: the names of the texts whose rows it holds."""


def _write_part(part: Path, tables: Mapping[str, pa.Table], contents: _Contents) -> None:
    """Write a part as a folder that is whole or not there."""
    with writing_folder(part) as partial:
        for name, table in tables.items():
            write_table(partial / f"{name}.parquet", table)
        write_as_json(partial / "finished.json", dataclasses.asdict(contents))
    forget_deaths()


def _verify_part(part: Path, identity: str, consequence: str) -> _Contents | None:
    """Return the contents of a part, or None if it is damaged or of another measurement. Then print
    the reason, and the `consequence`."""
    try:
        return _read_contents(part, identity)
    except DataError as error:
        problem = str(error).rstrip("; ")
        say(f"{part} is passed over ({problem}); {consequence}")
        return None


def _read_contents(part: Path, identity: str) -> _Contents:
    """Return the contents of a part; DataError if it is damaged or of another measurement."""
    _check_files(part, ["finished.json"])
    contents = read_json(part / "finished.json", _Contents, "")
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


class UnfinishedDocument:
    """Stores the rows of a document of which some texts are evaluated and others are not yet.

    Rows are stored every `store_every_s` seconds, in pieces that hold whole texts, and the next
    start evaluates only the other texts. `Parts` removes the pieces with the finished document.

        unfinished = parts.unfinished(3, targets)
        if name not in unfinished.texts:
            rows = evaluate(name)
            unfinished.store([name], rows)
        tables = unfinished.joined(rows_not_stored)
    """

    def __init__(self, folder: Path, number: int, identity: str, store_every_s: float) -> None:
        self._folder = folder
        self._number = number
        self._identity = identity
        self._store_every_s = store_every_s
        self._stored_at = time.monotonic()
        self._pieces: dict[Path, _Contents] = {}
        self.texts: set[str] = set()
        """Names of the texts whose rows are stored."""

        pieces = sorted(folder.iterdir()) if folder.is_dir() else []
        for piece in pieces:
            if is_partial(piece):
                continue
            contents = _verify_part(piece, identity, "its targets are evaluated again")
            # Another process may have evaluated the same texts at the same time.
            if contents is not None and self.texts.isdisjoint(contents.texts):
                self._pieces[piece] = contents
                self.texts.update(contents.texts)

    @property
    def is_due(self) -> bool:
        """Return whether rows were last stored so long ago that they should be stored now."""
        return time.monotonic() - self._stored_at >= self._store_every_s

    def store(self, texts: Sequence[str], tables: Mapping[str, pd.DataFrame]) -> None:
        """Store the rows of these texts, which must be all that they have."""
        filled = {
            name: _document_table(name, self._number, dict(rows))
            for name, rows in tables.items()
            if len(rows)
        }
        num_rows = {name: table.num_rows for name, table in filled.items()}
        contents = _Contents([self._number], num_rows, self._identity, list(texts))
        self._folder.mkdir(parents=True, exist_ok=True)
        piece = self._folder / uuid.uuid4().hex[:8]
        _write_part(piece, filled, contents)
        self._pieces[piece] = contents
        self.texts.update(texts)
        self._stored_at = time.monotonic()

    def joined(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
        """Return tables of the stored rows, followed by those of `tables`."""
        joined = {}
        for name, rows in tables.items():
            parts = [
                read_table(piece / f"{name}.parquet", name).to_pandas().drop(columns="document")
                for piece, contents in self._pieces.items()
                if name in contents.rows
            ]
            if len(rows) or not parts:
                parts.append(rows)
            joined[name] = pd.concat(parts, ignore_index=True)
        return joined


class Parts:
    """Reads and writes the measured documents of one folder, which several processes may share.

        parts = Parts(folder, plan.identity())
        parts.write("losses", 7, tables)      # buffered; written every few seconds
        parts.flush()
        parts.finished("losses")              # the documents of all processes
        parts.read("losses")                  # one table with their rows

    `identity`: what processes must share; a folder with another identity is rejected. Buffered
    documents are written every `flush_every_s` seconds (less often in a long measurement), or as
    soon as there are `part_size` of them.
    """

    def __init__(
        self, folder: Path, identity: dict, *, flush_every_s: float = 10, part_size: int = 64
    ) -> None:
        self.folder = Path(folder)
        self.flush_every_s = flush_every_s
        self.part_size = part_size
        work = results_folder(folder)
        work.create(*(f"parts/{name}" for name in (*PHASES, UNFINISHED)))
        self._identity = work.identify(
            to_json_value(identity), complete=with_current_names, versions=versions_of_numbers()
        )
        self._buffer: dict[str, dict[int, dict[str, pa.Table]]] = {phase: {} for phase in PHASES}
        self._known: dict[str, dict[Path, _Contents | None]] = {phase: {} for phase in PHASES}
        """Contents of each part by its phase and folder; None for a damaged part. Only `finished`
        looks for new parts, so that all tables read after one call hold the same documents."""

        for phase in PHASES:
            self.finished(phase)
        self._began = time.monotonic()
        self._flushed = self._began

    def finished(self, phase: str) -> set[int]:
        """Return the documents that need not be measured again, including those in the buffer."""
        # A part never changes, so each is read once.
        known = self._known[phase]
        for part in sorted((self.folder / "parts" / phase).iterdir()):
            if part not in known and not is_partial(part):
                known[part] = _verify_part(part, self._identity, "its documents are measured again")
        intact = (contents.documents for contents in known.values() if contents is not None)
        return set(self._buffer[phase]).union(*intact)

    def write(self, phase: str, document: int, tables: Mapping[str, Columns]) -> None:
        """Add all rows of one document. `tables` have no column `document`; it is added."""
        assert tables.keys() <= PHASES[phase].keys(), f"no such table among {list(tables)}"
        self._buffer[phase][document] = {
            name: _document_table(name, document, columns)
            for name, columns in tables.items()
            if len(columns)
        }
        now = time.monotonic()
        # A long measurement writes fewer and larger parts. But other processes wait for them, and
        # their patience ends (`PATIENCE_S` of measurement.py), so at least every 30 seconds.
        pause = min(max(self.flush_every_s, (now - self._began) / 20), 30)
        if now - self._flushed >= pause or len(self._buffer[phase]) >= self.part_size:
            self.flush()

    def flush(self) -> None:
        """Write the buffered documents, as one part of each phase."""
        for phase, buffer in self._buffer.items():
            if not buffer:
                continue
            joined = {}
            for name in PHASES[phase]:
                tables = [written[name] for written in buffer.values() if name in written]
                if tables:
                    joined[name] = pa.concat_tables(tables)
            rows = {name: table.num_rows for name, table in joined.items()}
            contents = _Contents(sorted(buffer), rows, self._identity)
            name = f"{min(buffer):06d}-{uuid.uuid4().hex[:8]}"
            part = self.folder / "parts" / phase / name
            _write_part(part, joined, contents)
            self._known[phase][part] = contents
            if phase == "recovery":
                for document in buffer:
                    shutil.rmtree(self._unfinished_folder(document), ignore_errors=True)
            buffer.clear()
        self._flushed = time.monotonic()

    def unfinished(self, document: int, targets: Mapping[str, np.ndarray]) -> UnfinishedDocument:
        """Return the stored rows of a document of which some targets are evaluated. `targets`: kind
        of distant context → all targets of the document. Rows that were stored for other targets
        are not used."""
        digest = hashlib.sha256(self._identity.encode())
        for distant_part, spans in sorted(targets.items()):
            digest.update(f"{distant_part} {np.asarray(spans).tolist()}".encode())
        folder = self._unfinished_folder(document)
        return UnfinishedDocument(folder, document, digest.hexdigest(), self.flush_every_s)

    def _unfinished_folder(self, document: int) -> Path:
        return self.folder / "parts" / UNFINISHED / f"{document:06d}"

    def read(self, name: str) -> pd.DataFrame:
        """Return a table with the rows of all documents that are finished and flushed."""
        return self._collect(name).to_pandas()

    def _collect(self, name: str) -> pa.Table:
        """Join a table of all parts. If two processes have measured the same document, only the
        rows of one of them are used."""
        phase = next(phase for phase, tables in PHASES.items() if name in tables)
        tables = [SCHEMAS[name].empty_table()]
        collected: set[int] = set()
        for part, contents in sorted(self._known[phase].items()):
            if contents is None:
                continue
            if name in contents.rows:
                table = read_table(part / f"{name}.parquet", name)
                is_repeated = np.isin(table["document"].to_numpy(), list(collected))
                tables.append(table.filter(pa.array(~is_repeated)))
            collected.update(contents.documents)
        table = pa.concat_tables(tables)
        # A stable sort by document is enough, as the rows of one document are sorted already.
        order = np.argsort(table["document"].to_numpy(), kind="stable")
        return table.take(order).combine_chunks()

    def finish(
        self, derived: Mapping[str, pd.DataFrame], meta: Meta, out: Path | None = None
    ) -> None:
        """Write the final tables to `out` (default: the folder itself): the tables of the parts,
        and those `derived` from them. Only one process may call this at a time."""
        out = self.folder if out is None else out
        # Nothing reads the tables without a manifest, so it goes first and comes last.
        (out / MANIFEST).unlink(missing_ok=True)
        for name, schema in SCHEMAS.items():
            if name in MADE_OF_PARTS:
                table = self._collect(name)
            else:
                rows = derived.get(name, pd.DataFrame(columns=schema.names))
                columns: Columns = {column: rows[column].tolist() for column in schema.names}
                table = to_table(name, columns, f"table {name}")
            with writing(out / f"{name}.parquet") as partial:
                write_table(partial, table)
        meta.identity = read_json(self.folder / "identity.json", dict, "measure again")
        write_as_json(out / "meta.json", dataclasses.asdict(meta))
        write_manifest(out, FILES)


def _document_table(name: str, document: int, columns: Columns) -> pa.Table:
    """Return a sorted table of the rows of one document."""
    num_rows = len(next(iter(dict(columns).values()), []))
    with_document = {"document": np.full(num_rows, document)} | dict(columns)
    table = to_table(name, with_document, f"document {document}, table {name}")
    return table.sort_by([(column, "ascending") for column in table.schema.names])
