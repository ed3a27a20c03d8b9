"""Write the numbers of a measurement as HTML tables: its summary, and the split by distance.

    summary → `summary_tables` → a table for each target set
    the row to quote → `split_by_distance` → a table of distances with bars

`PAGE` of shown_columns.py lists the columns that are shown. Never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pandas as pd

from olmo_sparsity.analysis.report.document_data import Menus, in_order
from olmo_sparsity.analysis.results.by_distance import (
    columns_of_distances,
    describe_distances,
    split_by_distance,
)
from olmo_sparsity.analysis.results.conclusion import quoted_row_of
from olmo_sparsity.analysis.results.meta import SETS, main_set
from olmo_sparsity.analysis.results.notes import describe_intervals, describe_placebo
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.shown_columns import HEADINGS, ShownColumn, page_columns
from olmo_sparsity.analysis.results.view import (
    escape,
    format_number,
    html_table,
    num_of,
    sentence,
    spell,
)

LENGTH_OF_BAR = 40
"""Length of the longest bar of the table of distances, in characters."""

COLUMNS_OF_BARS = ("net", "excess", "recovery")
"""Columns that bars may show: the first of them that is known. Net excess says most about
distances; without placebo targets it is not known."""

ABOUT_DISTANCES = (
    "Units lie where there is text, as random ones show; only excess and net excess say at which "
    "distance the targets depend on it."
)
"""What the table of distances means, in its caption."""


def summary_tables(results: Results) -> str:
    """Return HTML of a table for each target set, and of the table of distances. All tables are
    folded, except those of the main target set and of distances."""
    menus = Menus.of(results)
    summary = results.summary
    rank = {name: number for number, name in enumerate([*menus.selectors, *menus.units])}

    def rank_of(column: pd.Series) -> pd.Series:
        """Return what a column is sorted by: names by their order in the menus, k by itself."""
        return column if column.name == "k" else column.map(rank)

    main = main_set(summary.target_set)
    tables = []
    for target_set in in_order(SETS, summary.target_set):
        rows = summary[summary.target_set == target_set]
        rows = rows.sort_values(["selector", "units", "k"], key=rank_of)
        tables.append(_table_of_set(results, target_set, rows, is_main=target_set == main))
    distances = _distance_table(results)
    if distances:
        tables.append(distances)
    return "\n".join(tables) or "<p>Nothing was measured.</p>"


def _table_of_set(results: Results, target_set: str, rows: pd.DataFrame, *, is_main: bool) -> str:
    """Return HTML of the table of one target set.

    Args:
        results: The measurement.
        target_set: The name of the target set.
        rows: Its rows of the summary, in the order in which they are shown.
        is_main: Whether it is the main target set, which has the row to quote.
    """
    caption = _caption(results, target_set, rows)
    quoted_row = None
    if is_main:
        caption += " The row to quote is marked."
        is_quoted = rows.index == quoted_row_of(results)
        quoted_row = int(is_quoted.argmax()) if is_quoted.any() else None
    columns: dict[str, Iterable] = {
        "selector": rows.selector.map(spell),
        "units": rows.units,
        "k": rows.k,
    }
    for shown in page_columns():
        columns[shown.display.heading] = _cells_of_page(rows, shown)
    return html_table(caption, columns, is_open=is_main, quoted_row=quoted_row)


def _caption(results: Results, target_set: str, rows: pd.DataFrame) -> str:
    """Return the caption of the table of a target set: its targets, and which intervals it has."""
    first = rows.iloc[0]
    targets = num_of(first.num_targets, "target")
    documents = num_of(first.num_documents, "document")
    intervals = describe_intervals(first, bool(rows.net.notna().any()))
    return (
        f"Targets: {results.spell_set(target_set)} · {targets} in {documents}; "
        f"{describe_placebo(first)}. {sentence(intervals)}"
    )


def _cells_of_page(rows: pd.DataFrame, shown: ShownColumn) -> Iterable:
    """Return the cells of a column of the page: numbers as text, or tuples of a value and the ends
    of its interval."""
    column, display = shown
    if column.has_interval and display.has_interval:
        return rows[[*column.names]].itertuples(index=False, name=None)
    return [
        format_number(value, display.digits, display.sign) for value in rows[column.name].tolist()
    ]


def describe_columns() -> str:
    """Return an HTML list of the columns of these tables, with what they mean."""
    items = []
    for column, display in page_columns():
        meaning = re.sub(r"`(.*?)`", r"<code>\1</code>", escape(column.meaning))
        name = f"{escape(display.heading)} (<code>{escape(column.name)}</code>)"
        items.append(f"<dt>{name}</dt><dd>{meaning}</dd>")
    return f"<dl>{''.join(items)}</dl>"


def _distance_table(results: Results) -> str:
    """Return HTML of a table with bars that splits the row to quote by how far back its units are.
    Return an empty text if there is no such row, or no units."""
    if results.summary.empty:
        return ""
    row = results.summary.loc[quoted_row_of(results)]
    bins = split_by_distance(results, row)
    if bins.empty:
        return ""
    columns: dict[str, Iterable] = {}
    for heading, cells in columns_of_distances(bins).items():
        # The cells have the minus of terminals; a page has the typographic one.
        columns[heading] = [cell.replace("-", "−") for cell in cells]
    # If the targets have no gap, all three are NaN, and the table has no bars.
    known_columns = [name for name in COLUMNS_OF_BARS if bins[name].notna().any()]
    if known_columns:
        name = known_columns[0]
        columns[f"{HEADINGS[name]}, as bars"] = _bars(bins[name])
    caption = sentence(describe_distances(row))
    return html_table(f"{caption} {ABOUT_DISTANCES}", columns, is_open=True)


def _bars(values: pd.Series) -> list[str]:
    """Return a bar for each value, of a length in proportion to it; none for values below 0."""
    lengths = values.clip(lower=0).fillna(0)
    largest = max(lengths.max(), 1e-9)  # not 0, as it divides
    return ["█" * round(LENGTH_OF_BAR * length / largest) for length in lengths]
