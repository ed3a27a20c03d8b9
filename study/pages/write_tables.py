"""The pages of study/tables, written from the stored results: `python -m study.pages.write_tables`.

tables.yaml gives titles, captions, and which results a table shows. Here is a function for each
kind of table, of that name. A test fails when a page no longer follows from the results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.statistics import (
    ENOUGH,
    FEW_FOR_BOOTSTRAP,
    interval,
    net_differences,
    resample,
    resample_weights,
)
from olmo_sparsity.analysis.results.summary import FAR_STATES
from olmo_sparsity.io import write_atomically
from study.benchmarks import questions, reasoning
from study.pages.stored import (
    FIGURES,
    PAGES,
    RESULTS,
    ROOT,
    SHOWN,
    by_context,
    by_distance,
    mean_loss,
    measurements,
    other_table,
    others,
    read_all,
    read_by_part,
    read_counts,
    read_course,
    read_evaluations,
    read_kinds,
    read_ladder,
    read_meta,
    read_summary,
    scheme_losses,
    shown_part,
    stored_rows,
    task_rows,
    tasks,
)
from study.tasks.results import format_cell, format_table
from study.tasks.sparse_parity import SparseParity, count_relevant_ones
from study.tasks.trial import draw_test_samples
from study.theory.results import half_width

POSITIONS = {"pose": "RoPE + PoSE", "contiguous": "RoPE alone", "rope": "RoPE alone"}
HEAD = "<!-- Written by study/pages/write_tables.py from study/tables.yaml; change these. -->"


FEW = (
    f"†: fewer than {FEW_FOR_BOOTSTRAP} documents have targets, or placebo targets; this bootstrap "
    "interval is too narrow ([coverage](../../docs/results.md#how-far-can-intervals-be-trusted))."
)


def write_page(name: str) -> str:
    page = SHOWN["pages"][name]
    written = [HEAD, f"# Tables: {page['title']}", page["about"]]
    for of in page["tables"]:
        (kind,) = of.keys() - {"title", "caption"}
        written += [
            f"## {of['title']}",
            *filter(None, [of.get("caption")]),
            globals()[kind](**of[kind]),
        ]
    if any(" †" in text for text in written):
        written.insert(3, FEW)
    return "\n\n".join(written) + "\n"


def table(header: str, lines: Iterable[Iterable[str]], left: int = 1) -> str:
    """The first columns are words, those after them numbers."""
    names, rows = header.split(" | "), [list(line) for line in lines]
    assert all(len(row) == len(names) for row in rows), header
    rule = ["---"] * left + ["---:"] * (len(names) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, rule, *rows))


_ENDS = {
    "enrichment": ("low", "high"),
    "hit_rate": ("hit_low", "hit_high"),
    "excess_recovery": ("excess_low", "excess_high"),
}
"""Columns of a table that hold a number's interval, where they are not named after it."""


def shown(row: Any, column: str, form: str = "+.2f", scale: float = 1) -> str:
    """A number of a summary with its interval."""
    if math.isnan(row[column]):
        return "–"
    low, high = _ENDS.get(column, (f"{column}_low", f"{column}_high"))
    return f"{row[column] * scale:{form}} [{row[low] * scale:{form}}, {row[high] * scale:{form}}]"


def plain(number: float, form: str) -> str:
    return "–" if math.isnan(number) else f"{number:{form}}"


# --- measurements ---------------------------------------------------------------------------------


def at_millions(row: dict[str, Any], millions: list[float]) -> float | None:
    """Return the entry of `millions` that this evaluation reaches."""
    digits = 1 if any(isinstance(number, float) for number in millions) else 0
    trained = round(row["millions"], digits)
    return trained if trained in millions else None


def all_found(lines: list[Any], millions: list[float]) -> None:
    if len(lines) != len(millions):
        raise ValueError(f"of {millions}M tokens {len(lines)} were evaluated")


SETS = {
    "gap": "large gap",
    "gap_recurs": "… and recurs",
    "gap_new": "… and is new",
    "bigram": "bigram recurs",
    "names": "a name recurs",
    "every": "every token",
    "named": "last word",
}


def net_excess(
    of: dict[str, str], sets: tuple[str, ...] = ("gap",), ks: tuple[int, ...] = (1,)
) -> str:
    """Beyond the unrelated text, and beyond the placebo: add_one over all kinds of units."""
    names = ["target set", "model", "long window", "distant tokens", "units", "k"]
    numbers = ["recovery", "unrelated", "excess", "placebo", "**net**"]
    numbers += ["net at equal gaps", "net in nats", "targets", "placebo targets, documents"]
    lines = []
    for target_set, (name, model) in product(sets, of.items()):
        meta = read_meta(name)
        windows = [str(meta["windows"]["long"]), FAR_STATES[meta["windows"]["far_states"]]]
        for units, k in product(meta["units"], ks):
            row = read_summary(name, target_set, units).loc["add_one", k]
            row = row.reindex([*row.index, "placebo", "net", "net_equal", "net_nats"])
            row = row[~row.index.duplicated()]
            line = [SETS[target_set], model, *windows, units, str(k)]
            line += [shown(row, "recovery", ".2f"), plain(row.foreign, ".2f")]
            line += [plain(row[column], "+.2f") for column in ("excess", "placebo")]
            counts = read_counts(name, target_set, units, "add_one", k)
            nets = [shown(row, column) for column in ("net", "net_equal", "net_nats")]
            line += [marked(net, row, counts) for net in nets]
            lines.append([*line, f"{row.num_targets:.0f}", placebo_targets(counts)])
    # A name that all rows share is said in the caption, and a number that none has is left out.
    kept = [
        i
        for i in range(len(lines[0]))
        if (i >= len(names) and {t[i] for t in lines} != {"–"}) or len({t[i] for t in lines}) > 1
    ]
    header = " | ".join((names + numbers)[i] for i in kept)
    left = sum(i < len(names) for i in kept)
    return table(header, [[line[i] for i in kept] for line in lines], left)


