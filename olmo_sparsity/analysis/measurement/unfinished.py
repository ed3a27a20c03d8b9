"""Store the rows of a document that takes long, so that a stop loses seconds and not the document.

    parts/unfinished/000001/1f2e3d4c/    a piece: the rows of some texts of document 1
    parts/unfinished/000001/5a6b7c8d/    the rows of other texts

A text is a distant text before the targets of one block (recovery.py), and has a name. The next
start reads the names of the texts whose rows are stored, and evaluates only the others.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from olmo_sparsity.analysis.measurement.stored_part import (
    PartContents,
    read_contents,
    read_rows,
    table_of_document,
    write_part,
)
from olmo_sparsity.base.files import is_partial


class UnfinishedDocument:
    """Stores the rows of a document of which some texts are evaluated and others are not yet.

    Rows are stored every `store_every_s` seconds, in pieces that hold whole texts, and the next
    start evaluates only the other texts. `Parts` removes the pieces with the finished document.

        unfinished = parts.open_unfinished(3, targets)
        if name not in unfinished.texts:
            rows = evaluate(name)
            unfinished.store([name], rows)
        tables = unfinished.joined(rows_not_stored)
    """

    def __init__(self, folder: Path, number: int, identity: str, store_every_s: float) -> None:
        """Find the pieces that an earlier start has stored.

        Args:
            folder: Where the pieces of this document are.
            number: Number of the document.
            identity: What identifies its targets and settings; pieces of others are passed over.
            store_every_s: Seconds between two pieces.
        """
        self._folder = folder
        self._number = number
        self._identity = identity
        self._store_every_s = store_every_s
        self._stored_s = time.monotonic()
        self._pieces: dict[Path, PartContents] = {}
        self.texts: set[str] = set()
        """Names of the texts whose rows are stored."""

        pieces = sorted(folder.iterdir()) if folder.is_dir() else []
        for piece in pieces:
            if is_partial(piece):
                continue
            contents = read_contents(piece, identity, "its targets are evaluated again")
            # Another process may have evaluated the same texts at the same time.
            if contents is not None and self.texts.isdisjoint(contents.texts):
                self._pieces[piece] = contents
                self.texts.update(contents.texts)

    @property
    def is_due(self) -> bool:
        """Return whether rows were last stored so long ago that they should be stored now."""
        return time.monotonic() - self._stored_s >= self._store_every_s

    def store(self, texts: Sequence[str], tables: Mapping[str, pd.DataFrame]) -> None:
        """Store the rows of these texts, which must be all that they have."""
        filled = {
            name: table_of_document(name, self._number, dict(rows))
            for name, rows in tables.items()
            if len(rows)
        }
        num_rows = {name: table.num_rows for name, table in filled.items()}
        contents = PartContents([self._number], num_rows, self._identity, list(texts))
        self._folder.mkdir(parents=True, exist_ok=True)
        piece = self._folder / uuid.uuid4().hex[:8]
        write_part(piece, filled, contents)
        self._pieces[piece] = contents
        self.texts.update(texts)
        self._stored_s = time.monotonic()

    def joined(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
        """Return tables of the stored rows, followed by those of `tables`, which are not stored."""
        joined = {}
        for name, rows in tables.items():
            frames = [
                read_rows(piece, name).to_pandas().drop(columns="document")
                for piece, contents in self._pieces.items()
                if name in contents.rows
            ]
            if len(rows) or not frames:
                frames.append(rows)
            joined[name] = pd.concat(frames, ignore_index=True)
        return joined
