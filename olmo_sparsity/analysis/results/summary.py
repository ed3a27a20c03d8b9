"""Describe a measurement for a terminal: a conclusion in one sentence, then the tables behind it.

    the conclusion                                    conclusion.py
    model, text, windows, checks, losses, gaps        notes.py
    a table of the main target set                    terminal_table.py
    the quoted row by distance                        by_distance.py
    the quoted row for each group of documents
    a short table for each other target set

`describe` is the entry point. Never imports torch.
"""

from __future__ import annotations

import pandas as pd

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.results.by_distance import (
    columns_of_distances,
    describe_distances,
    split_by_distance,
)
from olmo_sparsity.analysis.results.conclusion import (
    conclude,
    quoted_row_of,
    summary_in_order_of_units,
)
from olmo_sparsity.analysis.results.doubts import (
    MINIMUM,
    SETS_BY_OUTCOME,
    describe_few,
    has_net,
)
from olmo_sparsity.analysis.results.meta import SETS, main_set
from olmo_sparsity.analysis.results.notes import (
    describe_gap,
    describe_induction,
    describe_losses,
    describe_noise,
    describe_parts,
    describe_sink,
)
from olmo_sparsity.analysis.results.reported import as_reported
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.statistics import GROUPS, summarize
from olmo_sparsity.analysis.results.terminal_table import format_summary
from olmo_sparsity.analysis.results.view import (
    num_of,
    quoted,
    with_interval,
)


def describe(results: Results) -> str:
    """Describe a measurement for a terminal: its conclusion, then how it was made, then tables."""
    summary = summary_in_order_of_units(results)
    name = main_set(summary.target_set)
    lines = [*_describe_conditions(results), describe_losses(results)]
    # A measurement may have losses, but no target with a large gap.
    if name is None:
        return "\n".join(lines)

    lines.append(describe_gap(results))
    main_rows = summary[summary.target_set == name]
    lines.append(format_summary(main_rows, results.spell_set(name)))
    lines += _format_distances(results)
    lines += _format_groups(results, main_rows.iloc[0])
    lines += _format_other_sets(results, summary, name)
    # Their net excess is stored, but neither shown nor meaningful; see `doubts.has_net`.
    sets_without_net = set(summary.target_set[summary.net.notna()]) - set(SETS_BY_OUTCOME)
    if sets_without_net:
        lines.append(
            f"no net excess of {', '.join(sorted(sets_without_net))}: these targets were not "
            "selected by their gap, so that selection has no effect to subtract"
        )
    return "\n".join([conclude(results), "", *lines])


def _describe_conditions(results: Results) -> list[str]:
    """Return lines on model, text and windows, and on what makes the numbers doubtful."""
    meta = results.meta
    interpretation = interpretation_of(meta.windows["distant_states"])
    windows = (
        f"long {meta.windows['long']}, local {meta.windows['short']}, "
        f"stride {meta.windows['stride']}, distant units {interpretation.description}"
    )
    lines = [f"{meta.model['name']} on {meta.data['source']}: {windows}"]
    remarks = (results.missing, describe_noise(meta.model), describe_sink(meta.sink))
    lines += [text for text in remarks if text]
    if "parts" in meta.data:
        lines.append(describe_parts(results))
    num_trained_on = meta.counts.get("documents_trained_on")
    if num_trained_on:
        lines.append(f"{num_trained_on:,} documents left out: the model was trained on them")
    if meta.induction:
        lines.append(describe_induction(meta.induction, interpretation))
    for row in meta.reliability:
        shown = with_interval(row["lds"], row["lds_low"], row["lds_high"], sign="")
        lines.append(
            f"reliability of {meta.windows['replacements']} unrelated texts ({row['units']}): "
            f"{shown} (effects of groups by two halves, rank correlation, Spearman–Brown)"
        )
    return lines


def _format_groups(results: Results, first: pd.Series) -> list[str]:
    """Return a table for each group of documents (`--group-field`): the row `first` of the summary,
    computed over the documents of this group alone. Groups without enough targets for an interval
    are only counted."""
    lines = []
    num_hidden = 0
    groups = results.meta.data.get("groups", {})
    for name, documents in groups.items():
        losses, targets, recovery = (
            table[table.document.isin(documents)]
            for table in (results.losses, results.targets, results.recovery)
        )
        # A row of one document is about this document: its parts are then the sample.
        is_one_document = set(documents) <= set(results.parts.get(name, ()))
        split_documents = None if is_one_document else results.parts
        rows = summarize(losses, targets, recovery, split_documents)
        if len(rows):
            rows = rows[(rows[GROUPS] == first[GROUPS]).all(axis=1)]
        if not len(rows) or describe_few(rows.iloc[0], shows_net=False):
            num_hidden += 1
            continue
        title = quoted(name) or "no group"
        lines.append(format_summary(as_reported(rows), title, header=False))
    if num_hidden:
        lines.append(
            f"{num_hidden} of {num_of(len(groups), 'group')} are not shown: {MINIMUM} are needed"
        )
    return lines


def _format_distances(results: Results) -> list[str]:
    """Return the lines of a table that splits the quoted row by how far back its units are. Where
    units are is not a result by itself, so random units are shown beside them."""
    row = results.summary.loc[quoted_row_of(results)]
    bins = split_by_distance(results, row)
    if bins.empty:
        return []
    columns = columns_of_distances(bins)
    widths = (17, 10, 12, 8, 9, 7, 14, 22)
    lines = [f"{describe_distances(row)}:"]
    for cells in (tuple(columns), *zip(*columns.values(), strict=True)):
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join(padded))
    return lines


def _format_other_sets(results: Results, summary: pd.DataFrame, main: str) -> list[str]:
    """Return a short table for each target set except the main one: the rows of the first selector
    with the smallest k."""
    is_brief = (summary.selector == results.meta.selectors[0]) & (summary.k == summary.k.min())
    shows_net = has_net(summary[summary.target_set == main])
    tables = []
    for target_set in dict.fromkeys([*SETS, *summary.target_set]):
        rows = summary[is_brief & (summary.target_set == target_set)]
        if target_set == main or not len(rows):
            continue
        # With or without the placebo, the columns differ.
        header = has_net(rows) != shows_net
        shows_net = has_net(rows)
        tables.append(format_summary(rows, results.spell_set(target_set), header))
    return tables
