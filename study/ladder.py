"""Compare measurements of several models: net excess against model size and against induction.

Place in the flow: results of several models → **one table and one figure**. Never imports torch.

The figure shows net excess recovery (excess, if a model has no placebo) against size, and against
the drop in loss on a repeated passage, which shows whether a model copies from its context. Models
must be measured with the same documents, windows and far states. Each has its own targets unless
they were given.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_sparsity.analysis.report.figures import error_lengths
from olmo_sparsity.analysis.results.results import Results, main_set, read_results
from olmo_sparsity.analysis.results.statistics import rank_correlations
from olmo_sparsity.analysis.results.summary import BEYOND, curve_name, with_interval
from olmo_sparsity.drawing import BLUE, GREEN, GREY, RED, save
from olmo_sparsity.errors import DataError
from olmo_sparsity.io import write_atomically
from study.command import enter, run_command

# Entries of meta.json that all models must share.
_EQUAL = r"^(data\.fingerprint|windows\.|controls\.|dtype|targets\.(share|min_gap|given))"
_BY = ["units", "selector", "k"]
_VALUES = [
    *("recovery", "low", "high", "foreign", "excess", "excess_low", "excess_high", "excess_nats"),
    *("excess_nats_low", "excess_nats_high", "placebo", "net", "net_low", "net_high"),
    *("gap", "num_targets", "num_documents"),
]
_NUM_RESAMPLES = 10_000
# For each position scheme: colour, marker, name, and the factor that shifts it on the size axis.
_STYLES = {
    "pose": (BLUE, "o", "RoPE + PoSE", 1.04),
    "contiguous": (RED, "s", "RoPE", 0.96),
}
_DROP = "induction check (nats)"
_GREY: dict[str, Any] = {"color": GREY, "marker": "x", "markersize": 3}


def ladder_table(results: list[Results]) -> pd.DataFrame:
    """A row per model, kind of units, selector and k."""
    _refuse_different(results)
    return pd.concat([_rows(result) for result in results], ignore_index=True).sort_values(
        ["num_parameters", "positions", "seed", "model", *_BY], ignore_index=True
    )


def _refuse_different(results: list[Results]) -> None:
    names = [result.meta.model["name"] for result in results]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"duplicate measurement: {twice}; name each model once")
    for result, name in zip(results, names, strict=True):
        if result.missing:
            raise DataError(f"{name}: {result.missing}; finish the measurement first")
    meta = pd.json_normalize([asdict(result.meta) for result in results], max_level=1)
    for key in meta.filter(regex=_EQUAL):
        values = meta[key].map(str)
        if key.startswith("targets."):  # given targets have no share, and others no `given`
            values = values[meta[key].notna()]
        values = values.drop_duplicates()
        if len(values) > 1:
            one, other = values.index[:2]
            raise DataError(
                f"{names[one]} and {names[other]} were not measured alike: {key} is {values[one]} "
                f"and {values[other]}; measure both with the same settings"
            )


def _rows(result: Results) -> pd.DataFrame:
    meta, summary = result.meta, result.summary
    about = {
        "model": meta.model["name"],
        "num_parameters": meta.model["num_parameters"],
        "positions": meta.model["trained"].get("positions", "unknown"),
        "seed": meta.model["trained"].get("seed", 0),
        "drop": meta.induction["drop"],
        "loss_long": result.losses.loss_long.mean(),
    }
    rows = summary[summary.target_set == main_set(summary.target_set)]
    return rows.assign(**about)[[*about, *_BY, *_VALUES]]


def made_by(results: list[Results]) -> dict[str, Any]:
    """For each model: command, commit, versions, machine, counts."""
    keys = ("command", "commit", "versions", "machine", "counts")
    return {
        result.meta.model["name"]: {key: getattr(result.meta, key) for key in keys}
        for result in results
    }


def rank_correlation(x: pd.Series, y: pd.Series) -> tuple[float, float, float]:
    """Spearman's, with a 95% bootstrap over models."""
    drawn = np.random.default_rng(0).integers(0, len(x), (len(x), _NUM_RESAMPLES))
    drawn = np.hstack([np.arange(len(x))[:, None], drawn])  # all models first
    value, *resampled = rank_correlations(*(values.to_numpy()[drawn].T for values in (x, y)))
    low, high = np.nanquantile(resampled, [0.025, 0.975])  # one model drawn n times has no order
    return float(value), float(low), float(high)


