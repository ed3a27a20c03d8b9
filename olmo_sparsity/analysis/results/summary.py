"""Describe a measurement for a terminal: a conclusion in one sentence, then the tables behind it.

`describe` is the main entry. The conclusion is that of conclusion.py. The page of report.py uses
the same sentences. Never imports torch."""

from __future__ import annotations

from typing import Any

import pandas as pd

from olmo_sparsity.analysis.interpretation import Interpretation, interpretation_of
from olmo_sparsity.analysis.results.by_distance import split_by_distance
from olmo_sparsity.analysis.results.columns import HEADINGS, ShownColumn, terminal_columns
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
    warnings_of_few,
)
from olmo_sparsity.analysis.results.intervals import BOOTSTRAP, FEW_FOR_BOOTSTRAP
from olmo_sparsity.analysis.results.loss_statistics import INDUCTION_SHARE
from olmo_sparsity.analysis.results.meta import SETS, main_set
from olmo_sparsity.analysis.results.reported import as_reported
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.statistics import ENOUGH, GROUPS, summarize
from olmo_sparsity.analysis.results.target_rows import KEYS, losses_of_targets
from olmo_sparsity.analysis.results.view import (
    format_interval,
    format_number,
    num_of,
    quoted,
    spell,
    with_interval,
)

FEW_NATS = 0.1
"""With a smaller mean gap, the summary warns of ratios to it."""

LOUD_NOISE = 0.02
"""Nats of noise from other rows of a batch; above, the summary reports it."""

INTERVALS = (
    f"Intervals are {BOOTSTRAP}. With fewer than {FEW_FOR_BOOTSTRAP} documents of targets or of "
    "placebo targets, those of net excess are by Student's t."
)
"""The sentence about intervals on the page and in docs/measure.md. For one table,
`describe_intervals` says which of the two kinds it has."""

# --- the whole measurement ------------------------------------------------------------------------


def describe(results: Results) -> str:
    """Describe a measurement for a terminal: its conclusion, then how it was made, then tables."""
    summary = summary_in_order_of_units(results)
    name = main_set(summary.target_set)
    lines = [*_describe_conditions(results), _describe_losses(results)]
    if name is None:
        return "\n".join(lines)

    lines.append(describe_gap(results))
    main_rows = summary[summary.target_set == name]
    lines.append(format_summary(main_rows, results.spell_set(name)))
    lines += _format_distances(results)
    lines += _format_groups(results, main_rows.iloc[0])
    lines += _format_other_sets(results, summary, name)
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


def describe_parts(results: Results) -> str:
    """Say how many documents were split into how many parts, and which of the two are counted."""
    total = sum(map(len, results.parts.values()))
    return (
        f"{num_of(len(results.parts), 'document')} in {num_of(total, 'part')} (--split-long). Rows "
        "of targets count whole documents, and their intervals resample whole documents; lines of "
        "losses count parts. Unrelated texts come from other documents"
    )


def _describe_losses(results: Results) -> str:
    """Describe the losses of all measured tokens."""
    ppl = results.meta.longppl
    key_tokens = "no key tokens"
    if ppl["longppl"] is not None:
        key_tokens = f"LongPPL {ppl['longppl']:.2f}"
    losses = "losses"
    if results.meta.targets.get("only_named"):
        losses = "losses of named targets' blocks"
    table = results.losses
    documents = num_of(table.document.nunique(), "measured document")
    halves = ", both halves" if results.meta.targets.get("threshold") is not None else ""
    # The mean gap is in the line of the reported documents alone, as in the figure.
    return (
        f"{losses}, {len(table):,} tokens of {documents}{halves}: L_short "
        f"{table.loss_short.mean():.3f}, perplexity {ppl['ppl']:.2f}, {key_tokens} "
        f"({ppl['key_share']:.2%} of these tokens)"
    )


