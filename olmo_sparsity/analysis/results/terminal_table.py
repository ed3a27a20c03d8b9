"""Format rows of the summary as a table for a terminal.

    large gap: 29 targets in 6 documents, mean gap 2.49 nats; 35 of the placebo in 6 documents
      intervals: 95%, by a bootstrap over documents
    selector   units    k            recovery  placebo recovery  …
    add_one    tokens   1   0.94 [0.80, 1.05]              0.87

`TERMINAL` of shown_columns.py lists the columns that it shows; the others are only in the stored
table. Never imports torch.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from olmo_sparsity.analysis.results.doubts import has_net
from olmo_sparsity.analysis.results.notes import describe_intervals
from olmo_sparsity.analysis.results.shown_columns import ShownColumn, terminal_columns
from olmo_sparsity.analysis.results.statistics import ENOUGH
from olmo_sparsity.analysis.results.view import format_interval, format_number, num_of

FEW_NATS = 0.1
"""With a smaller mean gap, the summary warns of ratios to it."""


def format_summary(rows: pd.DataFrame, title: str, header: bool = True) -> str:
    """Format the rows of one target set: lines on all of them, then a table.

    Args:
        rows: Rows of the summary, of one target set.
        title: How the first line names the targets.
        header: Whether the table has a line of headings.
    """
    first = rows.iloc[0]
    has_placebo = has_net(rows)
    placebo = f"; {describe_placebo(first)}" if has_placebo else ""
    lines = [
        f"{title}: {num_of(first.num_targets, 'target')} in "
        f"{num_of(first.num_documents, 'document')}, mean gap {first.gap:.2f} nats{placebo}"
    ]
    # The mean of ratios exists only if every target has a gap.
    if pd.notna(first.mean_ratio):
        lines.append(
            f"  {first.selector}, k = {first.k}: mean of ratios {first.mean_ratio:.2f}, "
            f"{first.share_enough:.0%} of targets at {ENOUGH} or more"
        )
    if first.gap < FEW_NATS:
        lines.append(f"  below {FEW_NATS} nats ratios to the gap say little; compare in nats")
    lines.append(f"  {describe_intervals(first, has_placebo)}")
    if "share_all" in rows and (rows.share_all > 0).any():
        lines.append(
            "  *: all distant tokens at some targets, where recovery is 1 by construction "
            "(share_all in the table summary)"
        )
    return "\n".join([*lines, *_format_rows(rows, has_placebo, header)])


def _format_rows(rows: pd.DataFrame, has_placebo: bool, header: bool) -> list[str]:
    """Return a line for each row of the table.

    Args:
        rows: Rows of the summary, of one target set.
        has_placebo: Whether net excess is shown.
        header: Whether a line of headings precedes them.
    """
    shown_columns = terminal_columns(has_placebo)
    lines = []
    if header:
        headings = ""
        for _, display in shown_columns:
            headings += f"  {display.heading:>{display.width}}"
        lines.append(f"{'selector':<16} {'units':<8}{'k':>3}{headings}")

    cells_by_column = [_format_cells(rows, shown) for shown in shown_columns]
    for row_index, row in enumerate(rows.itertuples()):
        values = ""
        for (_, display), cells in zip(shown_columns, cells_by_column, strict=True):
            values += f"  {cells[row_index]:>{display.width}}"
        # Explained by a line of `format_summary`.
        mark = "*" if getattr(row, "share_all", 0.0) > 0 else ""
        lines.append(f"{row.selector:<16} {row.units:<8}{f'{mark}{row.k}':>3}{values}")
    return lines


def _format_cells(rows: pd.DataFrame, shown: ShownColumn) -> list[str]:
    """Return a column as a terminal shows it: a text for each row."""
    column, display = shown
    if column.name not in rows:
        # The summary of a group of documents lacks what is not computed from losses and recovery.
        return ["–"] * len(rows)
    if column.has_interval and display.has_interval:
        cells = []
        for value, low, high in rows[[*column.names]].to_numpy(float).tolist():
            cells.append(format_interval(value, low, high, display.digits, display.sign, minus="-"))
        return cells
    values = rows[column.name].to_numpy(float).tolist()
    return [format_number(value, display.digits, display.sign, minus="-") for value in values]


def describe_placebo(row: Any) -> str:
    """Return the number of placebo targets, and of their documents."""
    documents = num_of(row.num_placebo_documents, "document")
    return f"{row.num_placebo_targets:,} of the placebo in {documents}"
