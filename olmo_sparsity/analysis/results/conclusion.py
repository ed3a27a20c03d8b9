"""Conclude a measurement in one sentence: do the targets depend on their distant text, or may it be
chance?

    demo: 1 distant token by add one screened recovers 0.94 of the gap of 70 targets (of placebo
    targets 0.68); net excess at equal gaps +0.35 [+0.06, +0.67] (at all gaps +0.49, +1.12 nats a
    target): the targets depend on it beyond chance.

The sentence is about one row of the summary, the row to quote: the main target set, the first
selector, the smallest k, and the units that the user named first. The verdict rests on the
strictest column that the measurement has, in the order of `_HEADLINES`.

`conclude` returns the sentence, and `quoted_row_of` the row; summary.py, report.py and
number_tables.py call them. Never imports torch.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from olmo_sparsity.analysis.results.doubts import (
    describe_few,
    describe_missing_placebo,
    has_net,
    warnings_of_few,
)
from olmo_sparsity.analysis.results.meta import Meta, main_set
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.view import num_of, spell, with_interval

LARGEST_SHARE_ALL = 0.5
"""From this share of targets whose k units are all distant tokens, no verdict is given."""


_HEADLINES = {
    "net_equal": "net excess at equal gaps",
    "net": "net excess",
    "excess": "excess over unrelated text",
}
"""The columns that may decide the verdict, the strictest first."""


def conclude(results: Results) -> str:
    """Return the conclusion as one sentence: how much the k units recover at the main targets, and
    whether that is more than chance, or why no verdict is possible."""
    if main_set(results.summary.target_set) is None:
        return "No target was evaluated."
    meta = results.meta
    rows = _rows_to_quote(results)
    row = rows.iloc[0]
    # Recovery is a fraction of the gap, so without a gap there is nothing to say it of.
    if pd.isna(row.gap) or row.gap <= 0:
        return (
            f"{meta.model['name']}: all distant tokens together do not lower the loss of these "
            f"{row.num_targets:,} targets (mean gap {row.gap:+.2f} nats), so a few of them have "
            "nothing to recover."
        )
    return f"{_describe_recovery(row, meta)}{_describe_verdict(rows, meta)}."


def _describe_recovery(row: pd.Series, meta: Meta) -> str:
    """Return the first part of the conclusion: how much of the gap the k units recover, and how
    much of it those of placebo targets do."""
    units = row.units
    if row.k == 1 and not units.startswith("span"):
        units = units.removesuffix("s")
    recover = "recovers" if row.k == 1 else "recover"
    chosen_by = meta.targets.get("chosen_by")
    chooser = f", selected with {chosen_by['name']}," if chosen_by else ""
    text = (
        f"{meta.model['name']}: {row.k} distant {units} by {spell(row.selector)}{chooser} "
        f"{recover} {row.recovery:.2f} of the gap of {num_of(row.num_targets, 'target')}"
    )
    if pd.notna(row.get("placebo_recovery")):
        text += f" (of placebo targets {row.placebo_recovery:.2f})"
    return text


def _describe_verdict(rows: pd.DataFrame, meta: Meta) -> str:
    """Return the second part of the conclusion, from the mark that joins it to the first part on:
    the effect and the verdict, or why there is none.

    Args:
        rows: The rows of `_rows_to_quote`, the first of which the verdict is about.
        meta: What was measured.
    """
    row = rows.iloc[0]
    shows_net = has_net(rows)
    if row.get("share_all", 0.0) >= LARGEST_SHARE_ALL:
        return (
            f"; no verdict: at {row.share_all:.0%} of the targets these are all distant "
            "tokens, so recovery is 1 by construction; pass smaller units or k"
        )
    # Without an interval, any difference may be chance.
    too_few = describe_few(row, shows_net)
    if too_few:
        return f"; no verdict: {too_few}"
    # Without an unrelated text recovery has nothing to be compared with, so no verdict follows.
    is_without_control = rows.excess.isna().all()
    if is_without_control and pd.notna(row.low):
        return f" ({with_interval(row.recovery, row.low, row.high, sign='')})"

    headline = _headline_column(row, shows_net)
    if pd.isna(row[f"{headline}_low"]):
        return "; no verdict: too small gaps for an interval"
    effect = _describe_effect(row, headline)
    doubts = _describe_doubts(row, meta)
    # A few documents have an interval, but too narrow a one to rest a verdict on.
    warnings = warnings_of_few(row, shows_net)
    if warnings:
        return f"; {effect}. No verdict: {', and '.join([*warnings, *doubts])}"
    verdict = f"; {effect}: {_verdict(row, headline)}"
    if doubts:
        verdict += f"; but {' and '.join(doubts)}"
    return verdict


def _headline_column(row: pd.Series, shows_net: bool) -> str:
    """Return the name of the column that decides the verdict: the strictest that has a value. Net
    excess decides only if it means something for these targets (`shows_net`)."""
    if not shows_net or pd.isna(row.net):
        return "excess"
    return "net" if pd.isna(row.net_equal) else "net_equal"


def _verdict(row: pd.Series, headline: str) -> str:
    """Return the verdict in words, by whether the interval of the column `headline` lies above 0,
    below it or around it."""
    if row[f"{headline}_low"] > 0:
        return "the targets depend on it beyond chance"
    if row[f"{headline}_high"] < 0:
        return "less than by chance"
    return "cannot be told from chance"


def _describe_effect(row: pd.Series, headline: str) -> str:
    """Return the value of the column `headline` with its interval, and in nats."""
    shown = with_interval(row[headline], row[f"{headline}_low"], row[f"{headline}_high"])
    # There is no column of nats at equal gaps.
    nats = row.excess_nats if headline == "excess" else row.net_nats
    if headline == "net_equal":
        shown += f" (at all gaps {row.net:+.2f}, {nats:+.2f} nats a target)"
    else:
        shown += f" ({nats:+.2f} nats a target)"
    return f"{_HEADLINES[headline]} {shown}"


def _describe_doubts(row: pd.Series, meta: Meta) -> list[str]:
    """Return reasons, besides few targets, to doubt a verdict, each a clause."""
    doubts = []
    missing_placebo = describe_missing_placebo(row, "choices" in meta.targets)
    if missing_placebo:
        doubts.append(missing_placebo)
    if meta.induction and not meta.induction["has_induction"]:
        doubts.append("the model copies little from its context")
    if row.get("share_all", 0.0) > 0:
        doubts.append(f"at {row.share_all:.0%} of the targets these are all distant tokens")
    return doubts


# --- the row to quote -----------------------------------------------------------------------------


def summary_in_order_of_units(results: Results) -> pd.DataFrame:
    """Return the summary with its units in the order in which the user named them."""
    order = {units: number for number, units in enumerate(results.meta.units)}
    rows = results.summary
    return rows.sort_values("units", key=lambda units: units.map(order), kind="stable")


def _rows_to_quote(results: Results) -> pd.DataFrame:
    """Return the rows of the main target set and the first selector. The first of them is the row
    to quote."""
    summary = summary_in_order_of_units(results)
    name = main_set(summary.target_set)
    rows = summary[(summary.target_set == name) & (summary.selector == results.meta.selectors[0])]
    return rows.sort_values("k", kind="stable")


def quoted_row_of(results: Results) -> Any:
    """Return the index, in `summary`, of the row to quote, which the conclusion is about."""
    return _rows_to_quote(results).index[0]