def headline(of: dict[str, str], ks: tuple[int, ...]) -> str:
    """Recovery beside an unrelated text and the placebo: targets of large gap, or named ones."""
    lines = []
    for named, called in of.items():
        name, shown_units, rule = shown_part(named)
        windows = read_meta(name)["windows"]
        target_set = "gap" if "gap" in set(read_all(name).target_set) else "named"
        for units, k in product(shown_units, ks):
            rows = read_summary(name, target_set, units)
            if (rule, k) not in rows.index:
                continue
            row = rows.loc[rule, k]
            line = [called, f"{windows['long']} / {windows['short']}", units, str(k)]
            line += [shown(row, "recovery", ".2f"), shown(row, "foreign", ".2f")]
            line += [placebo_recovery(name, units, rule, k)]
            counts = read_counts(name, target_set, units, rule, k)
            line += [f"{counts['mean_ratio']:.2f}", f"{counts['share_enough']:.0%}"]
            line += [shown(row, "excess")]
            line += [marked(shown(row, column), row, counts) for column in ("net", "net_equal")]
            line += [shown(row, "removal", ".2f"), f"{row.gap:.2f}", f"{row.num_targets:.0f}"]
            lines.append([*line, f"{row.num_documents:.0f}", placebo_targets(counts)])
    names = (
        "text | windows | units | k | recovery | unrelated | at placebo targets | mean of ratios"
        f" | ≥ {ENOUGH} | excess | **net** | net at equal gaps | removal | gap, nats | targets"
    )
    return table(f"{names} | documents | placebo targets, documents", lines, left=4)


def marked(cell: str, row: Any, counts: dict[str, float]) -> str:
    """With a mark if few documents carry targets of both parts."""
    few = min(row.num_documents, counts["num_placebo_documents"]) < FEW_FOR_BOOTSTRAP
    return f"{cell} †" if few and cell != "–" else cell


def placebo_targets(counts: dict[str, float]) -> str:
    num = counts["num_placebo_targets"]
    return f"{num}, {counts['num_placebo_documents']}" if num else "–"


def placebo_recovery(name: str, units: str, rule: str, k: int) -> str:
    """Return the recovery by an unrelated text's best units at targets selected by its gap."""
    rows = stored_rows(name)
    rows = rows[(rows.target_set == "gap") & (rows.far_part == "placebo") & (rows.k == k)]
    rows = rows[(rows.units == units) & (rows.selector == rule)]
    return f"{rows.own.sum() / rows.gap.sum():.2f}" if len(rows) else "–"


def worth(name: str, of: dict[str, str]) -> str:
    """What distant text gives to all measured tokens, chosen by nothing."""
    lines, tables = [], other_table(name)
    for measured, called in of.items():
        rows = tables[tables.measurement == measured]
        counts = rows.drop(columns=["measurement", "document"]).astype(float)
        resampled = pd.DataFrame(resample(counts), columns=counts.columns)
        line = [called]
        for column, form, scale in (
            ("gain", "+.3f", 1),
            ("gain_unrelated", "+.3f", 1),
            ("key", ".1f", 100),
            ("key_unrelated", ".1f", 100),
            ("small", ".0f", 100),
        ):
            means = scale * resampled[column].to_numpy() / resampled.targets.to_numpy()
            value, low, high = interval(means[1:], means[0])
            line.append(f"{value:{form}} [{low:{form}}, {high:{form}}]")
        lines.append([*line, f"{counts.targets.sum():,.0f}", f"{len(rows)}"])
    names = "text, windows | gain, nats a token | of an unrelated text | key tokens, % | unrelated"
    return table(f"{names} | gain of at most 0.1 nats, % | tokens | documents", lines)


def worth_beside(name: str, of: dict[str, tuple[str, str]]) -> str:
    """The gain of one measurement minus that of another, on the documents that both read."""
    gains, lines = other_table(name).astype({"gain": float, "targets": float}), []
    for called, names in of.items():
        read = gains[gains.document < min(num_documents_read(name) for name in names)]
        sums = read.pivot(index="document", columns="measurement", values=["gain", "targets"])
        sums = sums[sums["targets"][list(names)].notna().any(axis=1)].fillna(0.0)
        one, other = (resample(sums[[("gain", name), ("targets", name)]]) for name in names)
        first, second = (sums_R2[:, 0] / sums_R2[:, 1] for sums_R2 in (one, other))
        value, low, high = interval((first - second)[1:], (first - second)[0])
        line = [called, f"{first[0]:+.3f}", f"{second[0]:+.3f}"]
        lines.append([*line, f"{value:+.2f} [{low:+.2f}, {high:+.2f}]", f"{len(sums)}"])
    header = "difference | gain of the first, nats a token | of the second | first − second"
    return table(f"{header} | documents", lines)