def names_without_seed(table: pd.DataFrame) -> pd.Series:
    """Names of the models' run folders, equal for runs that differ only in seed."""
    folders = table.model.str.replace(r"/checkpoints/.*", "", regex=True).str.rstrip("/")
    return folders.str.rsplit("/", n=1).str[-1].str.replace(r"_?seed\d+", "", regex=True)


def describe_ladder(table: pd.DataFrame, selector: str, k: int, units: str = "tokens") -> str:
    """Means over seeds, and the rank correlation of net excess with the drop over all models."""
    rows, beyond = _of(table, selector, k, units)
    names = names_without_seed(rows)
    width = max(map(len, names))
    lines = [
        f"{selector}, {units}, k = {k}; means over seeds, {beyond} from lowest to highest",
        f"{'model':<{width}}  {'parameters':>12}{'seeds':>6}  {'drop':>6}  {'L_long':>6}  "
        f"{'gap':>5}  {'recovery':>8}  {'foreign':>7}  {'excess':>6}  {'placebo':>7}  {beyond}",
    ]
    for (size, name), seeds in rows.groupby([rows.num_parameters, names]):
        mean = seeds.mean(numeric_only=True)
        lines.append(
            f"{name:<{width}}  {size:>12,}{len(seeds):>6}  {mean['drop']:>6.2f}  "
            f"{mean.loss_long:>6.3f}  {mean.gap:>5.2f}  {mean.recovery:>8.2f}  "
            f"{mean.foreign:>7.2f}  {mean.excess:>+6.2f}  {mean.placebo:>+7.2f}  "
            + with_interval(mean[beyond], seeds[beyond].min(), seeds[beyond].max())
        )
    if len(rows) > 2:
        correlation = with_interval(*rank_correlation(rows["drop"], rows[beyond]))
        lines.append(
            f"rank correlation of {beyond} with the drop over {len(rows)} models: {correlation}"
        )
    return "\n".join(lines)


def _of(table: pd.DataFrame, selector: str, k: int, units: str) -> tuple[pd.DataFrame, str]:
    """The rows, and the headline column that all of them have."""
    rows = table[(table.selector == selector) & (table.k == k) & (table.units == units)]
    if not len(rows):
        known = (f"{name} {', '.join(map(str, sorted(table[name].unique())))}" for name in _BY)
        raise DataError(
            f"no model was measured with {selector} ({units}) at k = {k}; choose from "
            + "; ".join(known)
        )
    lacking = sorted(set(table.model) - set(rows.model))
    if lacking:
        raise DataError(
            f"{lacking[0]} was not measured with {selector} ({units}) at k = {k}; leave its "
            "results out, or take a selector, units and k that all have"
        )
    return rows, "net" if rows.net.notna().all() else "excess"


# --- the figure -----------------------------------------------------------------------------------


def draw_ladder(
    table: pd.DataFrame, out: Path, selector: str, k: int, units: str = "tokens"
) -> None:
    save(lambda: ladder_figure(table, selector, k, units), out)


def ladder_figure(table: pd.DataFrame, selector: str, k: int, units: str) -> Figure:
    """Draw the figure; models of one size have no panels by size."""
    rows, beyond = _of(table, selector, k, units)
    control = table[(table.selector == "random") & (table.k == k) & (table.units == units)]
    if selector == "random" or set(control.model) != set(rows.model):
        control = control[:0]
    name = curve_name(selector, units)
    if rows.num_parameters.nunique() == 1:
        figure = Figure(figsize=(3.4, 2.9), layout="constrained")
        axes, ncols = figure.subplots(), 2
        title = f"{name}, k = {k}, 95% intervals"
    else:
        figure = Figure(figsize=(5.5, 4.8), layout="constrained")
        *by_size, axes = figure.subplots(2, 2).flat
        _draw_by_size(by_size, rows, control, k, beyond)
        ncols, title = 3, "(d) Against (a), 95% intervals"
    _draw_against_drop(axes, rows, control, name, beyond)
    axes.set_title(title, loc="left", fontweight="bold")
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=ncols, frameon=False)
    return figure


