"""Store the rows of measured documents in one folder, to which any number of processes write.

    identity.json                      what all processes must share: model, text, settings
    parts/losses/000000-1f2e3d4c/      a part: the rows of documents 0, 1 and 4 (stored_part.py)
    parts/recovery/000001-…/           the same of the second phase
    parts/unfinished/000001/…          pieces of a document that takes long (unfinished.py)
    losses.parquet, …, manifest.json   the final tables, of all parts

measurement.py adds documents one by one, and asks which are finished. summing_up.py reads the rows
of all, and writes the final tables. The documents of a damaged part are measured again. Rows are
sorted, so the final tables do not depend on which process measured a document, or in which order
(docs/measure.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from olmo_sparsity.analysis.measurement.identity import complete_identity
from olmo_sparsity.analysis.measurement.stored_part import (
    PartContents,
    read_contents,
    read_rows,
    table_of_document,
    write_part,
)
from olmo_sparsity.analysis.measurement.unfinished import UnfinishedDocument
from olmo_sparsity.analysis.results.json_values import to_json_value, write_as_json
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.schemas import MADE_OF_PARTS, PHASES, SCHEMAS, Columns
from olmo_sparsity.analysis.results.stored_results import FILES
from olmo_sparsity.analysis.results.tables import to_table, write_table
from olmo_sparsity.base.files import is_partial, read_json, writing
from olmo_sparsity.base.manifest import MANIFEST, write_manifest
from olmo_sparsity.base.provenance import versions_of_numbers
from olmo_sparsity.base.work_folder import WorkFolder

UNFINISHED = "unfinished"
"""The folder for documents of which some texts are evaluated; it lies beside those of the
phases."""

PAUSE_SHARE = 1 / 20
"""The pause between two parts is at least this share of the time since the start, so that a long
measurement writes fewer and larger parts: reading it opens each of them."""

MAX_PAUSE_S = 30
"""The most seconds between two parts. Other processes wait for them, and their patience ends
(`PATIENCE_S` of sharing.py)."""


def results_folder(out: str | Path) -> WorkFolder:
    """Return the folder of a measurement. Its file identity.json tells it from other folders."""
    return WorkFolder(Path(out), "out", "identity.json", own_key="data")


class Parts:
    """Reads and writes the measured documents of one folder, which several processes may share.

        parts = Parts(folder, plan.identity())
        parts.add("losses", 7, tables)   # the rows of document 7; written some seconds later
        parts.flush()                    # written now
        parts.find_finished("losses")    # {0, 1, 7}: the documents of all processes
        parts.read("losses")             # one table with their rows

    Added documents are written every `flush_every_s` seconds (less often in a long measurement), or
    as soon as there are `part_size` of them.
    """

    def __init__(
        self, folder: Path, identity: dict, *, flush_every_s: float = 10, part_size: int = 64
    ) -> None:
        """Create the folder, or open it.

        Args:
            folder: Where the measurement is stored.
            identity: What all processes must share. A folder with another identity is rejected.
            flush_every_s: Seconds between two parts that are written.
            part_size: The largest number of documents of a part.
        """
        self.folder = Path(folder)
        self.flush_every_s = flush_every_s
        self.part_size = part_size
        work_folder = results_folder(folder)
        work_folder.create(*(f"parts/{name}" for name in (*PHASES, UNFINISHED)))
        self._identity = work_folder.identify(
            to_json_value(identity), complete=complete_identity, versions=versions_of_numbers()
        )
        """SHA-256 of the identity, which each part repeats."""

        self._buffer: dict[str, dict[int, dict[str, pa.Table]]] = {phase: {} for phase in PHASES}
        self._contents_of_parts: dict[str, dict[Path, PartContents | None]] = {
            phase: {} for phase in PHASES
        }
        """Contents of each part by its phase and folder; None for a damaged part. Only
        `find_finished` looks for new parts, so that all tables read after one call hold the same
        documents."""

        for phase in PHASES:
            self.find_finished(phase)
        # By a clock that no change of the system's time moves.
        self._began_s = time.monotonic()
        self._flushed_s = self._began_s

    def find_finished(self, phase: str) -> set[int]:
        """Return the documents that need not be measured again, including those in the buffer."""
        # A part never changes, so each is read once.
        contents_of_parts = self._contents_of_parts[phase]
        for part in sorted((self.folder / "parts" / phase).iterdir()):
            if part not in contents_of_parts and not is_partial(part):
                consequence = "its documents are measured again"
                contents_of_parts[part] = read_contents(part, self._identity, consequence)

        finished = set(self._buffer[phase])
        for contents in contents_of_parts.values():
            if contents is not None:
                finished.update(contents.documents)
        return finished

    def add(self, phase: str, document: int, tables: Mapping[str, Columns]) -> None:
        """Add all rows of one document in a phase. They are written with those of other documents,
        seconds later.

        Args:
            phase: `losses` or `recovery`.
            document: The number of the document.
            tables: Name of a table → its rows. The column `document` is added to them.
        """
        assert tables.keys() <= PHASES[phase].keys(), f"no such table among {list(tables)}"
        self._buffer[phase][document] = {
            name: table_of_document(name, document, columns)
            for name, columns in tables.items()
            if len(columns)
        }
        if self._is_due() or len(self._buffer[phase]) >= self.part_size:
            self.flush()

    def _is_due(self) -> bool:
        """Return whether the last part was written so long ago that another one should be."""
        now_s = time.monotonic()
        pause_s = max(self.flush_every_s, PAUSE_SHARE * (now_s - self._began_s))
        return now_s - self._flushed_s >= min(pause_s, MAX_PAUSE_S)

    def flush(self) -> None:
        """Write the buffered documents, as one part of each phase."""
        for phase, buffer in self._buffer.items():
            if buffer:
                self._write_buffer(phase, buffer)
            if phase == "recovery":
                # A document is whole now, so the pieces that were stored before are not needed.
                for document in buffer:
                    shutil.rmtree(self._unfinished_folder(document), ignore_errors=True)
            buffer.clear()
        self._flushed_s = time.monotonic()

    def _write_buffer(self, phase: str, buffer: Mapping[int, Mapping[str, pa.Table]]) -> None:
        """Write documents as one part.

        Args:
            buffer: Document → table → its rows.
        """
        joined = {}
        for name in PHASES[phase]:
            tables = [written[name] for written in buffer.values() if name in written]
            if tables:
                joined[name] = pa.concat_tables(tables)
        num_rows = {name: table.num_rows for name, table in joined.items()}
        contents = PartContents(sorted(buffer), num_rows, self._identity)
        # A random name, as several processes write parts.
        part = self.folder / "parts" / phase / f"{min(buffer):06d}-{uuid.uuid4().hex[:8]}"
        write_part(part, joined, contents)
        self._contents_of_parts[phase][part] = contents

    def open_unfinished(
        self, document: int, targets: Mapping[str, np.ndarray]
    ) -> UnfinishedDocument:
        """Return the store for the rows of a document until it is finished. It has the rows that an
        earlier start has stored, if these were for the same targets.

        Args:
            document: The number of the document.
            targets: Distant part → all targets of the document, as spans.
        """
        # Another choice of targets makes other rows, which must not be joined to these. So the
        # identity of a piece is that of the measurement and of the targets.
        digest = hashlib.sha256(self._identity.encode())
        for distant_part, spans in sorted(targets.items()):
            digest.update(f"{distant_part} {np.asarray(spans).tolist()}".encode())
        folder = self._unfinished_folder(document)
        return UnfinishedDocument(folder, document, digest.hexdigest(), self.flush_every_s)

    def _unfinished_folder(self, document: int) -> Path:
        """Return the folder for the pieces of a document."""
        return self.folder / "parts" / UNFINISHED / f"{document:06d}"

    def read(self, name: str) -> pd.DataFrame:
        """Return a table with the rows of all documents that are finished and flushed."""
        return self._join_parts(name).to_pandas()

    def _join_parts(self, name: str) -> pa.Table:
        """Join a table of all parts. If two processes have measured the same document, only the
        rows of one of them are used."""
        phase = next(phase for phase, tables in PHASES.items() if name in tables)
        tables = [SCHEMAS[name].empty_table()]
        collected: set[int] = set()
        for part, contents in sorted(self._contents_of_parts[phase].items()):
            if contents is None:
                continue
            # A part has no file for a table without rows.
            if name in contents.rows:
                table = read_rows(part, name)
                is_repeated = np.isin(table["document"].to_numpy(), list(collected))
                tables.append(table.filter(pa.array(~is_repeated)))
            collected.update(contents.documents)
        table = pa.concat_tables(tables)
        # A stable sort by document is enough, as the rows of one document are sorted already.
        order = np.argsort(table["document"].to_numpy(), kind="stable")
        return table.take(order).combine_chunks()

    def write_final_tables(
        self, derived: Mapping[str, pd.DataFrame], meta: Meta, out: Path | None = None
    ) -> None:
        """Write the final tables. Only one process may call this at a time.

        Args:
            derived: Name of a table → its rows, for the tables that are computed from the others.
            meta: The content of meta.json. `identity` is added to it.
            out: Where to write. Default: the folder of the parts.
        """
        out = self.folder if out is None else out
        # Nothing reads the tables without a manifest, so it is removed first and written last.
        (out / MANIFEST).unlink(missing_ok=True)
        for name, schema in SCHEMAS.items():
            if name in MADE_OF_PARTS:
                table = self._join_parts(name)
            else:
                rows = derived.get(name, pd.DataFrame(columns=schema.names))
                columns: Columns = {column: rows[column].tolist() for column in schema.names}
                table = to_table(name, columns, f"table {name}")
            with writing(out / f"{name}.parquet") as partial:
                write_table(partial, table)
        identity = read_json(self.folder / "identity.json", dict, "measure again")
        write_as_json(out / "meta.json", dataclasses.asdict(meta) | {"identity": identity})
        write_manifest(out, FILES)