def beside(of: dict[str, list[Any]], ks: tuple[int, ...] = (1,)) -> str:
    """Two measurements (see `shown_part`); or, of a measurement beside itself, so many units and so
    many: with k of the first and k of the second."""
    lines = []
    for called, (name, other, *own_ks) in of.items():
        for k, other_k in [own_ks] if own_ks else zip(ks, ks, strict=True):
            row = difference(name, other, k, other_k)
            columns = ("recovery", "net", "net_equal")
            shown_k = f"{k}" if k == other_k else f"{k} − {other_k}"
            lines.append([called, shown_k, *(shown(row, column) for column in columns)])
    return table("difference | k | recovery | net | net at equal gaps", lines, left=2)


def distances(of: str) -> str:
    """How fast influence falls with distance."""
    lines = [
        [
            row.condition,
            shown(row, "p", ".2f"),
            *(f"{row[name]:.3f}" for name in ("error", "error_exponential", "far")),
            f"{row.texts:.0f}",
        ]
        for _, row in other_table(of).iterrows()
    ]
    return table("text | p | error | of an exponential | far | articles", lines)


def context(of: str, edges: list[int], ks: list[int]) -> str:
    """Recovery, excess and net excess of targets by the number of tokens before them."""
    lines = [
        [
            f"{row['from']:,} to {row['to']:,}",
            row.units,
            str(row.k),
            *(shown(row, column, ".2f") for column in ("recovery", "excess", "net")),
            f"{row.placebo:.2f}",
            f"{row.gap:.2f}",
            f"{row.targets}, {row.placebo_targets}",
        ]
        for _, row in by_context(of, edges, ks).iterrows()
    ]
    names = "recovery | excess | net | at placebo targets | gap, nats | targets, placebo"
    return table(f"context | units | k | {names}", lines, left=2)


def chosen_words(own: str, others: dict[str, tuple[str, str]]) -> str:
    """What one model recovers by words that another one chose, on the targets of both. `others`:
    the measurement by these words → that of their choice, and its name."""
    keys, lines = ["document", "target"], []

    def rows_of(name: str, k: int) -> pd.DataFrame:
        rows = stored_rows(name)
        rows = rows[(rows.target_set == "gap") & (rows.far_part == "document") & (rows.k == k)]
        return rows.set_index(keys)

    def cost(name: str) -> float:
        per_target = read_all(name).token_forwards_per_target.max()
        return per_target * read_meta(name)["model"]["num_parameters"]

    for name, (ranked, called) in {own: (own, "SmolLM2 itself"), **others}.items():
        for k in (1, 2, 4):
            rows = rows_of(name, k).join(rows_of(own, 1).own, rsuffix="_first", how="inner")
            sums_DC = rows.groupby("document")[["gap", "own", "own_first"]].sum().to_numpy()
            sums_RC = np.vstack([sums_DC.sum(0), resample_weights(len(sums_DC)) @ sums_DC])
            found = (sums_RC[:, 1], sums_RC[:, 1] - sums_RC[:, 2])
            ends = [interval(v[1:], v[0]) for v in (n / sums_RC[:, 0] for n in found)]
            line = [called, str(k), *("{:.2f} [{:.2f}, {:.2f}]".format(*e) for e in ends)]
            lines.append([*line, f"{cost(ranked) / cost(own):.3f}", f"{len(rows)}"])
    return table("chosen by | k | recovery | difference | cost | targets", lines, left=2)


@cache
def difference(name: str, other: str, k: int, other_k: int) -> dict[str, float]:
    """Return a measurement minus another on the documents of both: targets of large gap, whatever
    the units and the selector. Documents are resampled for both at once."""
    num_documents = min(num_documents_read(one.partition(":")[0]) for one in (name, other))

    def rows_of(one: str, at: int) -> pd.DataFrame:
        called, units, rule = shown_part(one)
        rows = stored_rows(called)
        rows = rows[(rows.selector == rule) & (rows.document < num_documents)]
        rows = rows[(rows.k == at) & rows.units.isin(units)]
        return rows.assign(units="all", selector="add_one", k=k)

    first, second = rows_of(name, k), rows_of(other, other_k)
    nets = net_differences(first, second).set_index(["target_set", "k"])
    return {**nets.loc["gap", k], **recovery_difference(first, second, k)}


def num_documents_read(name: str) -> int:
    """Return how many documents a measurement read, with those too short to be measured: a
    document keeps its place among them."""
    counts = read_meta(name)["counts"]
    if counts["documents_left"]:
        raise ValueError(f"{name} is partial: which documents it measured is not stored")
    return int(counts["documents_measured"] + counts["documents_too_short"])


def recovery_difference(first: pd.DataFrame, second: pd.DataFrame, k: int) -> dict[str, float]:
    own = [
        rows[(rows.far_part == "document") & (rows.target_set == "gap") & (rows.k == k)]
        for rows in (first, second)
    ]
    documents = np.union1d(own[0].document, own[1].document)
    sums = (
        resample(rows.groupby("document")[["own", "gap"]].sum().reindex(documents, fill_value=0.0))
        for rows in own
    )
    one, other = (sums_R2[:, 0] / sums_R2[:, 1] for sums_R2 in sums)
    names = ("recovery", "recovery_low", "recovery_high")
    return dict(zip(names, interval((one - other)[1:], (one - other)[0]), strict=True))


