"""Draw Figure 2: do a few distant units suffice, and are they needed? Recovery and removal by k:
own text against unrelated text and the placebo. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from olmo_sparsity import drawing
from olmo_sparsity.analysis.results.results import Results, main_set
from olmo_sparsity.analysis.results.view import spell
from olmo_sparsity.errors import ConfigError

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
    """Write Figure 2 to `out`. `labels` name the models. Default: their own names."""
    if not results:
        raise ConfigError("no results to draw; pass at least one folder")
    own = [str(result.meta.model["name"]) for result in results]
    curves = curves_of(results, drawing.one_label_each(labels, own))
    drawing.save(lambda: draw_headline(curves), Path(out), **_SETTINGS)


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
    if not curves:
        figure.text(0.5, 0.5, "not measured", ha="center", va="center", color=_FAINT)
        return figure
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


def curves_of(results: list[Results], names: list[str]) -> list[Curve]:
    """The first selector of each measurement, at its main target set."""
    curves = []
    for name, result in zip(names, results, strict=True):
        rows = result.summary[result.summary.target_set == main_set(result.targets.target_set)]
        for selector in rows.selector.unique()[:1]:
            shown = name if len(name) <= 40 else "…" + name[-39:]  # the end of a path
            label = f"{shown}, {spell(selector)}"
            curves.append(Curve(label, rows[rows.selector == selector], result.meta.windows))
    return curves


def _draw_k_axis(axes: Axes, ks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_xlim(ks[0] * 0.8, ks[-1] * 1.25)
    axes.set_xlabel("k, number of distant units")
