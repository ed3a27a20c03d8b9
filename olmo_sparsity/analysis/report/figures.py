"""Draw Figure 2: do a few distant units suffice, and are they needed? Never imports torch.

Figure 2 has two panels: recovery and removal by k, own text against unrelated text. The page of a
measurement shows all selectors: (a) the gaps of all targets, (b) recovery, (c) removal, (d) net
excess.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
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

from olmo_sparsity import drawing
from olmo_sparsity.analysis.results.results import Results, main_set
from olmo_sparsity.analysis.results.summary import (
    BEYOND,
    chosen_losses,
    curve_name,
    describe_windows,
)
from olmo_sparsity.analysis.results.view import spell
from olmo_sparsity.errors import ConfigError

_CURVE = ["selector", "units"]

_OF_CURVES = [
    (drawing.BLUE, "o"),
    (drawing.RED, "s"),
    (drawing.GREEN, "^"),
    (drawing.ORANGE, "D"),
    (drawing.PINK, "v"),
    (drawing.SKY, "P"),
]
"""Colour and marker of each curve, or selector."""

_OF_CONTROLS = {"nearest": (drawing.GREY, "+"), "random": (drawing.GREY, "x")}

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
    _INK: "#e8e6e1",
    _FAINT: "#a5a29b",
    _FILL: "#45474d",
    _CHOSEN: "#8f939c",
    _PAPER: "#1d1f24",
    "#0072b2": "#56b4e9",
    "#56b4e9": "#b3e0ff",
    "#882255": "#e28aae",
    drawing.GREY: "#a8a8a8",
}

Styles = dict[tuple[str, str], dict[str, Any]]
"""Style of each (selector, units), in the order of the legend."""


def draw_figure2(results: list[Results], out: Path, labels: list[str] | None = None) -> None:
    """Write Figure 2 to `out`. `labels` name the models. Default: their own names."""
    drawing.save(_headline(results, labels), Path(out), **_SETTINGS)


def selectors_svg(results: Results, *, dark: bool = False) -> bytes:
    """Draw all selectors of a measurement, for its page."""
    svg = drawing.render(lambda: _figure(_of_main_set(results)), "svg", _SETTINGS).decode()
    if dark:
        svg = re.sub(r"(?<=: )#[0-9a-f]{6}", lambda color: _ON_DARK.get(color[0], color[0]), svg)
    return svg.encode()


def _names(results: list[Results], labels: list[str] | None) -> list[str]:
    if not results:
        raise ConfigError("no results to draw; pass at least one folder")
    return drawing.one_label_each(labels, [str(result.meta.model["name"]) for result in results])


@dataclass(frozen=True)
class Curve:
    """A measurement in the headline figure: the summary's rows of one selector, by k."""

    label: str
    rows: pd.DataFrame
    """With the columns k, units, recovery, low, high, foreign, removal, removal_low, …"""
    windows: dict[str, Any]