def transfer(of: dict[str, str], sets: tuple[str, ...], ks: tuple[int, ...] = (1, 4)) -> str:
    """Far units that one of two models ranked, evaluated by the other; both directions."""
    lines = []
    for target_set, (pair, seeds), k in product(sets, of.items(), ks):
        (units,) = read_meta(pair)["units"]
        row = read_summary(pair, target_set, units).loc["add_one", k]
        line = [SETS[target_set], seeds, str(k)]
        line += [shown(row, "recovery", ".2f"), shown(row, "foreign", ".2f")]
        line += [shown(row, "removal", ".2f"), shown(row, "excess_nats")]
        lines.append([*line, plain(row.gap, ".2f"), f"{row.num_targets:.0f}"])
    names = "target set | seeds | k | recovery | unrelated | removal | own − unrelated, nats"
    return table(f"{names} | gap, nats | targets", lines, left=3)


PARTS = {
    "later_piece": "continues a word",
    "begun": "begins a word",
    "first_piece": "… of several tokens",
    "whole": "… of one token",
    "word": "… of one, no function word",
    "function_word": "… of one, a function word",
    "no_word": "no word",
}


def parts_of_words(of: dict[str, str], sets: tuple[str, ...]) -> str:
    """Loss reduction by one distant token at whole words, and at pieces of words."""
    rows = {
        (target_set, part, model): row
        for target_set, part, (name, model) in product(sets, PARTS, of.items())
        for at, row in read_by_part(name, target_set).iterrows()
        if at == part
    }
    has_placebo = any(not math.isnan(row.get("net", math.nan)) for row in rows.values())
    lines = []
    for (target_set, part, model), row in rows.items():
        line = [SETS[target_set], PARTS[part], model]
        line += [shown(row, "recovery", ".2f"), shown(row, "foreign", ".2f")]
        line += [shown(row, "net")] if has_placebo else []  # transfer needs none
        line += [shown(row, "excess_nats"), plain(row.gap, ".2f")]
        lines.append([*line, f"{row.num_targets:.0f} ({row.share:.0%})"])
    names = "target set | target | models | recovery | unrelated"
    names += " | **net**" if has_placebo else ""
    return table(f"{names} | own − unrelated, nats | gap, nats | targets", lines, left=3)


def transfer_pairs(
    name: str, of: dict[str, dict[str, str]], sets: tuple[str, ...], ks: tuple[int, ...] = (1, 4)
) -> str:
    """Units that one model ranked, evaluated by another; a row for many ordered pairs: the least
    and the most of those with a gap that differs from 0, and the ends of intervals that decide.
    `measurements`: a regular expression of their names."""
    all_rows = other_table(name)
    all_rows = all_rows[all_rows.selector == "add_one"]
    lines = []
    for (called, asked), target_set, k in product(of.items(), sets, ks):
        rows = all_rows[all_rows.measurement.str.fullmatch(asked["measurements"])]
        rows = rows.query("units == @asked['units'] and target_set == @target_set and k == @k")
        if rows.empty:  # a control is measured on one set of targets alone
            continue
        told = rows.recovery.count()
        pairs = f"{len(rows)}" if told in (0, len(rows)) else f"{told} of {len(rows)}"
        line = [called, SETS[target_set], str(k), pairs]
        for number, low, high in (
            ("recovery", rows.low.min(), None),
            ("foreign", None, rows.foreign_high.max()),
            ("removal", None, rows.removal_high.max()),
            ("excess_nats", rows.excess_nats_low.min(), rows.excess_nats_high.max()),
        ):
            bounds = [f"{end:.2f}" for end in (low, high) if end is not None and not np.isnan(end)]
            line += [ends(rows[number].dropna(), ".2f"), ", ".join(bounds) or "–"]
        lines.append([*line, ends(rows.gap, ".2f")])
    names = (
        "distant units | target set | k | pairs | recovery | lowest end | unrelated | highest end"
    )
    names += " | removal | highest end | own − unrelated, nats | ends | gap, nats"
    return table(names, lines, left=2)


def nats(of: dict[str, str], set: str, k: int = 1) -> str:
    """Loss reduction by distant tokens in nats: one of them, and all together."""
    lines = []
    for name, called in of.items():
        row = read_summary(name, set).loc["add_one", k]
        line = [called, shown(row, "excess_nats", "+.3f"), f"{row.gap:.3f}"]
        lines.append([*line, f"{row.num_targets:.0f}"])
    return table(
        "model | one token, own − unrelated | all distant tokens (the gap) | targets", lines
    )


def differences(of: dict[str, list[str]], ks: tuple[int, ...] = (1,)) -> str:
    """Between models measured on the same documents: add_one over tokens, targets of large gap."""
    lines = []
    for called, names in of.items():
        rows = net_differences(*map(stored_rows, names))
        rows = rows.set_index(["target_set", "units", "selector", "k"])
        for k in ks:
            row = rows.loc["gap", "tokens", "add_one", k]
            nets = (shown(row, name) for name in ("net", "net_equal", "net_nats"))
            lines.append([called, str(k), *nets])
    return table("of | k | net | at equal gaps | in nats", lines, left=2)


def far_part(of: dict[str, str]) -> str:
    """Loss reduction by all distant tokens together, over all targets."""
    lines = []
    for name, called in of.items():
        meta = read_meta(name)
        losses = pd.DataFrame(measurements()[name]["mean_losses"]).loc["mean"]
        induction, long = meta["induction"], str(meta["windows"]["long"])
        line = [called, long, f"{losses.loss_short:.2f}", f"{losses.loss_long:.2f}"]
        line.append(f"{losses.loss_short - losses.loss_long:+.3f}")
        line += [f"{induction[column]:.2f}" for column in ("drop", "loss_first")]
        lines.append([*line, f"{induction['drop'] / induction['loss_first']:.1%}"])
    header = "model | long window | loss, short window | loss, long window | worth, nats a token"
    return table(f"{header} | induction check, nats | of a first reading of | share", lines)


