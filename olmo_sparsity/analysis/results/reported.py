"""Give the intervals of a summary their final form, in which they are stored and shown.

    summary of bootstrap intervals → `with_t_intervals` → `without_few_intervals` → as reported

    documents  net excess   bootstrap     as reported
           40        0.30   0.20, 0.40    0.20, 0.40
            7        0.30   0.20, 0.40   0.165, 0.435   1.35 times as wide
            3        0.30   0.29, 0.31    none

A bootstrap over few documents is too narrow, and over a handful means nothing. So intervals of net
excess over few documents are stretched to Student's t, and rows of very few targets have none.
Never imports torch.
"""

from __future__ import annotations

from typing import Literal

import pandas as pd

from olmo_sparsity.analysis.results.columns import SUMMARY, SummaryColumn
from olmo_sparsity.analysis.results.student_t import width_ratio

MIN_TARGETS = 10
MIN_DOCUMENTS = 5
"""With fewer targets, or targets in fewer documents, no interval and no verdict is reported: the
bootstrap of one target has no width, and that of four documents covers far less than 95%."""

STUDENT = "student"
"""The key `intervals` of a `meta.json` whose summary has the intervals that `as_reported`
returned."""


def as_reported(summary: pd.DataFrame) -> pd.DataFrame:
    """Return the summary with the intervals that are stored and shown: those of net excess by
    Student's t where documents are few, and none for fewer than `MIN_TARGETS` targets in
    `MIN_DOCUMENTS` documents."""
    if summary.empty:
        return summary
    return without_few_intervals(with_t_intervals(summary))


def with_t_intervals(summary: pd.DataFrame) -> pd.DataFrame:
    """Return the summary with wider intervals of net excess where few documents have targets: they
    are stretched from those of a normal distribution to Student's t."""
    if "num_placebo_documents" not in summary:
        return summary.copy()
    # A difference is as uncertain as the number in it that has fewer documents.
    num_documents = summary[["num_documents", "num_placebo_documents"]].min(axis=1)
    stretch = num_documents.map(width_ratio)
    ends = {}
    for column in SUMMARY:
        if column.is_net and column.low in summary:
            value = summary[column.name]
            for end in (column.low, column.high):
                ends[end] = value + stretch * (summary[end] - value)
    return summary.assign(**ends)


def without_few_intervals(summary: pd.DataFrame) -> pd.DataFrame:
    """Return the summary without intervals in rows of fewer than `MIN_TARGETS` targets or
    `MIN_DOCUMENTS` documents."""
    masked: dict[str, pd.Series] = {}
    for column in SUMMARY:
        if not column.has_interval:
            continue
        has_few = _has_few_targets_of(column, summary)
        # In a table of `both_ways` the ends of recovery are named like those of other columns.
        for end in (column.low, column.high, f"{column.name}_low", f"{column.name}_high"):
            if end in summary:
                masked[end] = summary[end].mask(has_few)
    # Weights to the gaps of a handful of targets mean nothing, so that the value goes, too.
    if "net_equal" in summary:
        has_few = has_few_targets(summary) | has_few_targets(summary, "placebo")
        masked["net_equal"] = summary.net_equal.mask(has_few)
    return summary.assign(**masked)


def _has_few_targets_of(column: SummaryColumn, summary: pd.DataFrame) -> pd.Series:
    """Return for each row whether a column was computed from too few targets for an interval."""
    if column.is_net:
        return has_few_targets(summary) | has_few_targets(summary, "placebo")
    return has_few_targets(summary, "placebo" if column.is_of_placebo else "document")


def has_few_targets(
    summary: pd.DataFrame, distant_part: Literal["document", "placebo"] = "document"
) -> pd.Series:
    """Return for each row whether it has too few targets for an interval. Targets of one distant
    part are counted."""
    prefix = "num_placebo_" if distant_part == "placebo" else "num_"
    has_few = pd.Series(False, summary.index)
    for counted, minimum in (("documents", MIN_DOCUMENTS), ("targets", MIN_TARGETS)):
        # A comparison of two measurements lacks some of these columns.
        if prefix + counted in summary:
            has_few |= summary[prefix + counted] < minimum
    return has_few
