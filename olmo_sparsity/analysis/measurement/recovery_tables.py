"""Collect the rows that the evaluation of one document adds to its tables.

    tables = RecoveryTables(unfinished)
    if not tables.has_stored(text_name):
        tables.add("lds", labels._asdict(), target=place_T, lds=lds_T)
        tables.finish_text(text_name)
    frames = tables.frames()

Rows are added for all targets of a text at once: `labels` hold what is equal in all of these rows,
arrays what differs. Each column of the table is one or the other:

    labels    units    selector     arrays   target    lds
              tokens   add_one                   18   0.81
                                                 40   0.64

A document may take minutes. So the rows of finished texts are stored every few seconds
(`UnfinishedDocument`), and a later start evaluates only the other texts.

Never imports torch.

Dimension key: T targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.measurement.unfinished import UnfinishedDocument
from olmo_sparsity.analysis.results.schemas import PHASES

COLUMNS = {
    name: [column for column in PHASES["recovery"][name].names if column != "document"]
    for name in ("recovery", "influence", "lds", "costs")
}
"""Table → its columns. The column `document` is added when the tables of all documents are
joined."""


class RankingLabels(NamedTuple):
    """The columns that tell the rankings of one distant text from each other."""

    units: str
    """The kind of units, such as `tokens`."""

    selector: str
    control: str
    """`own`, or `unrelated` if the ranked units are those of an unrelated text that the targets are
    compared with."""

    draw: int
    """The index of a random draw. For an own text it numbers the draws of a random selector; for
    an unrelated text, of which each selector is drawn once, it numbers the texts."""


class RecoveryTables:
    """The rows of the tables `recovery`, `influence`, `lds` and `costs` of one document."""

    def __init__(self, unfinished: UnfinishedDocument | None) -> None:
        """Begin without rows, or with those that an earlier start has stored.

        Args:
            unfinished: Where rows are stored before the document is finished.
        """
        self._unfinished = unfinished
        self._arrays = _empty_columns()
        """Table → column → arrays to be joined: the rows that are not stored yet."""

        self._unstored_texts: list[str] = []
        """Names of the texts whose rows these are."""

    def has_stored(self, text_name: str) -> bool:
        """Return whether the rows of this text are stored, by this start or an earlier one."""
        return self._unfinished is not None and text_name in self._unfinished.texts

    def add(self, table: str, labels: Mapping[str, Any], **columns: Any) -> None:
        """Add rows to a table.

        Args:
            labels: Column → the value that it has in all of these rows. Labels that are no columns
                of the table are left out.
            columns: Column → its values, one for each row.
        """
        # Arrays are kept, and joined to one frame at the end: a frame for each choice would take
        # longer than the choice.
        unknown = columns.keys() - self._arrays[table].keys()
        assert not unknown, f"{table} has no columns {unknown}"
        num_rows = len(next(iter(columns.values())))
        for name, arrays in self._arrays[table].items():
            values = columns[name] if name in columns else [labels[name]] * num_rows
            # In an array of NumPy's strings each takes the memory of the longest.
            is_text = num_rows > 0 and isinstance(values[0], str)
            arrays.append(np.array(values, dtype=object if is_text else None))

    def add_cost(
        self, unit_kind: str, selector: str, token_forwards: int, num_targets: int
    ) -> None:
        """Add a row to `costs`: how many token-forwards a computation took, for how many
        targets."""
        labels = {"units": unit_kind, "selector": selector}
        self.add("costs", labels, token_forwards=[token_forwards], num_targets=[num_targets])

    def finish_text(self, text_name: str) -> None:
        """Note that all rows of a text were added. Every few seconds, store the rows of all
        finished texts."""
        if self._unfinished is None:
            return
        # Rows are stored with whole texts only, so that a later start evaluates none half.
        self._unstored_texts.append(text_name)
        if self._unfinished.is_due:
            self._unfinished.store(self._unstored_texts, self._unstored_frames())
            self._unstored_texts = []
            self._arrays = _empty_columns()

    def frames(self) -> dict[str, pd.DataFrame]:
        """Return the tables with all rows, stored or not."""
        frames = self._unstored_frames()
        return frames if self._unfinished is None else self._unfinished.joined(frames)

    def _unstored_frames(self) -> dict[str, pd.DataFrame]:
        """Return the tables with the rows that are not stored yet."""
        return {name: _joined(name, columns) for name, columns in self._arrays.items()}


def _empty_columns() -> dict[str, dict[str, list[np.ndarray]]]:
    """Return table → column → a list to which arrays are added."""
    return {name: {column: [] for column in columns} for name, columns in COLUMNS.items()}


def _joined(table: str, arrays: dict[str, list[np.ndarray]]) -> pd.DataFrame:
    """Join the arrays of each column, and return them as a table."""
    has_rows = all(arrays.values())
    if not has_rows:
        return pd.DataFrame(columns=COLUMNS[table])
    return pd.DataFrame({column: np.concatenate(added) for column, added in arrays.items()})