def distance(of: dict[str, str], edges: list[int]) -> str:
    lines = []
    for name, called in of.items():
        rows = by_distance(name, edges)
        found = {
            row["from"]: f"{shown(row, 'nats')} ({row.targets:.0f})" for _, row in rows.iterrows()
        }
        lines.append([called, *(found.get(low, "–") for low in edges[:-1])])
    ranges = (f"{low} to {high - 1} back" for low, high in pairwise(edges))
    return table(" | ".join(["model", *ranges]), lines)


# --- training -------------------------------------------------------------------------------------


def by_position(of: dict[str, str]) -> str:
    """Held-out loss of the last evaluation, within the training length and beyond it."""
    lines = []
    for name, called in of.items():
        *_, row = read_evaluations(name)
        losses = {f"{part['from']} to {part['to']}": part["loss"] for part in row["heldout"]}
        lines.append([called, *(f"{loss:.2f}" for loss in losses.values())])
    return table(" | ".join(["model", *(f"tokens {places}" for places in losses)]), lines)


def checks(of: dict[str, str], millions: list[float]) -> str:
    """The induction check while models are trained."""
    runs = [list(read_evaluations(name)) for name in of]
    drops = [{at_millions(row, millions): row["induction_drop"] for row in run} for run in runs]
    lines = [
        [f"{trained:.1f}M", *(f"{drop[trained]:.2f}" if trained in drop else "" for drop in drops)]
        for trained in millions
    ]
    return table(" | ".join(["tokens trained", *of.values()]), lines, left=0)


def learnt(of: dict[str, str], least: float) -> str:
    """The first evaluation with an induction check of at least so many nats."""
    lines = []
    for name, called in of.items():
        rows = read_evaluations(name)
        first = next(row for row in rows if row["induction_drop"] >= least)
        lines.append([called, f"{first['millions']:.1f}M", f"{first['induction_drop']:.2f}"])
    return table("model | tokens trained | check", lines)


def course(**of: Any) -> str:
    """Loss reduction by distant tokens while a model is trained, where a pair of tokens recurs."""
    lines = [
        [
            f"{row.millions:.1f}M",
            f"{row.check:.2f}",
            f"{row.gap:.2f}",
            shown(row, "excess_nats"),
            plain(row.recovery, ".2f"),
            plain(row.foreign, ".2f"),
        ]
        for _, row in read_course(of).iterrows()
    ]
    header = "tokens trained | check | all distant tokens, nats | one of them beyond unrelated text"
    return table(f"{header} | recovery | unrelated", lines, left=0)


def appears(of: dict[str, str], millions: list[float]) -> str:
    """The induction check and net excess of the probe while copying is learnt: after so many
    tokens of training, and the mean over all evaluations before and after."""
    rows = [list(read_evaluations(name)) for name in of]
    lines = []
    for at in zip(*rows, strict=True):
        line = [f"{at[0]['millions']:.0f}M", *(f"{row['induction_drop']:.2f}" for row in at)]
        if at_millions(at[0], millions) is not None:
            lines.append([*line, *(shown(row["sparsity"]["tokens"], "net") for row in at)])
    all_found(lines, millions)
    for called, low, high in (("below 0.3", -math.inf, 0.3), ("at least 0.8", 0.8, math.inf)):
        chosen = [[row for row in run if low <= row["induction_drop"] < high] for run in rows]
        if any(chosen):
            means = [
                pd.Series(r["sparsity"]["tokens"]["net"] for r in run).mean() for run in chosen
            ]
            blanks = [""] * len(rows)
            lines.append([f"mean, check {called}", *blanks, *(f"{m:+.2f}" for m in means)])
    header = [f"{what}, {seed}" for what in ("check", "net excess") for seed in of.values()]
    return table(" | ".join(["tokens trained", *header]), lines)


def schemes(of: dict[str, str], prefix: str, seeds: list[int], longs: list[int]) -> str:
    """Models that are extended beyond their training length: the lowest to the highest of seeds."""
    losses, lines = scheme_losses(prefix, seeds), []
    for name, called in of.items():
        cells = [ends(losses.loc[name][between], ".2f") for between in losses.columns]
        trained = name.startswith("some")  # the others were not measured
        names = [f"{prefix}_{name}_seed{seed}" for seed in seeds] if trained else []

        def found(long: int, target_set: str, column: str, form: str, of: list[str] = names) -> str:
            rows = (read_summary(f"{one}_{long}", target_set) for one in of)
            return ends([row.loc["add_one_screened", 1][column] for row in rows], form)

        checks = [read_meta(f"{one}_{longs[-1]}")["induction"] for one in names]
        cells.append(ends([check["drop"] for check in checks], ".2f"))
        cells.append(ends([check["drop"] / check["loss_first"] for check in checks], ".0%"))
        cells += [found(long, "bigram", "recovery", ".2f") for long in longs]
        cells.append(found(longs[-1], "bigram", "foreign", ".2f"))
        cells += [found(longs[-1], "every", column, "+.3f") for column in ("gap", "excess_nats")]
        lines.append([*called.split(", "), *cells])
    header = ["scheme", "further steps", *(f"loss, {between}" for between in losses.columns)]
    header += [f"induction check, {longs[-1]}", "… as a share"]
    header += [*(f"transfer, {long} far" for long in longs), "unrelated token"]
    return table(" | ".join([*header, "all distant tokens, nats", "one of them"]), lines, left=2)


# --- what is chosen, and by which rule ------------------------------------------------------------

