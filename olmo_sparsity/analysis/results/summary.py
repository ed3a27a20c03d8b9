"""Summarize a measurement in a few lines for a terminal. Never imports torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.interpretation import Interpretation, interpretation_of
from olmo_sparsity.analysis.results.columns import COLUMN
from olmo_sparsity.analysis.results.meta import SETS, main_set
from olmo_sparsity.analysis.results.results import Results, compare, differing_conditions, transfer
from olmo_sparsity.analysis.results.statistics import (
    ENOUGH,
    FEW_FOR_BOOTSTRAP,
    GROUPS,
    INDUCTION_SHARE,
    KEYS,
    MIN_DOCUMENTS,
    MIN_TARGETS,
    as_reported,
    has_few_targets,
    losses_of_targets,
    summarize,
)
from olmo_sparsity.analysis.results.view import interval, num_of, number, quoted, spell

with_interval = partial(interval, sign="+", minus="-")  # as a terminal shows it
FEW_DOCUMENTS = 10
FEW_NATS = 0.1
LOUD_NOISE = 0.02  # nats of noise from other rows of a batch; above, the summary reports it
MOST_WITH_ALL = 0.5
"""From this share of targets whose k units are all distant tokens, no verdict is given."""

BY_OUTCOME = ("gap",)  # target sets that are selected by what distant text does to the prediction


def in_order(results: Results) -> pd.DataFrame:
    """Return the summary with its units in the order in which the user named them."""
    order = {units: number for number, units in enumerate(results.meta.units)}
    rows = results.summary
    return rows.sort_values("units", key=lambda units: units.map(order), kind="stable")


def describe(results: Results) -> str:
    """Describe a measurement for a terminal: its conclusion, then how it was made, then tables."""
    meta = results.meta
    summary = in_order(results)
    name = main_set(summary.target_set)
    interpretation = interpretation_of(meta.windows["distant_states"])
    windows = (
        f"long {meta.windows['long']}, local {meta.windows['short']}, "
        f"stride {meta.windows['stride']}, distant units {interpretation.description}"
    )
    lines = [f"{meta.model['name']} on {meta.data['source']}: {windows}"]
    remarks = (results.missing, describe_noise(meta.model), describe_sink(meta.sink))
    lines += [text for text in remarks if text]
    if left_out := meta.counts.get("documents_trained_on"):
        lines.append(f"{left_out:,} documents left out: the model was trained on them")
    if meta.induction:
        lines.append(describe_induction(meta.induction, interpretation))
    for row in meta.reliability:
        shown = with_interval(row["lds"], row["lds_low"], row["lds_high"], sign="")
        lines.append(
            f"reliability of {meta.windows['replacements']} unrelated texts ({row['units']}): "
            f"{shown} (effects of groups by two halves, rank correlation, Spearman–Brown)"
        )
    ppl = meta.longppl
    key = "no key tokens" if ppl["longppl"] is None else f"LongPPL {ppl['longppl']:.2f}"
    gap = results.losses.loss_short - results.losses.loss_long
    losses = "losses of named targets' blocks" if meta.targets.get("only_named") else "losses"
    lines.append(
        f"{losses}: L_short {results.losses.loss_short.mean():.3f}, mean gap {gap.mean():+.3f}, "
        f"perplexity {ppl['ppl']:.2f}, {key} ({ppl['key_share']:.2%} of {len(gap):,} targets)"
    )
    if name is None:
        return "\n".join(lines)
    lines.append(describe_gap(results))
    main = summary[summary.target_set == name]
    lines.append(format_summary(main, results.spell_set(name)))
    lines += _by_group(results, main.iloc[0])
    # Of the other sets, only the first selector with the smallest k.
    briefly = summary[(summary.selector == meta.selectors[0]) & (summary.k == summary.k.min())]
    has_placebo = has_net(main)
    for target_set in dict.fromkeys([*SETS, *summary.target_set]):
        rows = briefly[briefly.target_set == target_set]
        if len(rows) and target_set != name:
            # With or without the placebo, the columns differ.
            header = has_net(rows) != has_placebo
            has_placebo = has_net(rows)
            lines.append(format_summary(rows, results.spell_set(target_set), header))
    without = sorted(set(summary.target_set[summary.net.notna()]) - set(BY_OUTCOME))
    if without:
        lines.append(
            f"no net excess of {', '.join(without)}: these targets were not selected by their gap, "
            "so that selection has no effect to subtract"
        )
    return "\n".join([conclude(results), "", *lines])


def _by_group(results: Results, first: pd.Series) -> list[str]:
    """Return a row of the table once more for the documents of each group."""
    lines = []
    for name, documents in results.meta.data.get("groups", {}).items():
        tables = (results.losses, results.targets, results.recovery)
        rows = summarize(*(table[table.document.isin(documents)] for table in tables))
        rows = rows[(rows[GROUPS] == first[GROUPS]).all(axis=1)] if len(rows) else rows
        if len(rows):
            title = quoted(name) or "no group"
            lines.append(format_summary(as_reported(rows), title, header=False))
    return lines


def has_net(rows: pd.DataFrame) -> bool:
    """Return whether net excess means something. The placebo of targets that were not selected by
    their outcome shows no effect of selection, and their net excess would be below 0 by
    construction."""
    return bool(rows.net.notna().any()) and set(rows.target_set) <= set(BY_OUTCOME)


def quoted_row_of(results: Results) -> Any:
    """Return the index, in `summary`, of the row that the conclusion is about: of the main target
    set the first selector with the smallest k, of the units that were named first."""
    summary = in_order(results)
    name = main_set(summary.target_set)
    rows = summary[(summary.target_set == name) & (summary.selector == results.meta.selectors[0])]
    return rows.sort_values("k", kind="stable").index[0]


def conclude(results: Results) -> str:
    """Return one sentence: on what the main set of targets depends, by how much, and whether to
    believe it."""
    meta, summary = results.meta, in_order(results)
    name = main_set(summary.target_set)
    if name is None:
        return "No target was evaluated."
    rows = summary[(summary.target_set == name) & (summary.selector == meta.selectors[0])]
    row = rows.sort_values("k", kind="stable").iloc[0]  # of the first units
    if not row.gap > 0:
        return (
            f"{meta.model['name']}: all distant tokens together do not lower the loss of these "
            f"{row.num_targets:,} targets (mean gap {row.gap:+.2f} nats), so a few of them have "
            "nothing to recover."
        )
    units = row.units if row.k > 1 or row.units.startswith("span") else row.units.removesuffix("s")
    recover = "recovers" if row.k == 1 else "recover"
    chosen_by = meta.targets.get("chosen_by")
    chooser = f", selected with {chosen_by['name']}," if chosen_by else ""
    text = (
        f"{meta.model['name']}: {row.k} distant {units} by {spell(row.selector)}{chooser} "
        f"{recover} {row.recovery:.2f} of the gap of {num_of(row.num_targets, 'target')}"
    )
    if pd.notna(row.get("placebo_recovery")):
        text += f" (of placebo targets {row.placebo_recovery:.2f})"
    if row.get("share_all", 0.0) >= MOST_WITH_ALL:
        return (
            f"{text}; no verdict: at {row.share_all:.0%} of the targets these are all distant "
            "tokens, so recovery is 1 by construction; pass smaller units or k."
        )
    if few := describe_few(row, has_net(rows)):
        return f"{text}; no verdict: {few}."
    if rows.excess.isna().all() and pd.notna(row.low):  # no unrelated text was ranked
        return f"{text} ({with_interval(row.recovery, row.low, row.high, sign='')})."
    headline = _headline(row, has_net(rows))
    low, high = row[f"{headline}_low"], row[f"{headline}_high"]
    if pd.isna(low):
        return f"{text}; no verdict: too small gaps for an interval."
    if low > 0:
        verdict = "the targets depend on it beyond chance"
    elif high < 0:
        verdict = "less than by chance"
    else:
        verdict = "cannot be told from chance"
    doubts = []
    if row.num_documents < FEW_DOCUMENTS:
        doubts.append(f"{row.num_documents} documents are too few to trust the interval")
    if meta.induction and not meta.induction["has_induction"]:
        doubts.append("the model copies little from its context")
    if row.get("share_all", 0.0) > 0:
        doubts.append(f"at {row.share_all:.0%} of the targets these are all distant tokens")
    but = f"; but {' and '.join(doubts)}" if doubts else ""
    shown = with_interval(row[headline], low, high)
    # There is no column of nats at equal gaps.
    nats = row.excess_nats if headline == "excess" else row.net_nats
    if headline == "net_equal":
        shown += f" (at all gaps {row.net:+.2f}, {nats:+.2f} nats a target)"
    else:
        shown += f" ({nats:+.2f} nats a target)"
    return f"{text}; {_HEADLINES[headline]} {shown}: {verdict}{but}."


_HEADLINES = {
    "net_equal": "net excess at equal gaps",
    "net": "net excess",
    "excess": "excess over unrelated text",
}


def _headline(row: pd.Series, has_net: bool) -> str:
    """Return the column that decides the verdict: the strictest that this measurement has."""
    if not has_net or pd.isna(row.net):
        return "excess"
    return "net" if pd.isna(row.net_equal) else "net_equal"


def describe_few(row: Any, has_net: bool) -> str:
    """Return why a row of the summary has too few targets for an interval; empty if it has enough.
    `has_net`: its placebo targets count, too."""
    minimum = f"{MIN_TARGETS} in {MIN_DOCUMENTS} documents are the minimum"
    frame = pd.DataFrame([row])
    if has_few_targets(frame).any():
        documents = num_of(row["num_documents"], "document")
        return f"{num_of(row['num_targets'], 'target')} in {documents}; {minimum}"
    if has_net and has_few_targets(frame, "placebo_").any():
        documents = num_of(row["num_placebo_documents"], "document")
        targets = num_of(row["num_placebo_targets"], "placebo target")
        return f"{targets} in {documents}; {minimum}"
    return ""


def describe_noise(model: dict[str, Any]) -> str:
    """Warn of noise between rows of a batch. `model`: from meta.json."""
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
    targets = results.targets[results.targets.distant_part == "document"]
    main = targets[targets.target_set == main_set(targets.target_set)]
    chosen = losses_of_targets(results.losses, main).merge(main[KEYS], on=KEYS)
    if not len(rows):
        return "no target is reported"
    least = results.meta.targets.get("threshold")
    gap = rows.loss_short - rows.loss_long
    # With a threshold, all targets that pass it, evaluated or not.
    of_chosen = chosen.loss_short - chosen.loss_long if least is None else gap[gap >= least]
    placebo = rows.loss_short - rows.placebo_loss_long
    by_placebo = ""
    if least is not None:
        share = (placebo >= least).mean()
        by_placebo = f"; an unrelated text gains as much ({least:.2f} nats) on {share:.1%}"
    chosen_by = "evaluated" if least is None else "of largest gap"
    share = results.meta.windows.get("sample", 1.0)
    over = f"all {len(rows):,} reported targets"
    if share < 1:
        over = f"the reported documents (estimated from {len(rows):,} targets, {share:.1%} of all)"
    total = gap.sum() / share
    changes = "reduces" if total >= 0 else "raises"
    return (
        f"distant text {changes} the loss by {abs(total):,.0f} nats over {over}, an unrelated text "
        f"{placebo.sum() / share:+,.0f}; the {len(of_chosen) / len(rows):.1%} {chosen_by} gain "
        f"{of_chosen.sum() / share:+,.0f}{by_placebo}"
    )


def describe_induction(found: dict[str, Any], interpretation: Interpretation) -> str:
    """Describe the result of the induction check, and its consequence for the measurement."""
    lines = [
        f"induction: loss {found['loss_first']:.2f} on a passage, {found['loss_repeated']:.2f} "
        f"when it is repeated, a drop of {found['drop']:.2f} nats "
        f"({found['drop'] / max(found['loss_first'], 1e-9):.0%})"
    ]
    if not found["has_induction"]:
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


def describe_sink(found: dict[str, Any]) -> str:
    """Warn that the measured model needs a prefix; empty if it does not, or has one. `found`: from
    meta.json."""
    if not found.get("needs_prefix"):
        return ""
    return (
        f"warning: no prefix precedes the windows, and any distant token raises this model's loss "
        f"by {found['harm']:.2f} nats ({found['harm_with_prefix']:+.2f} after a line break): the "
        r"numbers below are distorted; measure again with --prefix '\n'"
    )


_WIDTHS = {
    "recovery": 19,
    "placebo_recovery": 7,
    "distance": 6,
    "excess": 21,
    "net": 22,
    "net_equal": 22,
    "removal": 19,
    "excess_nats": 6,
}
"""Characters of each column in a terminal."""


def format_summary(rows: pd.DataFrame, title: str, header: bool = True) -> str:
    """Format the rows of one target set. `placebo`: recovery at placebo targets; `back`: the median
    distance of the units; `excess`: recovery minus an unrelated text's; `net`: excess minus the
    placebo's; `equal gaps`: the same, own targets weighted to gaps as the placebo's targets have.
    Where net excess means nothing: `removal`, and excess in `nats`. The other columns are in the
    table `summary`."""
    first, has_placebo = rows.iloc[0], has_net(rows)
    lines = [
        f"{title}: {num_of(first.num_targets, 'target')} in "
        f"{num_of(first.num_documents, 'document')}, mean gap {first.gap:.2f} nats"
        + (f"; {describe_placebo(first)}" if has_placebo else "")
    ]
    if pd.notna(first.mean_ratio):
        lines.append(
            f"  {first.selector}, k = {first.k}: mean of ratios {first.mean_ratio:.2f}, "
            f"{first.share_enough:.0%} of targets at {ENOUGH} or more"
        )
    if first.gap < FEW_NATS:
        lines.append(f"  below {FEW_NATS} nats ratios to the gap say little; compare in nats")
    few = describe_few(first, has_placebo)
    if few:
        lines.append(f"  no intervals: {few}")
    elif first.num_documents < FEW_DOCUMENTS:
        lines.append("  intervals are over documents, which are too few to trust them")
    if "share_all" in rows and (rows.share_all > 0).any():
        lines.append(
            "  *: all distant tokens at some targets, where recovery is 1 by construction "
            "(share_all in the table summary)"
        )

    def cells(name: str, sign: str = "+") -> list[str]:
        values = rows[[*COLUMN[name].names]].to_numpy(float)
        return [with_interval(value, low, high, sign=sign) for value, low, high in values]

    shown = {"recovery": cells("recovery", sign="")}
    shown["placebo_recovery"] = _numbers(rows, "placebo_recovery", digits=2)
    shown["excess"] = cells("excess")
    if has_placebo:
        shown["net"] = cells("net")
        shown["net_equal"] = cells("net_equal")
    else:
        shown["removal"] = cells("removal", sign="")
        shown["excess_nats"] = [
            "–" if pd.isna(value) else f"{value:+.2f}" for value in rows.excess_nats
        ]
    shown["distance"] = _numbers(rows, "distance", digits=0)
    if header:
        head = "".join(f"  {COLUMN[name].terminal:>{_WIDTHS[name]}}" for name in shown)
        lines.append(f"{'selector':<16} {'units':<8}{'k':>3}{head}")
    for index, row in enumerate(rows.itertuples()):
        values = "".join(f"  {column[index]:>{_WIDTHS[name]}}" for name, column in shown.items())
        mark = "*" if getattr(row, "share_all", 0.0) > 0 else ""
        lines.append(f"{row.selector:<16} {row.units:<8}{f'{mark}{row.k}':>3}{values}")
    return "\n".join(lines)


def _numbers(rows: pd.DataFrame, name: str, digits: int) -> list[str]:
    """Return a column without intervals; a summary by group lacks some."""
    if name not in rows:
        return ["–"] * len(rows)
    return [number(float(value), digits, minus="-") for value in rows[name]]


def describe_placebo(row: Any) -> str:
    few = min(row.num_documents, row.num_placebo_documents) < FEW_FOR_BOOTSTRAP
    documents = num_of(row.num_placebo_documents, "document")
    said = f"{row.num_placebo_targets:,} of the placebo in {documents}"
    return f"{said} (fewer than {FEW_FOR_BOOTSTRAP}: t-based intervals)" if few else said


def describe_comparison(
    first: Results, second: Results, transfers: bool
) -> tuple[pd.DataFrame, str]:
    """The table of `transfer`, or else of `compare`, and its rows for a terminal."""
    names = [str(result.meta.model["name"]) for result in (first, second)]
    if transfers:
        table, columns = transfer(first, second), ["recovery", "excess", "removal", "excess_nats"]
        said = f"mean of both directions: {names[0]} and {names[1]}, each by units of the other"
    else:
        table, columns = compare(first, second), ["net", "net_equal", "net_nats"]
        said = f"net excess: {names[0]} minus {names[1]}"
    differing = differing_conditions(first, second)
    if differing:
        shown_differences = [f"{name} {one} and {two}" for name, (one, two) in differing.items()]
        said += f"\nmeasured with different {'; '.join(shown_differences)}"
    width = max(map(len, table.target_set))
    headings = "".join(f"  {name.replace('_', ' '):>22}" for name in columns) + "  documents"
    lines = [said, f"{'targets':<{width}} {'selector':<16} {'units':<8}{'k':>3}{headings}"]
    counts = [name for name in ("num_documents", "num_placebo_documents") if name in table]
    for row in table.to_dict("records"):
        shown = (
            with_interval(row[n], row[f"{n}_low"], row[f"{n}_high"], digits=2 + n.endswith("nats"))
            for n in columns
        )
        about = f"{row['target_set']:<{width}} {row['selector']:<16} {row['units']:<8}{row['k']:>3}"
        documents = " / ".join(str(row[name]) for name in counts)
        lines.append(about + "".join(f"  {cell:>22}" for cell in shown) + f"  {documents:>9}")
    if not transfers and table[counts][table.net_nats.notna()].min(axis=None) < FEW_FOR_BOOTSTRAP:
        lines.append(f"fewer than {FEW_FOR_BOOTSTRAP} documents (own / placebo): t-based intervals")
    return table, "\n".join(lines)
