"""Draw Figure 2: how much of the gap a few far units recover. Never imports torch.

Place in the flow: results → here, once for print (png, pdf, svg) and once inside the report page.

(a) the gaps of all targets, own and with the placebo, (b) the mean loss of the chosen targets
against k, between L_short and L_long, (c) recovery minus foreign control and placebo, (d) recovery
minus foreign control, by kind of token. One model: two by two panels. Several models: a column
each, with shared axes in each row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from olmo_sparsity.analysis.results import Results, main_set
from olmo_sparsity.analysis.summary import BEYOND, chosen_losses, curve_name, describe_windows
from olmo_sparsity.analysis.view import spell
from olmo_sparsity.disk import drawing
from olmo_sparsity.errors import ConfigError

_CURVE = ["selector", "units"]

# Selectors differ in marker as well as colour. Controls that need no model are grey.
_SELECTORS = {
    "add_one": (drawing.BLUE, "o"),
    "divergence": (drawing.RED, "s"),
    "add_one_screened": (drawing.SKY, "^"),
    "greedy": (drawing.GREEN, "D"),
    "drop_one": (drawing.PINK, "v"),
    "gradient": (drawing.ORANGE, "P"),
    "lrp": ("#999933", "p"),
    "attention": ("#882255", "X"),
    "add_one_nested": ("#44AA99", "<"),
    "most_frequent": (drawing.GREY, "1"),
    "nearest": (drawing.GREY, "+"),
    "random": (drawing.GREY, "x"),
}
# Line style and marker fill of single tokens, then of the other kinds of units.
_UNITS: Any = [("-", "full"), ("-.", "left"), ((0, (9, 2)), "top"), ((0, (4, 1, 1, 1)), "right")]
_FOREIGN: Any = (0, (3, 1.6))
_PLACEBO: Any = ":"
_INK, _FAINT, _FILL, _CHOSEN, _PAPER = "#1a1a1a", "#767676", "#d9d9d9", "#7d7d7d", "#ffffff"
_SETTINGS = {
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), _INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), _FAINT),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), _PAPER),
    "axes.labelcolor": _INK,
}
_ON_DARK = {
    _INK: "#e8e6e1", _FAINT: "#a5a29b", _FILL: "#45474d", _CHOSEN: "#8f939c", _PAPER: "#1d1f24",
    "#0072b2": "#56b4e9", "#56b4e9": "#b3e0ff", "#882255": "#e28aae", drawing.GREY: "#a8a8a8",
}  # fmt: skip

Styles = dict[tuple[str, str], dict[str, Any]]
"""Style of each (selector, units), in the order of the legend."""


def draw_figure2(results: list[Results], out: Path, labels: list[str] | None = None) -> None:
    """`labels` name the models (default: their own names)."""
    drawing.save(_drawing(results, labels), out, **_SETTINGS)


def figure2_svg(results: list[Results], *, dark: bool = False) -> bytes:
    """For the report page."""
    svg = drawing.render(_drawing(results), "svg", _SETTINGS).decode()
    if dark:
        svg = re.sub(r"(?<=: )#[0-9a-f]{6}", lambda color: _ON_DARK.get(color[0], color[0]), svg)
    return svg.encode()


def _drawing(results: list[Results], labels: list[str] | None = None) -> Callable[[], Figure]:
    if not results:
        raise ConfigError("no results to draw; name at least one folder")
    names = drawing.one_label_each(labels, [str(result.meta.model["name"]) for result in results])
    main = [_of_main_set(result) for result in results]
    return lambda: _figure(main, names)


def _of_main_set(results: Results) -> Results:
    """The results with only the main target set in summary and dependencies."""
    name = main_set(results.targets.target_set)
    tables = {"summary": results.summary, "dependencies": results.dependencies}
    return replace(results, **{n: table[table.target_set == name] for n, table in tables.items()})


def _figure(results: list[Results], names: list[str]) -> Figure:
    many = len(results) > 1
    styles = _styles(results)
    ks = set().union(*(result.dependencies.k for result in results))
    k = 1 if 1 in ks else max(ks, default=1)
    by_kind = [result.dependencies[result.dependencies.k == k] for result in results]
    dependencies = pd.concat(by_kind)
    drawn = set(dependencies.kind[dependencies.excess_recovery.notna()])
    kinds = [kind for kind in dependencies.kind.unique() if kind in drawn]
    has_placebo = [result.summary.net.notna().any() for result in results if len(result.summary)]
    beyond = "net" if all(has_placebo) else "excess"
    handles = _legend_handles(styles, beyond)
    titles = (
        "(a) What the long context gains",
        "(b) Loss with k far units",
        "(c) Net of foreign and placebo" if beyond == "net" else "(c) Beyond foreign; no placebo",
        f"(d) Excess by kind, k = {k}",
    )
    figure, columns, foot = _lay_out(results, names, len(kinds), len(handles))
    all_ks = sorted(set().union(*(result.summary.k for result in results))) or [1]
    most = 1.0
    for i, (result, name) in enumerate(zip(results, names, strict=True)):
        gaps, losses, excess, kind = columns[i]
        most = max(most, _draw_gaps(gaps, result))
        gaps.set_ylim(0.6, most)  # models share the axes of a row
        for axes in (losses, excess):
            _draw_k_axis(axes, all_ks)
        _draw_losses(losses, result, styles)
        _draw_excess(excess, result.summary, styles, beyond)
        _draw_kinds(kind, by_kind[i], styles, kinds)
        for axes, title in zip(columns[i], titles, strict=True):
            if i == 0:  # with several models, the first panel of a row has its title
                axes.set_title(title, loc="left", fontweight="bold", pad=7)
            else:
                axes.set_ylabel("")
        if many:
            for axes, label in zip(columns[i], ("gap (nats)", "k", "k"), strict=False):
                axes.set_xlabel(label)
            lines = _describe(result)
            _write_above(gaps, "\n".join(lines), 20, "normal")
            _write_above(gaps, _shorten(name, 24), 22 + 9 * len(lines), "bold")
    foot.legend(
        handles=handles, loc="outside lower center" if many else "center", ncols=4, frameon=False,
        handlelength=2.6, columnspacing=1.4,
    )  # fmt: skip
    return figure


def _lay_out(
    results: list[Results], names: list[str], num_kinds: int, num_handles: int
) -> tuple[Figure, list[list[Axes]], Any]:
    """The figure, the four panels of each model, and where the legend goes."""
    height_of_kinds = max(1.0, 0.14 * num_kinds)
    if len(results) > 1:
        size = (max(5.5, 1.3 + 1.45 * len(results)), 6.0 + 1.6 * height_of_kinds)
        figure = Figure(figsize=size, layout="constrained")
        heights = [1, 1, 1, height_of_kinds]
        grid = figure.subplots(4, len(results), sharex="row", sharey="row", height_ratios=heights)
        return figure, [list(grid[:, i]) for i in range(len(results))], figure
    height_of_legend = 0.09 * -(-num_handles // 4)
    size = (5.5, 2.2 * (1.06 + height_of_kinds + height_of_legend))
    figure = Figure(figsize=size, layout="constrained")
    # Separate subfigures, so that the long labels of (d) do not narrow (b).
    rows: Any = figure.subfigures(3, 1, height_ratios=[1, height_of_kinds, height_of_legend])
    head = f"{_shorten(names[0], 90)}\n{' · '.join(_describe(results[0]))}"
    figure.suptitle(head, fontsize=7, linespacing=1.35)
    return figure, [[*rows[0].subplots(1, 2), *rows[1].subplots(1, 2)]], rows[2]


def _write_above(axes: Axes, text: str, points: float, weight: str) -> None:
    axes.annotate(
        text, (0, 1), xycoords="axes fraction", xytext=(0, points), textcoords="offset points",
        va="bottom", fontsize=6.5, linespacing=1.35, fontweight=weight,
    )  # fmt: skip


def _describe(results: Results) -> list[str]:
    losses = results.reported
    num_documents, num_chosen = losses.document.nunique(), len(chosen_losses(results))
    return [
        *([results.missing] if results.missing else []),
        *describe_windows(results.meta.windows),
        f"{num_chosen:,} of {len(losses):,} targets",
        f"{num_documents:,} document{'s' if num_documents != 1 else ''}",
    ]


def _draw_gaps(axes: Axes, results: Results) -> float:
    """Returns the height that the bars and their note need."""
    losses = results.reported
    gaps = (losses.loss_short - losses.loss_long).to_numpy(float)
    placebo = (losses.loss_short - losses.placebo_loss_long).to_numpy(float)
    axes.set_xlabel("gap  L_short − L_long  (nats)")
    axes.set_ylabel("targets")
    if not len(gaps):
        _write_in(axes, "not measured")
        return 0.0
    # The threshold is a bin edge, so that a bar is chosen or not as a whole.
    threshold = results.meta.targets.get("threshold")
    both = np.concatenate([gaps, placebo])
    width = max(float(np.ptp(both)) / 45, 1e-6)
    start = 0.0 if threshold is None else threshold
    first, last = np.floor((both.min() - start) / width), np.ceil((both.max() - start) / width)
    edges = start + width * np.arange(first, max(last, first + 1) + 1)
    is_chosen = gaps >= (np.inf if threshold is None else threshold)
    counts, chosen, by_placebo = (
        np.histogram(values, edges)[0] for values in (gaps, gaps[is_chosen], placebo)
    )
    axes.stairs(counts, edges, fill=True, color=_FILL)
    axes.stairs(chosen, edges, fill=True, color=_CHOSEN)
    axes.stairs(by_placebo, edges, color=_INK, linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}" if count >= 1 else "")
    side = 1
    if threshold is not None:
        axes.axvline(threshold, color=_INK, linewidth=0.8)
        # Beside the line, and above the bars where there are many.
        side = 1 if threshold < edges[0] + 0.65 * (edges[-1] - edges[0]) else -1
        axes.annotate(
            f"gap ≥ {threshold:.2f}\n{is_chosen.mean():.1%} of targets\n"
            f"{gaps[is_chosen].sum():+,.0f} nats, all: {gaps.sum():+,.0f}\n"
            f"unrelated text: {(placebo >= threshold).mean():.1%}",
            (threshold, 0.97), xycoords=("data", "axes fraction"), xytext=(4 * side, 0),
            textcoords="offset points", va="top", ha="left" if side > 0 else "right",
            fontsize=6.5, linespacing=1.35,
            bbox={"facecolor": _PAPER, "alpha": 0.8, "linewidth": 0, "pad": 1},
        )  # fmt: skip
    return max(counts.max(), by_placebo.max(), 3) * (3 if side > 0 else 20)


def _draw_losses(axes: Axes, results: Results, styles: Styles) -> None:
    axes.set_ylabel("mean loss (nats)")
    losses, rows = chosen_losses(results), results.summary
    if not len(losses) or not len(rows):
        _write_in(axes, "no targets chosen")
        return
    short = losses.loss_short.mean()
    for name, level in (("short", short), ("long", losses.loss_long.mean())):
        axes.axhline(level, color=_INK, linewidth=0.8, zorder=1)
        axes.annotate(
            f"L_{name}", (1, level), xycoords=("axes fraction", "data"), fontsize=7,
            xytext=(3, 0), textcoords="offset points", va="center",
        )  # fmt: skip
    alpha = 0.13 if len(styles) <= 5 else 0.06
    for curve, style in reversed(_curves(rows, styles)):  # the first on top
        # Recovery is measured in gaps, from L_short down.
        own, low, high, foreign = (
            short - curve.gap * curve[name] for name in ("recovery", "low", "high", "foreign")
        )
        hollow = {"linestyle": _FOREIGN, "markerfacecolor": _PAPER, "fillstyle": "full"}
        axes.plot(curve.k, foreign, **style | hollow, linewidth=0.9, markeredgewidth=0.8)
        axes.plot(curve.k, own, **style)
        drawing.band(axes, curve.k, low, high, style["color"], alpha)
    axes.margins(y=0.12)


def _draw_excess(axes: Axes, summary: pd.DataFrame, styles: Styles, beyond: str) -> None:
    axes.set_ylabel(f"{BEYOND[beyond]} recovery")
    axes.axhline(0, color=_INK, linewidth=0.8, zorder=1)
    rows = summary.dropna(subset=[beyond])
    if not len(rows):
        _write_in(axes, "not measured")
        return
    curves = _curves(rows, styles)
    for i, (curve, style) in enumerate(curves):
        k = curve.k * 2 ** (_side_by_side(i, len(curves)) * 0.35)
        reach = error_lengths(curve, beyond)
        axes.errorbar(k, curve[beyond], reach, elinewidth=0.8, capsize=0, **style)
        axes.plot(k, curve.placebo, color=style["color"], linestyle=_PLACEBO, linewidth=0.9)


def _draw_kinds(axes: Axes, rows: pd.DataFrame, styles: Styles, kinds: list[str]) -> None:
    axes.set_xlabel("excess recovery")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if kinds:
        axes.set_yticks(range(len(kinds)), [spell(kind) for kind in kinds], fontsize=6.5)
        axes.set_ylim(len(kinds) - 0.5, -0.5)  # the first kind on top
    rows = rows.dropna(subset=["excess_recovery"])
    if not len(rows):
        _write_in(axes, "not measured")
        if not kinds:
            axes.set_axis_off()
        return
    axes.axvline(0, color=_INK, linewidth=0.8, zorder=1)
    shown = [curve for curve in styles if curve[1] == "tokens" and curve[0] in set(rows.selector)]
    for i, curve in enumerate(shown):
        points = rows[rows.selector == curve[0]]
        y = [kinds.index(kind) + _side_by_side(i, len(shown)) for kind in points.kind]
        axes.errorbar(
            points.excess_recovery, y, elinewidth=0.8, **styles[curve] | {"linestyle": "none"},
            xerr=error_lengths(points, "excess_recovery", "excess"),
        )  # fmt: skip


def _side_by_side(i: int, num: int) -> float:
    """Offset of the i-th of several intervals at one place; all within ± 0.4."""
    return min(0.2, 0.8 / num) * (i - (num - 1) / 2)


def _draw_k_axis(axes: Axes, ks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_xlim(ks[0] * 0.8, ks[-1] * 1.25)
    axes.set_xlabel("k, number of far units")


def _write_in(axes: Axes, text: str) -> None:
    place: Any = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(0.5, 0.5, text, color=_FAINT, **place)


def _legend_handles(styles: Styles, beyond: str) -> list[Artist]:
    handles: list[Artist] = [
        Line2D([], [], label=curve_name(*curve), **style) for curve, style in styles.items()
    ]
    lines = [(_FOREIGN, "foreign control"), (_PLACEBO, "(c): placebo")]
    for line, label in lines if beyond == "net" else lines[:1]:
        style = {"linestyle": line, "linewidth": 0.9, "color": _FAINT}
        handles.append(Line2D([], [], label=label, **style))
    handles.append(Patch(fill=False, edgecolor=_INK, label="(a): placebo"))
    handles.append(Patch(color=_FILL, label="95% over documents\n(b): of recovery"))
    return handles


def _shorten(name: str, limit: int) -> str:
    """Keeps the end of a path, which identifies it best."""
    return name if len(name) <= limit else "…" + name[1 - limit :]


def _styles(results: list[Results]) -> Styles:
    curves = pd.concat([result.summary[_CURVE] for result in results])
    pairs = set(curves.itertuples(index=False, name=None))
    selectors = dict.fromkeys([*_SELECTORS, *curves.selector])
    units = list(dict.fromkeys(["tokens", *sorted(curves.units)]))
    styles: Styles = {}
    for selector, unit in (pair for pair in product(selectors, units) if pair in pairs):
        color, marker = _SELECTORS.get(selector, (_INK, "."))
        line, fill = _UNITS[min(units.index(unit), len(_UNITS) - 1)]
        styles[selector, unit] = {
            "color": color, "marker": marker,
            "markersize": 3.5, "linestyle": line, "fillstyle": fill,
            "markerfacecoloralt": _PAPER,
        }  # fmt: skip
    return styles


def _curves(rows: pd.DataFrame, styles: Styles) -> list[tuple[pd.DataFrame, dict[str, Any]]]:
    """Rows of a summary by selector and units, each with its style, in the order of the legend."""
    curves = dict(iter(rows.sort_values("k").groupby(_CURVE)))
    return [(curves[name], style) for name, style in styles.items() if name in curves]


def error_lengths(rows: pd.DataFrame, value: str, name: str | None = None) -> np.ndarray:
    """Lengths of error bars, as matplotlib expects them, from the columns `name`_low and
    `name`_high (default: those of `value`)."""
    low, high = (rows[f"{name or value}_{end}"] for end in ("low", "high"))
    lengths = np.array([rows[value] - low, high - rows[value]], dtype=float)
    return np.maximum(np.nan_to_num(lengths), 0)