def draw_headline(curves: list[Curve], title: str = "") -> Figure:
    """Draw recovery and removal by k, own text against unrelated text and placebo."""
    figure = Figure(figsize=(5.5, 3.3), layout="constrained")
    enough, needed = figure.subplots(1, 2, sharey=True)
    sizes = [
        f"windows {c.windows['long']} / {c.windows['short']} tokens, "
        f"n = {c.rows.num_targets.iloc[0]:,.0f} targets, "
        f"{c.rows.num_documents.iloc[0]:,.0f} documents"
        for c in curves
    ]
    shared = len(set(sizes)) == 1
    head = [title, sizes[0] if shared else ""]
    figure.suptitle("\n".join(filter(None, head)), fontsize=7.5)
    styles = [
        (curve, units)
        for curve in curves
        for units in sorted(curve.rows.units.unique(), key=lambda name: name != "tokens")
    ]
    handles: list[Artist] = []
    for number, (curve, units) in enumerate(styles):
        rows = curve.rows[curve.rows.units == units].sort_values("k")
        color, marker = _OF_CURVES[number % len(_OF_CURVES)]
        style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4}
        for axes, value, low, control, line in (
            (enough, "recovery", "", "foreign", _FOREIGN),
            (needed, "removal", "removal_", "placebo_removal", _PLACEBO),
        ):
            axes.plot(rows.k, rows[value], **style)
            drawing.band(axes, rows.k, rows[f"{low}low"], rows[f"{low}high"], color)
            axes.plot(rows.k, rows[control], linestyle=line, linewidth=0.9, color=color)
        name = f"{curve.label}, {units}" + ("" if shared else f"; {sizes[curves.index(curve)]}")
        handles.append(Line2D([], [], label=name, **style))
    ks = sorted(set().union(*(curve.rows.k for curve in curves)))
    for axes, title in ((enough, "Enough? k units alone"), (needed, "Needed? All but k units")):
        _draw_k_axis(axes, ks)
        axes.set_title(title, loc="left", fontweight="bold")
        for level in (0, 1):
            axes.axhline(level, color=_INK, linewidth=0.8, zorder=1)
    enough.set_ylabel("recovery (1: the whole gap)")
    needed.set_ylabel("removal (1: the whole gap)")
    needed.tick_params(labelleft=True)
    for line, label in ((_FOREIGN, "best k of unrelated text"), (_PLACEBO, "placebo targets")):
        handles.append(Line2D([], [], linestyle=line, linewidth=0.9, color=_FAINT, label=label))
    handles.append(Patch(color=_FILL, label="95% over documents"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _headline(results: list[Results], labels: list[str] | None) -> Callable[[], Figure]:
    curves = []
    for name, result in zip(_names(results, labels), map(_of_main_set, results), strict=True):
        rows = result.summary
        rows = rows[rows.selector == (rows.selector.iloc[0] if len(rows) else "")]
        if len(rows):
            label = f"{_shorten(name, 40)}, {spell(rows.selector.iloc[0])}"
            curves.append(Curve(label, rows, result.meta.windows))
    if not curves:
        return lambda: _nothing()
    return lambda: draw_headline(curves)


def _nothing() -> Figure:
    figure = Figure(figsize=(5.5, 1))
    figure.text(0.5, 0.5, "not measured", ha="center", va="center", color=_FAINT)
    return figure


def _of_main_set(results: Results) -> Results:
    """The results with only the main target set in the summary."""
    name, rows = main_set(results.targets.target_set), results.summary
    return replace(results, summary=rows[rows.target_set == name])


def _figure(results: Results) -> Figure:
    summary, styles = results.summary, _styles(results)
    beyond = "net" if summary.net.notna().any() else "excess"
    handles = _legend_handles(styles, beyond)
    heights = [1.0, 1.0, 0.09 * -(-len(handles) // 4)]
    figure = Figure(figsize=(5.5, 2.2 * (0.06 + sum(heights))), layout="constrained")
    # Separate subfigures, so that a panel with long labels narrows its own row only.
    rows: Any = figure.subfigures(3, 1, height_ratios=heights)
    head = f"{_shorten(str(results.meta.model['name']), 90)}\n{' · '.join(_describe(results))}"
    figure.suptitle(head, fontsize=7, linespacing=1.35)
    (gaps, recovery), (removal, excess) = rows[0].subplots(1, 2), rows[1].subplots(1, 2)
    gaps.set_ylim(0.6, max(1.0, _draw_gaps(gaps, results)))
    for axes in (recovery, removal, excess):
        _draw_k_axis(axes, sorted(set(summary.k)) or [1])
    _draw_share(recovery, summary, styles, "recovery")
    _draw_share(removal, summary, styles, "removal")
    _draw_excess(excess, summary, styles, beyond)
    titles = {
        "(a) What the long context gains": gaps,
        "(b) Enough? Only k distant units": recovery,
        "(c) Needed? All but these k": removal,
        "(d) Net excess" if beyond == "net" else "(d) Excess; no placebo": excess,
    }
    for title, axes in titles.items():
        axes.set_title(title, loc="left", fontweight="bold", pad=7)
    how: Any = {"frameon": False, "handlelength": 2.6, "columnspacing": 1.4}
    rows[2].legend(handles=handles, loc="center", ncols=4, **how)
    return figure


def _describe(results: Results) -> list[str]:
    losses = results.reported
    num_documents, num_chosen = losses.document.nunique(), len(chosen_losses(results))
    chosen_by = results.meta.targets.get("chosen_by")
    return [
        *([results.missing] if results.missing else []),
        *([f"units ranked by {_shorten(chosen_by['name'], 24)}"] if chosen_by else []),
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
            (threshold, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(4 * side, 0),
            textcoords="offset points",
            va="top",
            ha="left" if side > 0 else "right",
            fontsize=6.5,
            linespacing=1.35,
            bbox={"facecolor": _PAPER, "alpha": 0.8, "linewidth": 0, "pad": 1},
        )
    return max(counts.max(), by_placebo.max(), 3) * (3 if side > 0 else 20)


def _draw_share(axes: Axes, summary: pd.DataFrame, styles: Styles, value: str) -> None:
    """`value`: recovery, with that of units of the unrelated text, or removal, with that of the
    placebo."""
    names = {
        "recovery": ("low", "high", "foreign"),
        "removal": ("removal_low", "removal_high", "placebo_removal"),
    }
    won = "won" if value == "recovery" else "lost"
    axes.set_ylabel(f"{value}: share of the gap {won}")
    rows = summary.dropna(subset=[value])
    if not len(rows):
        _write_in(axes, "not measured")
        return
    for level in (0, 1):
        axes.axhline(level, color=_INK, linewidth=0.8, zorder=1)
    alpha = 0.13 if len(styles) <= 5 else 0.06
    for curve, style in reversed(_curves(rows, styles)):  # the first on top
        low, high, control = (curve[name] for name in names[value])
        thin: dict[str, Any] = {"linewidth": 0.9, "markeredgewidth": 0.8}
        thin |= {"linestyle": _FOREIGN, "markerfacecolor": _PAPER, "fillstyle": "full"}
        if value == "removal":
            thin |= {"linestyle": _PLACEBO, "marker": ""}
        if control.notna().any():
            axes.plot(curve.k, control, **style | thin)
        axes.plot(curve.k, curve[value], **style)
        drawing.band(axes, curve.k, low, high, style["color"], alpha)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=min(axes.get_ylim()[0], -0.22))
    axes.annotate(
        f"1: all distant units, {rows.gap.iloc[0]:.2f} nats",
        (1, 0),
        fontsize=6.5,
        color=_FAINT,
        xycoords=("axes fraction", "data"),
        xytext=(0, -2),
        textcoords="offset points",
        ha="right",
        va="top",
    )


def _draw_excess(axes: Axes, summary: pd.DataFrame, styles: Styles, beyond: str) -> None:
    """Draw the intervals of all curves, side by side at each k."""
    axes.set_ylabel(f"{BEYOND[beyond]} recovery")
    axes.axhline(0, color=_INK, linewidth=0.8, zorder=1)
    rows = summary.dropna(subset=[beyond])
    if not len(rows):
        _write_in(axes, "not measured")
        return
    curves = _curves(rows, styles)
    for i, (curve, style) in enumerate(curves):
        k = curve.k * 2 ** (_side_by_side(i, len(curves)) * 0.35)
        ends = np.array(
            [curve[beyond] - curve[f"{beyond}_low"], curve[f"{beyond}_high"] - curve[beyond]]
        )
        lengths = np.maximum(np.nan_to_num(ends.astype(float)), 0)
        axes.errorbar(k, curve[beyond], lengths, elinewidth=0.8, capsize=0, **style)
        axes.plot(k, curve.placebo, color=style["color"], linestyle=_PLACEBO, linewidth=0.9)


def _side_by_side(i: int, num: int) -> float:
    """Offset of the i-th of several intervals at one place; all within ± 0.4."""
    return min(0.2, 0.8 / num) * (i - (num - 1) / 2)


def _draw_k_axis(axes: Axes, ks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_xlim(ks[0] * 0.8, ks[-1] * 1.25)
    axes.set_xlabel("k, number of distant units")


def _write_in(axes: Axes, text: str) -> None:
    place: Any = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(0.5, 0.5, text, color=_FAINT, **place)


def _legend_handles(styles: Styles, beyond: str) -> list[Artist]:
    handles: list[Artist] = [
        Line2D([], [], label=curve_name(*curve), **style) for curve, style in styles.items()
    ]
    lines = [(_FOREIGN, "(b): unrelated text"), (_PLACEBO, "(c), (d): placebo")]
    for line, label in lines if beyond == "net" else lines[:1]:
        style = {"linestyle": line, "linewidth": 0.9, "color": _FAINT}
        handles.append(Line2D([], [], label=label, **style))
    handles.append(Patch(fill=False, edgecolor=_INK, label="(a): placebo"))
    handles.append(Patch(color=_FILL, label="95% over documents"))
    return handles


def _shorten(name: str, limit: int) -> str:
    """Keeps the end of a path, which identifies it best."""
    return name if len(name) <= limit else "…" + name[1 - limit :]


def _styles(results: Results) -> Styles:
    """Selectors differ in colour and marker, in their order in the measurement; units in line and
    fill. Controls that need no model are grey."""
    summary = results.summary
    ranking = [name for name in summary.selector.unique() if name not in _OF_CONTROLS]
    looks = {name: _OF_CURVES[i % len(_OF_CURVES)] for i, name in enumerate(ranking)}
    units = list(dict.fromkeys(["tokens", *sorted(summary.units)]))
    styles: Styles = {}
    pairs = set(summary[_CURVE].itertuples(index=False, name=None))
    for selector, unit in (pair for pair in product(looks | _OF_CONTROLS, units) if pair in pairs):
        color, marker = (looks | _OF_CONTROLS)[selector]
        line, fill = _UNITS[min(units.index(unit), len(_UNITS) - 1)]
        styles[selector, unit] = {
            "color": color,
            "marker": marker,
            "markersize": 3.5,
            "linestyle": line,
            "fillstyle": fill,
            "markerfacecoloralt": _PAPER,
        }
    return styles


def _curves(rows: pd.DataFrame, styles: Styles) -> list[tuple[pd.DataFrame, dict[str, Any]]]:
    """Rows of a summary by selector and units, each with its style, in the order of the legend."""
    curves = dict(iter(rows.sort_values("k").groupby(_CURVE)))
    return [(curves[name], style) for name, style in styles.items() if name in curves]