def _format_groups(results: Results, first: pd.Series) -> list[str]:
    """Return the row `first` of the summary again for each group of documents (`--group-field`),
    computed over the documents of this group alone. Groups without enough targets for an interval
    are counted only."""
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
        parts = None if is_one_document else results.parts
        rows = summarize(losses, targets, recovery, parts)
        if len(rows):
            rows = rows[(rows[GROUPS] == first[GROUPS]).all(axis=1)]
        if not len(rows) or describe_few(rows.iloc[0], has_net=False):
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
    """Return a table that splits the quoted row by how far back its units are. Where units are is
    no result by itself, so that random units are beside them."""
    row = results.summary.loc[quoted_row_of(results)]
    bins = split_by_distance(results, row)
    if bins.empty:
        return []
    lines = [f"{describe_distances(row)}:"]
    headings = ("tokens back", "units here", "random units", *map(HEADINGS.get, SPLIT))
    widths = (17, 10, 12, 8, 9, 7, 14, 22)
    cells = [tuple(map(str, headings)), *cells_of_distances(bins)]
    for line in cells:
        lines.append(
            "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        )
    return lines


SPLIT = ("recovery", "unrelated", "excess", "placebo", "net")
"""Columns of the summary that are split by distance."""


def describe_distances(row: Any) -> str:
    """Return the title of the table that splits a row by distance."""
    what = f"k = {row['k']} of {row['units']} by {spell(row['selector'])}"
    return f"how far back, {what}; the lines add up to the row"


def cells_of_distances(bins: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return the table of `split_by_distance` as texts, a tuple for each line."""
    lines = []
    for part in bins.to_dict("records"):
        shares = [
            "–" if pd.isna(part[name]) else f"{part[name]:.0%}"
            for name in ("share_units", "share_random")
        ]
        values = [format_number(part[name], minus="-") for name in ("recovery", "unrelated")]
        values += [format_number(part[name], sign="+", minus="-") for name in ("excess", "placebo")]
        net = with_interval(part["net"], part["net_low"], part["net_high"])
        place = f"{part['first']:,} to {part['last']:,}"
        lines.append((place, *shares, *values, net))
    return lines


def _format_other_sets(results: Results, summary: pd.DataFrame, main: str) -> list[str]:
    """Return a table for each target set besides the main one. It has only the rows of the first
    selector with the smallest k."""
    is_brief = (summary.selector == results.meta.selectors[0]) & (summary.k == summary.k.min())
    has_placebo = has_net(summary[summary.target_set == main])
    tables = []
    for target_set in dict.fromkeys([*SETS, *summary.target_set]):
        rows = summary[is_brief & (summary.target_set == target_set)]
        if target_set == main or not len(rows):
            continue
        # With or without the placebo, the columns differ.
        header = has_net(rows) != has_placebo
        has_placebo = has_net(rows)
        tables.append(format_summary(rows, results.spell_set(target_set), header))
    return tables


# --- what to know about the numbers ---------------------------------------------------------------


def describe_intervals(row: Any, has_net: bool) -> str:
    """Say which intervals a table has: by a bootstrap, by Student's t, or none.

    `row`: a row of the summary. `has_net`: whether the table shows net excess, which has an
    interval only if the placebo has enough targets."""
    warnings = warnings_of_few(row, has_net)
    if describe_few(row, has_net):
        return "; ".join(warnings)
    text = f"intervals: {BOOTSTRAP}"
    num_documents = row.num_documents
    if has_net:
        num_documents = min(num_documents, row.num_placebo_documents)
        if num_documents < FEW_FOR_BOOTSTRAP:
            text += f"; of net excess by Student's t, over {num_documents} documents"
    return "; ".join([text, *warnings])


def describe_noise(model: dict[str, Any]) -> str:
    """Warn of losses that depend on the other rows of a batch. Return an empty text if they hardly
    do. `model`: the section of meta.json."""
    nats = model.get("batch_noise", 0.0)
    if nats < LOUD_NOISE:
        return ""
    return (
        f"this model's losses change by up to {nats:.2f} nats with the other rows of a batch; "
        "smaller differences mean nothing"
    )


def describe_gap(results: Results) -> str:
    """Describe the gaps of the chosen targets, of all targets, and with an unrelated text."""
    rows = results.reported
    if not len(rows):
        return "no target is reported"
    gap = rows.loss_short - rows.loss_long
    placebo_gap = rows.loss_short - rows.placebo_loss_long
    threshold = results.meta.targets.get("threshold")
    if threshold is None:
        targets = results.targets[results.targets.distant_part == "document"]
        main = targets[targets.target_set == main_set(targets.target_set)]
        chosen = losses_of_targets(results.losses, main).merge(main[KEYS], on=KEYS)
        chosen_gap = chosen.loss_short - chosen.loss_long
        chosen_by = "evaluated"
        by_placebo = ""
    else:
        # All targets that pass the threshold, evaluated or not.
        chosen_gap = gap[gap >= threshold]
        chosen_by = "of largest gap"
        placebo_share = (placebo_gap >= threshold).mean()
        by_placebo = (
            f"; an unrelated text gains as much ({threshold:.2f} nats) on {placebo_share:.1%}"
        )
    sample = results.meta.windows.get("sample", 1.0)
    estimated = f", estimated from a sample of {sample:.1%}," if sample < 1 else ""
    half = "reported half" if threshold is not None else "reported"
    return (
        f"{half}, {len(rows):,} tokens of {num_of(rows.document.nunique(), 'document')}: mean gap "
        f"{gap.mean():+.3f} nats; in total{estimated} distant text "
        f"{_describe_change(gap.sum() / sample)}, an unrelated text "
        f"{_describe_change(placebo_gap.sum() / sample)}; the {len(chosen_gap) / len(rows):.1%} "
        f"{chosen_by} gain {chosen_gap.sum() / sample:+,.0f}{by_placebo}"
    )


def _describe_change(nats: float) -> str:
    """Say what a text does to the loss. `nats`: by how much it falls."""
    changes = "reduces" if nats >= 0 else "raises"
    return f"{changes} the loss by {abs(nats):,.0f} nats"


def describe_induction(check: dict[str, Any], interpretation: Interpretation) -> str:
    """Describe the result of the induction check, and its consequence for the measurement."""
    lines = [
        f"induction: loss {check['loss_first']:.2f} on a passage, {check['loss_repeated']:.2f} "
        f"when it is repeated, a drop of {check['drop']:.2f} nats "
        f"({check['drop'] / max(check['loss_first'], 1e-9):.0%})"
    ]
    if not check["has_induction"]:
        lines += [
            f"  below {INDUCTION_SHARE:.0%}: this model copies little from its context. Copying",
            "  is most of what distant tokens give to models of text: read nats, not shares alone",
        ]
    elif interpretation.shows_alone:
        lines += [
            "  this model copies; a single distant token that is shown alone has no states of the",
            "  tokens before it: measure with spans (span:4), or contextual distant states, too",
        ]
    return "\n".join(lines)


def describe_sink(check: dict[str, Any]) -> str:
    """Warn that the measured model needs a prefix; empty if it does not, or has one. `check`: the
    sink check of meta.json."""
    if not check.get("needs_prefix"):
        return ""
    return (
        f"warning: no prefix precedes the windows, and any distant token raises this model's loss "
        f"by {check['harm']:.2f} nats ({check['harm_with_prefix']:+.2f} after a line break): the "
        r"numbers below are distorted; measure again with --prefix '\n'"
    )


# --- tables in a terminal -------------------------------------------------------------------------


def format_summary(rows: pd.DataFrame, title: str, header: bool = True) -> str:
    """Format the rows of one target set as a table, below lines on all of them. `columns.TERMINAL`
    lists the columns that it shows; the others are only in the stored table."""
    first = rows.iloc[0]
    has_placebo = has_net(rows)
    placebo = f"; {describe_placebo(first)}" if has_placebo else ""
    lines = [
        f"{title}: {num_of(first.num_targets, 'target')} in "
        f"{num_of(first.num_documents, 'document')}, mean gap {first.gap:.2f} nats{placebo}"
    ]
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
    """Return a line for each row of the table. `header`: whether a line of headings precedes
    them."""
    shown_columns = terminal_columns(has_placebo)
    lines = []
    if header:
        headings = ""
        for _, display in shown_columns:
            headings += f"  {display.heading:>{display.width}}"
        lines.append(f"{'selector':<16} {'units':<8}{'k':>3}{headings}")

    cells_by_column = [_format_cells(rows, shown) for shown in shown_columns]
    for row_number, row in enumerate(rows.itertuples()):
        values = ""
        for (_, display), cells in zip(shown_columns, cells_by_column, strict=True):
            values += f"  {cells[row_number]:>{display.width}}"
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