def _draw_by_size(
    panels: list[Axes], rows: pd.DataFrame, control: pd.DataFrame, k: int, beyond: str
) -> None:
    drops, recoveries, excesses = panels
    counts = sorted(rows.num_parameters.unique())
    for axes, title, label in (
        (drops, "(a) Induction check", _DROP),
        (recoveries, f"(b) k = {k}; open: unrelated text", "recovery"),
        (excesses, f"(c) Beyond the controls, k = {k}", f"{BEYOND[beyond]} recovery"),
    ):
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xscale("log")
        axes.set_xlabel("parameters")
        axes.set_ylabel(label)
        axes.set_xticks(counts, [_short(count) for count in counts])
        axes.minorticks_off()
    excesses.axhline(0, color="black", linewidth=0.7, zorder=0)
    for positions, group in rows.groupby("positions"):
        color, marker, _, shift = _style(positions)
        group = group.assign(num_parameters=group.num_parameters * shift)
        at = {"color": color, "marker": marker, "markersize": 3.5}
        _with_mean(drops, group, "drop", at)
        _with_mean(recoveries, group, "recovery", at)
        _with_mean(recoveries, group, "foreign", at | {"markerfacecolor": "white"}, "--")
        _with_mean(excesses, group, beyond, at)
    if len(control):
        _with_mean(excesses, control, beyond, _GREY, "none")


def _draw_against_drop(
    axes: Axes, rows: pd.DataFrame, control: pd.DataFrame, name: str, beyond: str
) -> None:
    for positions, group in rows.groupby("positions"):
        color, marker, scheme, _ = _style(positions)
        axes.errorbar(
            group["drop"],
            group[beyond],
            error_lengths(group, beyond),
            linestyle="none",
            elinewidth=0.6,
            color=color,
            marker=marker,
            markersize=3.5,
            label=f"{name}, {scheme}",
        )
    if len(control):
        axes.plot(control["drop"], control[beyond], linestyle="none", label="random", **_GREY)
    axes.set_xlabel(_DROP)
    axes.set_ylabel(f"{BEYOND[beyond]} recovery")
    axes.axhline(0, color="black", linewidth=0.7, zorder=0)


def _style(positions: object) -> tuple[str, str, str, float]:
    return _STYLES.get(str(positions), (GREEN, "^", str(positions), 1.0))


def _with_mean(axes: Axes, rows: pd.DataFrame, value: str, style: dict, line: str = "-") -> None:
    """A marker for every seed, a line through their means."""
    axes.plot(rows.num_parameters, rows[value], linestyle="none", **style)
    means = rows.groupby("num_parameters")[value].mean()
    axes.plot(means.index, means, color=style["color"], linestyle=line, linewidth=1)


def _short(count: int) -> str:
    return f"{count / 1e9:.2g}B" if count >= 1e9 else f"{count / 1e6:.2g}M"


def _run(options: argparse.Namespace, _: list[str]) -> None:
    results = [read_results(folder) for folder in options.results]
    table, out = ladder_table(results), options.out
    draw_ladder(table, out, options.selector, options.k, options.units)
    write_atomically(out.with_suffix(".csv"), table.round(4).to_csv(index=False))
    write_atomically(out.with_suffix(".meta.json"), json.dumps(made_by(results), indent=1))
    print(describe_ladder(table, options.selector, options.k, options.units))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m study.ladder", description=__doc__)
    parser.add_argument("results", metavar="RESULTS", nargs="+")
    kinds = "a .png, .pdf or .svg file; numbers and provenance are written next to it"
    parser.add_argument("--out", required=True, type=Path, help=kinds)
    parser.add_argument("--selector", default="add_one", help="(%(default)s)")
    parser.add_argument("--units", default="tokens", help="(%(default)s)")
    parser.add_argument("--k", type=int, default=8, help="(%(default)s)")
    return run_command(parser, _run, words)


if __name__ == "__main__":
    enter(main)