CALLED = {
    "equal": "equal to the target",
    "same_family": "same word family",
    "name": "capitalised name",
    "near_third": "nearest third",
    "far_third": "farthest third",
}


def kinds(of: str) -> str:
    lines = []
    for kind, row in read_kinds(of, 1).iterrows():
        line = [CALLED.get(kind, kind.replace("_", " "))]
        line += [f"{row.share:.1%}", f"{row.base_share:.1%}"]
        line += [shown(row, "enrichment", ".2f"), shown(row, "excess_recovery")]
        lines.append([*line, str(row.num_targets)])
    header = "first choice | of targets | of distant tokens | enrichment | excess there | targets"
    return table(header, lines)


def planted_8k(of: dict[str, str]) -> str:
    lines = []
    for name, what in of.items():
        for k in (1, 2):
            row = read_summary(name, "planted").loc["add_one_nested", k]
            values = [shown(row, "hit_rate", ".2f"), shown(row, "recovery", ".2f")]
            lines.append([what, str(k), *values, f"{row.foreign:.2f}", shown(row, "excess")])
    header = "planted tokens that hold the answer | k | found | recovery | unrelated | excess"
    return table(header, lines)


def planted_pairs(of: dict[str, str]) -> str:
    rows = other_table("planted_pairs").set_index("selector")
    lines = []
    for selector, called in of.items():
        row = rows.loc[selector]
        line = [called, f"{row.found:.2f}", f"{row.as_good:.3f}", f"{row.loss_set:.2f}"]
        line += [f"{row.loss_set_of_planted:.2f}", f"{row.token_forwards_per_target:,.0f}"]
        lines.append([*line, f"{row.num_targets:.0f}"])
    header = "rule | planted tokens found | as good as they are | loss | with the planted ones"
    return table(f"{header} | token-forwards | targets", lines)


def calibration(of: dict[str, str]) -> str:
    """Words of m pieces: the loss of the answer, recovery of one piece, and how many are needed."""
    lines = []
    for name, called in of.items():
        rows = read_summary(name, "planted")
        loss = mean_loss(name, "planted")
        line = [*called.split(", "), read_meta(name)["windows"]["far_states"], f"{loss:.2f}"]
        for selector in ("drop_one", "add_one"):
            recovery = rows.loc[selector].recovery
            enough = recovery.index[recovery >= ENOUGH]
            line += [f"{recovery[1]:.2f}", str(enough[0]) if len(enough) else "–"]
        lines.append(line)
    header = "pieces | seed | distant states | loss with all"
    for selector in ("drop_one", "add_one"):
        header += f" | `{selector}`: k = 1 | k at {ENOUGH}"
    return table(header, lines, left=3)


# --- many models ----------------------------------------------------------------------------------


def ladder(of: str, k: int) -> str:
    rows = read_ladder(of, k)
    lines = []
    for (size, positions), some in rows.groupby(["num_parameters", "positions"]):
        line = [f"{size / 1e6:.1f}M", POSITIONS[positions], str(len(some))]
        line += [f"{some[column].mean():.2f}" for column in ("drop", "gap", "recovery", "foreign")]
        lines.append([*line, f"{some.excess.mean():+.2f}", ends(some.excess, "+.2f")])
    header = "parameters | positions | models | drop | gap | recovery | unrelated | excess, mean"
    return table(f"{header} | excess, lowest and highest", lines, left=2)


def beyond(of: str) -> str:
    rows = read_ladder(of, 1).sort_values(["seed", "positions"], ascending=[True, False])
    lines = []
    for _, row in rows.iterrows():
        line = [str(row.seed), POSITIONS[row.positions], f"{row['drop']:+.2f}"]
        line += [f"{row[column]:.2f}" for column in ("loss_long", "gap", "recovery", "foreign")]
        lines.append([*line, shown(row, "excess"), shown(row, "excess", scale=row.gap)])
    header = "seed | positions | drop | L_long | gap | recovery | unrelated | excess"
    return table(f"{header} | excess × gap, nats", lines, left=2)


# --- tasks and theory -----------------------------------------------------------------------------

SCHEMES = {
    "ppc": "coupled, predicted (PPC)",
    "coupled": "coupled, given",
    "rope": "RoPE",
    "pose": "RoPE + PoSE",
    "nope": "NoPE",
    "alibi": "ALiBi",
    "randomized": "randomized",
}
LEARNT = 0.99
"""Exact match at the longest training length with k = K_train."""


def task(of: list[str]) -> str:
    return format_table([row for name in of for row in task_rows(name)])


def ends(numbers: Iterable[float], form: str = ".3f") -> str:
    numbers = list(numbers)
    if not numbers:
        return "–"
    low, high = f"{min(numbers):{form}}", f"{max(numbers):{form}}"
    return low if low == high else f"{low} to {high}"


def by_seed(of: dict[str, str], cells: list[tuple[int, int]]) -> str:
    """`cells`: k and length."""
    lines = []
    for name, called in of.items():
        rows = task_rows(name)
        right = {(r.train_k, r.seed, r.test_k, r.length): r.exact_match for r in rows}
        for train_k, seed in sorted({key[:2] for key in right}):
            exact = (right[train_k, seed, k, length] for k, length in cells)
            lines.append(
                [str(train_k), called, str(seed), *(f"{of_cell:.3f}" for of_cell in exact)]
            )
    header = ["K_train", "training", "seed", *(f"k = {k} at {length}" for k, length in cells)]
    return table(" | ".join(header), lines, left=3)


