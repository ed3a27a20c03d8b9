"""Draw Figure 2: do a few distant units suffice, and are they needed? Recovery and removal by k:
own text against unrelated text and placebo; recovery by length and step. Never imports torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.results.results import Results, main_set
from olmo_sparsity.analysis.results.view import spell
from olmo_sparsity.base import drawing
from olmo_sparsity.base.errors import ConfigError, DataError

_OF_CURVES = [
    (drawing.BLUE, "o"),
    (drawing.RED, "s"),
    (drawing.GREEN, "^"),
    (drawing.ORANGE, "D"),
    (drawing.PINK, "v"),
    (drawing.SKY, "P"),
]
"""Colour and marker of each curve."""

_FOREIGN: Any = (0, (3, 1.6))
_PLACEBO: Any = ":"
_INK, _FAINT, _FILL = "#1a1a1a", "#767676", "#d9d9d9"
_SETTINGS = {
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), _INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), _FAINT),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "#ffffff"),
    "axes.labelcolor": _INK,
}


def draw_figure2(results: list[Results], out: Path, labels: list[str] | None = None) -> None:
    """Write Figure 2 to `out`. `labels` name the results, or the runs and models that they are of.
    Default: the names of these."""
    if not results:
        raise ConfigError("no results to draw; pass at least one folder")
    if (
        len({interpretation_of(result.meta.windows["far_states"]).replaces for result in results})
        > 1
    ):
        raise DataError("gaps of masked and of replaced distant text differ; draw them apart")
    names = [str(result.meta.model["name"]).partition("/checkpoints/")[0] for result in results]
    runs = list(dict.fromkeys(names))
    if labels is not None and len(labels) == len(runs):
        names, labels = [labels[runs.index(name)] for name in names], None
    curves = curves_of(results, drawing.one_label_each(labels, names))
    drawing.save(lambda: draw_headline(curves), Path(out), **_SETTINGS)


@dataclass(frozen=True)
class Curve:
    """A run in the headline figure: the summary's rows of one selector."""

    label: str
    rows: pd.DataFrame
    """By k, at the last step and the longest windows. With the columns k, units, recovery, low,
    high, foreign, removal, removal_low, …, and length, step, windows of the measurement."""
    of_run: pd.DataFrame
    """With the smallest k, of all measurements of the run."""

    def along(self, axis: str) -> pd.DataFrame:
        """Rows that differ by this alone, in its order."""
        fixed = {"k": [], "length": ["step"], "step": ["length"]}[axis]
        rows = (self.of_run if fixed else self.rows).sort_values(axis)
        return rows[(rows[fixed] == self.rows[fixed].iloc[0]).all(axis=1)]


def draw_headline(curves: list[Curve]) -> Figure:
    """Draw recovery and removal by k, own text against unrelated text and placebo; where a run was
    measured at several lengths or steps, recovery by these."""
    more = [
        axis
        for axis in ("length", "step")
        if any(c.along(axis)[axis].nunique() > 1 for c in curves)
    ]
    figure = Figure(figsize=(5.5, 5.5) if more else (5.5, 3.3), layout="constrained")
    if not curves:
        figure.text(0.5, 0.5, "not measured", ha="center", va="center", color=_FAINT)
        return figure
    panels = [
        ("k", "Enough? k units alone", "recovery", "", "foreign", _FOREIGN),
        ("k", "Needed? All but k units", "removal", "removal_", "placebo_removal", _PLACEBO),
        *((axis, _TITLES[axis], "recovery", "", "foreign", _FOREIGN) for axis in more),
    ]
    grid = figure.subplots(-(-len(panels) // 2), 2, sharey=True).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    sizes = [
        f"windows {c.rows.windows.iloc[0]} tokens, "
        f"n = {c.rows.num_targets.iloc[0]:,.0f} targets, "
        f"{c.rows.num_documents.iloc[0]:,.0f} documents"
        for c in curves
    ]
    shared = len(set(sizes)) == 1
    figure.suptitle(sizes[0] if shared else "", fontsize=7.5)
    styles = [
        (curve, units)
        for curve in curves
        for units in sorted(curve.rows.units.unique(), key=lambda name: name != "tokens")
    ]
    handles: list[Artist] = []
    for number, (curve, units) in enumerate(styles):
        color, marker = _OF_CURVES[number % len(_OF_CURVES)]
        style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4}
        for axes, (axis, _, value, low, control, line) in zip(grid, panels, strict=False):
            rows = curve.along(axis)[lambda rows, units=units: rows.units == units]
            axes.plot(rows[axis], rows[value], **style)
            drawing.band(axes, rows[axis], rows[f"{low}low"], rows[f"{low}high"], color)
            axes.plot(rows[axis], rows[control], linestyle=line, linewidth=0.9, color=color)
        name = f"{curve.label}, {units}" + ("" if shared else f"; {sizes[curves.index(curve)]}")
        handles.append(Line2D([], [], label=name, **style))
    for axes, (axis, title, value, *_) in zip(grid, panels, strict=False):
        _draw_axis(axes, axis, set().union(*(curve.along(axis)[axis] for curve in curves)))
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_ylabel(f"{value} (1: the whole gap)")
        axes.tick_params(labelleft=True)
        for level in (0, 1):
            axes.axhline(level, color=_INK, linewidth=0.8, zorder=1)
    for line, label in ((_FOREIGN, "best k of unrelated text"), (_PLACEBO, "placebo targets")):
        handles.append(Line2D([], [], linestyle=line, linewidth=0.9, color=_FAINT, label=label))
    handles.append(Patch(color=_FILL, label="95% over documents"))
    ncols = 1 if max(len(str(handle.get_label())) for handle in handles) > 55 else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, frameon=False)
    return figure


def curves_of(results: list[Results], names: list[str]) -> list[Curve]:
    """The first selector of each measurement, at its main target set. Those of one name are a
    curve if they differ in length or step."""
    curves = []
    for name in dict.fromkeys(names):
        own = [one for one, of in zip(results, names, strict=True) if of == name]
        found = [rows for one in own if len(rows := _rows_of(one))]
        places = {tuple(rows[["step", "length"]].iloc[0]): rows for rows in found}
        is_one = len(places) == len(found) > 1
        for rows in [places[max(places)]] if is_one else found:
            shown = name if len(name) <= 30 else "…" + name[-29:]  # the end of a path
            every = pd.concat(found) if is_one else rows
            label = f"{shown}, {spell(rows.selector.iloc[0])}"
            curves.append(Curve(label, rows, every[every.k == every.k.min()]))
    return curves


def _rows_of(result: Results) -> pd.DataFrame:
    rows = result.summary[result.summary.target_set == main_set(result.targets.target_set)]
    long, short = (result.meta.windows[name] for name in ("long", "short"))
    step = (result.meta.model.get("trained") or {}).get("step") or 0
    length = float("inf") if long == "all" else long
    rows = rows.assign(windows=f"{long} / {short}", length=length, step=step)
    return rows[rows.selector == rows.selector.iloc[0]] if len(rows) else rows


_TITLES = {
    "length": "By length: smallest k, last step",
    "step": "By step: smallest k, longest windows",
}
_LABELS = {"k": "k, number of distant units", "length": "long window, tokens", "step": "step"}


def _draw_axis(axes: Axes, name: str, values: Collection[float]) -> None:
    axes.set_xlabel(_LABELS[name])
    if name == "step":
        return
    ticks = sorted(value for value in values if value < float("inf"))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(ticks[0] * 0.8, ticks[-1] * 1.25)
