"""Describe a comparison of two measurements for a terminal.

    two Results → `compare_with_remarks` → a table → `describe_comparison` → text

    net excess: pose minus rope
    targets selector         units     k                     net  …  documents
    gap     add_one          tokens    1      +0.21 [+0.05, +0.37]  …      6 / 4  *
      *: 6 documents are too few to trust the interval

`compare` and `transfer` of compare.py compute the numbers, and a remark for each row that says what
makes its intervals doubtful. Never imports torch.
"""

from __future__ import annotations

import pandas as pd

from olmo_sparsity.analysis.results.compare import (
    compare_results,
    describe_differing_conditions,
    transfer_results,
)
from olmo_sparsity.analysis.results.intervals import BOOTSTRAP
from olmo_sparsity.analysis.results.reported import has_few_targets
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.shown_columns import HEADINGS
from olmo_sparsity.analysis.results.student_t import FEW_FOR_BOOTSTRAP
from olmo_sparsity.analysis.results.view import with_interval

_IN_NATS = {"net_nats", "excess_nats"}
"""Columns in nats a target. Their values are small, so they have a digit more than fractions."""


def compare_with_remarks(first: Results, second: Results, transfers: bool) -> pd.DataFrame:
    """Return the table that compares two measurements, with the column `remark`.

    Args:
        first: A measurement.
        second: Another one.
        transfers: Compare them by `transfer`, where each model evaluated what the other chose, not
            by `compare`.
    """
    return transfer_results(first, second) if transfers else compare_results(first, second)


def describe_comparison(
    first: Results,
    second: Results,
    table: pd.DataFrame,
    transfers: bool,
    names: str | None = None,
) -> str:
    """Return the comparison of two measurements as text for a terminal.

    Args:
        first: A measurement.
        second: Another one.
        table: What `compare_with_remarks` returned for them.
        transfers: Whether it compared them by `transfer`.
        names: What the title calls the difference. Default: the names of both models.
    """
    first_name = str(first.meta.model["name"])
    second_name = str(second.meta.model["name"])
    if transfers:
        columns = ["recovery", "excess", "removal", "excess_nats"]
        title = f"mean of both directions: {first_name} and {second_name}, each by units of the "
        title += "other"
    else:
        columns = ["net", "net_equal", "net_nats"]
        title = f"net excess: {names or f'{first_name} minus {second_name}'}"
    lines = [title]
    differing = describe_differing_conditions(first, second)
    if differing:
        lines.append(differing)
    if not transfers:
        lines.append(_describe_gap_difference(table))
    lines += _format_comparison(table, columns)
    lines += _describe_intervals_of_comparison(table, transfers)
    return "\n".join(lines)


def _describe_gap_difference(table: pd.DataFrame) -> str:
    """Return a line with the difference of the mean gap, which is the same in each row."""
    row = table.iloc[0]
    ends = (row.mean_gap_low, row.mean_gap_high)
    # Over all tokens, most of which need no distant text, so that it is small.
    difference = with_interval(row.mean_gap, *ends, digits=3)
    return f"L_short - L_long, mean of all measured tokens: {difference} nats a token"


def _describe_intervals_of_comparison(table: pd.DataFrame, transfers: bool) -> list[str]:
    """Return lines below the table: why the intervals of marked rows are doubtful or missing, and
    how intervals are computed."""
    # Each remark once, although it may be of several rows.
    remarks = dict.fromkeys(remark for remark in table.remark if remark)
    lines = [f"  *: {remark}" for remark in remarks]
    has_few = has_few_targets(table) | has_few_targets(table, "placebo")
    if has_few.any():
        lines.append("  for intervals, measure more documents (--max-documents)")
    if has_few.all():
        return lines
    intervals = f"intervals: {BOOTSTRAP}"
    has_students_t = False
    # Only intervals of net excess are stretched, and a table of `transfer` has none.
    if not transfers:
        with_net = table.net_nats.notna()
        fewest_documents = table.loc[with_net, _counts_of_documents(table)].min(axis=None)
        has_students_t = fewest_documents < FEW_FOR_BOOTSTRAP
    if has_students_t:
        intervals += (
            f"; by Student's t in rows of fewer than {FEW_FOR_BOOTSTRAP} documents (own / placebo)"
        )
    return [*lines, intervals]


def _counts_of_documents(table: pd.DataFrame) -> list[str]:
    """Return the names of the columns that count documents. A table of `transfer` has no column for
    the placebo's."""
    return [name for name in ("num_documents", "num_placebo_documents") if name in table]


def _format_comparison(table: pd.DataFrame, columns: list[str]) -> list[str]:
    """Return a header and a line for each row of the table, with these columns and their
    intervals."""
    width = max(map(len, table.target_set), default=0)
    headings = "".join(f"  {HEADINGS[name]:>22}" for name in columns)
    lines = [f"{'targets':<{width}} {'selector':<16} {'units':<8}{'k':>3}{headings}  documents"]
    for row in table.to_dict("records"):
        line = f"{row['target_set']:<{width}} {row['selector']:<16} {row['units']:<8}{row['k']:>3}"
        for name in columns:
            digits = 3 if name in _IN_NATS else 2
            ends = (row[f"{name}_low"], row[f"{name}_high"])
            line += f"  {with_interval(row[name], *ends, digits=digits):>22}"
        documents = " / ".join(str(row[name]) for name in _counts_of_documents(table))
        mark = "  *" if row["remark"] else ""
        lines.append(f"{line}  {documents:>9}{mark}")
    return lines