def counting() -> str:
    """How often a model that counts marked ones no further than 1, 2 and so on is right on the
    test samples of 50 tokens, and how many trained models are as often, to one sample, for every
    k that they are tested on."""
    stored = pd.read_parquet(RESULTS / "tasks.parquet")
    stored = stored[stored.result.str.startswith("sparse_parity")]
    num_samples = 300  # of nearly all; with more, other samples decide
    stored = stored[(stored.length == 50) & (stored.num_samples == num_samples)]
    stored = stored.astype({"train_k": int, "test_k": int})
    ones = {}
    for k in sorted(stored.test_k.unique()):
        drawn = draw_test_samples(SparseParity(), num_samples, 50, int(k))
        ones[k] = np.concatenate([count_relevant_ones(samples) for samples in drawn])
    lines = []
    for end in range(1, 7):
        right = {
            k: (np.minimum(ones_B, end) % 2 == ones_B % 2).mean() for k, ones_B in ones.items()
        }
        equal = stored.exact_match.sub(stored.test_k.map(right)).abs() < 1.5 / num_samples
        models = equal.groupby([stored[c] for c in ("scheme", "train_k", "seed", "result")]).all()
        by_k = models.groupby("train_k")
        lines.append([f"{end}", *(f"{right[k]:.3f}" for k in (2, 4, 6, 8)), *map(str, by_k.sum())])
    sizes = [f"trained k ≤ {train_k}, of {count}" for train_k, count in by_k.size().items()]
    return table(" | ".join(["counts to", "k = 2", "k = 4", "k = 6", "k = 8", *sizes]), lines, 0)


def ablations(of: dict[str, str]) -> str:
    lines = []
    for name, change in of.items():
        rows = task_rows(name)
        right = {(r.seed, r.test_k, r.length): r.exact_match for r in rows if r.scheme == "pose"}
        line = [change]
        for k in (2, 4):
            learnt = [seed for seed in {r.seed for r in rows} if right[seed, k, 50] >= 0.9]
            line.append(str(len(learnt)))
            for length in (200, 500):
                line.append(ends([right[seed, k, length] for seed in learnt]))
        lines.append(line)
    at = "at 200 | at 500"
    return table(f"change | seeds that learnt k = 2 | {at} | seeds that learnt k = 4 | {at}", lines)


def scratchpad(of: dict[str, str], lengths: list[int]) -> str:
    """Schemes with the same numbers share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, setting in of.items():
        rows = task_rows(name)
        for scheme, called in SCHEMES.items():
            some = [row for row in rows if row.scheme == scheme]
            if some:
                at = [[row for row in some if row.length == n] for n in lengths]
                lines.setdefault((setting, *map(format_cell, at)), []).append(called)
    by_name = [(setting, ", ".join(called), *at) for (setting, *at), called in lines.items()]
    header = ["setting", "position IDs", *(f"{n} bits" for n in lengths)]
    return table(" | ".join(header), by_name, left=2)


def task_commands() -> str:
    """Commands of every stored result. How many run at a time does not change the result."""
    asked = (task["meta"]["command"] for task in tasks().values())
    commands = sorted({re.sub(r" --num_workers=[0-9]+", "", command) for command in asked})
    return "\n".join(["```bash", *commands, "```"])


def theory(of: str) -> str:
    return (FIGURES / f"{of}.md").read_text(encoding="utf-8").strip()


def bridge(of: str) -> str:
    """The transformers of the bridge; theory_quick has the attention class next to them."""
    names = ["setting", "k", *(f"risk at {n}" for n in ("L", "2L", "4L", "8L")), "growth"]
    lines = (FIGURES / f"{of}.md").read_text(encoding="utf-8").splitlines()
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    found = (dict(zip(header, row, strict=False)) for row in rows)
    chosen = [row for row in found if row.get("setting", "").startswith("transformer")]
    return table(" | ".join(names), [[row[name] for name in names] for row in chosen])


# --- training text chosen by a score --------------------------------------------------------------


def score_areas(of: str, names: dict[str, str]) -> str:
    """AUROC of each score, whole documents against each kind that was made worse."""
    rows = other_table(of).set_index(["score", "kind"])
    kinds = list(dict.fromkeys(rows.index.get_level_values("kind")))
    lines = [
        [
            called,
            *(shown(rows.loc[name, kind], "auroc", ".2f") for kind in kinds),
            shown(rows.loc[name, "joined"], "more"),
        ]
        for name, called in names.items()
    ]
    return table(" | ".join(["score", *kinds, "`net_gain` − it, joined"]), lines)


def score_lengths(of: str, names: dict[str, str]) -> str:
    """Spearman's of each score with length, and its mean in documents cut to each length."""
    rows = other_table(of).set_index("score")
    at = [column for column in rows if column.startswith("at_")]
    lines = [
        [
            called,
            *(shown(rows.loc[name], column) for column in ("over", "cut")),
            *(f"{rows.loc[name, column]:+.3f}" for column in at),
        ]
        for name, called in names.items()
    ]
    cuts = [f"{int(column[3:]):,} characters" for column in at]
    return table(" | ".join(["score", "whole articles", "the same, cut", *cuts]), lines)


CHOICE = {
    "loss_far": "far loss",
    "loss_1x": "to 512 tokens",
    "loss_2x": "to 1,024",
    "loss_4x": "to 2,048",
    "loss_beginning": "first 256",
    "needle": "needle",
    "induction": "repetition",
    "net_gain": "`net_gain`",
}


