"""Format rows of the summary as a table for a terminal.

    large gap: 29 targets in 6 documents, mean gap 2.49 nats; 35 of the placebo in 6 documents
      add_one, k = 1: mean of ratios 0.97, 72% of targets at 0.9 or more
      intervals: 95%, by a bootstrap over documents
      *: all distant tokens at some targets, where recovery is 1 by construction (…)
    selector   units     k            recovery  placebo recovery  …
    add_one    tokens    1   0.94 [0.80, 1.05]              0.87
    add_one    tokens  *16   1.02 [0.97, 1.08]              0.99

`TERMINAL` of shown_columns.py lists the columns that it shows; the others are only in the stored
table. Never imports torch.
"""

from __future__ import annotations

import pandas as pd

from olmo_sparsity.analysis.results.doubts import has_net
from olmo_sparsity.analysis.results.notes import describe_intervals, describe_placebo
from olmo_sparsity.analysis.results.shown_columns import ShownColumn, terminal_columns
from olmo_sparsity.analysis.results.statistics import ENOUGH
from olmo_sparsity.analysis.results.view import format_interval, format_number, num_of

SMALL_GAP = 0.1
"""Below this mean gap, in nats, recovery is a ratio to almost nothing, and the summary says so."""


def format_summary(rows: pd.DataFrame, title: str, header: bool = True) -> str:
    """Format the rows of one target set: lines on all of them, then a table.

    Args:
        rows: Rows of the summary, of one target set.
        title: How the first line names the targets.
        header: Whether the table has a line of headings.
    """
    first = rows.iloc[0]
    shows_net = has_net(rows)
    placebo = f"; {describe_placebo(first)}" if shows_net else ""
    lines = [
        f"{title}: {num_of(first.num_targets, 'target')} in "
        f"{num_of(first.num_documents, 'document')}, mean gap {first.gap:.2f} nats{placebo}"
    ]
    # Recovery is a ratio of sums over targets. This is the mean of each target's own ratio, which
    # exists only if every target has a gap. One row shows whether the two differ much.
    if pd.notna(first.mean_ratio):
        lines.append(
            f"  {first.selector}, k = {first.k}: mean of ratios {first.mean_ratio:.2f}, "
            f"{first.share_enough:.0%} of targets at {ENOUGH} or more"
        )
    if first.gap < SMALL_GAP:
        lines.append(f"  below {SMALL_GAP} nats ratios to the gap say little; compare in nats")
    lines.append(f"  {describe_intervals(first, shows_net)}")
    if "share_all" in rows and (rows.share_all > 0).any():
        lines.append(
            "  *: all distant tokens at some targets, where recovery is 1 by construction "
            "(share_all in the table summary)"
        )
    return "\n".join([*lines, *_format_rows(rows, shows_net, header)])


def _format_rows(rows: pd.DataFrame, shows_net: bool, header: bool) -> list[str]:
    """Return a line for each row of the table.

    Args:
        rows: Rows of the summary, of one target set.
        shows_net: Whether net excess is shown.
        header: Whether a line of headings precedes them.
    """
    shown_columns = terminal_columns(shows_net)
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
        # * marks rows in which k units are all distant tokens, at some targets at least.
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
        # `names` are those of the value and of both ends of its interval.
        for value, low, high in rows[[*column.names]].to_numpy(float).tolist():
            cells.append(format_interval(value, low, high, display.digits, display.sign, minus="-"))
        return cells
    values = rows[column.name].to_numpy(float).tolist()
    return [format_number(value, display.digits, display.sign, minus="-") for value in values]