def choice_rows(of: str, steps: int) -> tuple[pd.DataFrame, list[str]]:
    """The models trained for so many steps, and what is known of them."""
    rows = other_table(of)
    rows = rows[rows.steps == steps].dropna(axis=1, how="all")
    return rows, [name for name in CHOICE if name in rows]


def choices(of: str, steps: int, names: dict[str, str]) -> str:
    """What each choice holds, and models trained on it: means over seeds."""
    rows, columns = choice_rows(of, steps)
    means, kinds = rows.groupby("choice").mean(), ["whole", "joined", "shuffled", "boilerplate"]
    lines = [
        [
            called,
            *(f"{means.loc[name, kind]:.0%}" for kind in kinds),
            *(f"{means.loc[name, column]:.4f}" for column in columns),
        ]
        for name, called in names.items()
    ]
    return table(" | ".join(["chosen by", *kinds, *(CHOICE[name] for name in columns)]), lines)


def choice_differences(of: str, steps: int, between: dict[str, list[str]]) -> str:
    """A choice minus the mean of others, paired by seed; Student's t over seeds."""
    rows, columns = choice_rows(of, steps)
    rows, lines = rows.set_index(["choice", "seed"])[columns], []
    for called, (first, *rest) in between.items():
        more = (rows.loc[first] - rows.loc[rest].groupby("seed").mean()).dropna()
        ends = [(more[c].mean(), half_width(more[c].to_numpy())) for c in columns]
        lines.append([called, *(f"{m:+.4f} [{m - h:+.4f}, {m + h:+.4f}]" for m, h in ends)])
        lines[-1].append(", ".join(f"{number:+.4f}" for number in more.loss_far))
    head = [CHOICE[name] for name in columns]
    return table(" | ".join(["difference", *head, "far loss, by seed"]), lines)


# --- many GPUs ------------------------------------------------------------------------------------

# Assumptions, not measurements: NVLink inside a machine of eight, one 200 Gbit/s adapter per GPU
# between machines.
FLOPS_PER_S, NEAR_BYTES_PER_S, FAR_BYTES_PER_S = 350e12, 300e9, 25e9
GPU_BYTES, MACHINE_GPUS = 80 * 2**30, 8


def read_steps() -> pd.DataFrame:
    """A row for each config, engine and number of GPUs, with the times that are assumed."""
    steps = pd.DataFrame(others()["scaling"])
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # of a ring
    given = [sum(rounds[kind] * size for kind, size in one.items()) for one in steps.given]
    steps["sent"] = given * (1 - 1 / steps.world_size)
    near = steps.world_size <= MACHINE_GPUS
    sending_s = steps.sent / np.where(near, NEAR_BYTES_PER_S, FAR_BYTES_PER_S)
    steps["step_s"] = steps.flops / FLOPS_PER_S + sending_s
    steps["computing"] = steps.flops / FLOPS_PER_S / steps.step_s
    return steps


def scaling(column: str) -> str:
    scale, digits = {"memory": (2**-30, 1), "sent": (1e-9, 2), "computing": (100, 0)}[column]
    steps = read_steps().query("engine != 'single'")
    cells = steps.set_index(["config", "engine", "world_size"])[column] * scale
    wide = cells.unstack("world_size").loc[steps.config.unique()]
    lines = [
        [*names, *(f"{cell:,.{digits}f}" for cell in row)]
        for *names, row in (
            (config, engine, row.tolist()) for (config, engine), row in wide.iterrows()
        )
    ]
    return table(" | ".join(["config", "engine", *map(str, wide.columns)]), lines, left=2)


def engines() -> str:
    """The simplest engine that fits, and is within two points of the best that does."""
    steps, lines = read_steps(), []
    sizes = sorted(steps.world_size.unique())
    for config in steps.config.unique():
        cells = [config]
        for world_size in sizes:
            rows = steps[(steps.config == config) & (steps.world_size == world_size)]
            rows = rows[rows.memory <= GPU_BYTES]
            best = rows[rows.computing >= rows.computing.max() - 0.02].iloc[0]
            hours = best.num_steps * best.step_s / 3600
            cells.append(f"{best.engine}, {hours:,.1f} h ({best.computing:.0%})")
        lines.append(cells)
    return table(
        " | ".join(["config", *(f"{n} GPU{'s' if n > 1 else ''}" for n in sizes)]), lines, left=5
    )


def gpu_check(of: str) -> str:
    rows = others()[of]["rows"]
    lines = ([row["check"], "yes" if row["holds"] else "no", row["found"]] for row in rows)
    return table("check | holds | found", lines, left=3)


# --- sources --------------------------------------------------------------------------------------


def printed(of: str, run: str = "five") -> str:
    """What a benchmark prints of its stored rows."""
    if of == "reasoning":
        text = reasoning.table(reasoning.read(RESULTS / "reasoning.jsonl"))
    else:
        text = questions.tables(questions.read_rows(RESULTS / f"{of}.jsonl", run))
    return f"```text\n{text}\n```"


def laboratory(of: str, shares: dict[str, str]) -> str:
    runs = others()[of]
    lines = [
        [name, *(f"{run[share]:.3f}" for run in runs.values())] for share, name in shares.items()
    ]
    return table(" | ".join(["share", *(name.rpartition("_")[2] for name in runs)]), lines)


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name in SHOWN["pages"]:
        path = PAGES / f"{name}.md"
        after = write_page(name)
        if not path.exists() or path.read_text(encoding="utf-8") != after:
            write_atomically(path, after)
            print(f"{path.relative_to(ROOT)}: written anew")
