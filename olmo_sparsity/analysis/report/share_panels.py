"""Draw panels (b) to (e) of Figure 2: the share of the gap that k units recover, or that is lost
without them.

    curves, panels (panels.py) → `draw_curves` → lines with bands, controls, entries of the legend
                               → `draw_frame`  → title and axes of one panel
    curves                     → `common_size` → windows 4096 / 128 tokens, n = 528 targets, …

Where a curve has several points it is a line with a band, and its controls are lines; a single
point has an error bar, and its controls are markers beside it. figures.py calls these functions.
Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from olmo_sparsity.analysis.report.curves import Curve
from olmo_sparsity.analysis.report.figure_style import FAINT, FILL, INK, draw_axis
from olmo_sparsity.analysis.report.panels import PLACEBO_RECOVERY, UNRELATED, Panel
from olmo_sparsity.analysis.results.doubts import (
    describe_missing_placebo,
    has_net,
    warnings_of_few,
)
from olmo_sparsity.base import drawing

_MARKERS = ("o", "s", "^", "D", "v", "P")
"""Markers of the kinds of units, in the order in which they are drawn."""

_HIGHEST_SHARE = 1.75
"""An axis of recovery or removal ends here."""


def common_size(curves: Sequence[Curve]) -> str:
    """Return windows and numbers of targets and documents as one line, if they are those of all
    curves. Otherwise return an empty text, as `draw_curves` names them for each curve."""
    sizes = {_describe_size(curve) for curve in curves}
    return sizes.pop() if len(sizes) == 1 else ""


def draw_curves(
    grid: Sequence[Axes],
    panels: Sequence[Panel],
    curves: Sequence[Curve],
    colors: Mapping[str, str],
    names: Mapping[str, str],
) -> list[Artist]:
    """Draw the curves of all panels except that of gaps, and return the entries of the legend.

    Args:
        grid: The axes of the panels, from that by k on. There may be more axes than panels.
        panels: The panels.
        curves: The curves.
        colors: Label of a curve → its colour.
        names: Label of a curve → its name in the legend.
    """
    names_have_sizes = not common_size(curves)
    kinds = _kinds_of_units(curves)
    handle_by_name: dict[str, Artist] = {}
    for curve in curves:
        for kind_index, units in enumerate(kinds):
            if units not in set(curve.rows.units):
                continue
            color = colors[curve.label]
            marker = _MARKERS[kind_index % len(_MARKERS)]
            style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4}
            for axes, panel in zip(grid, panels, strict=False):
                _draw_curve(axes, panel, curve, units, style)
            _draw_transferred(grid[0], curve, units, color)

            name = f"{names[curve.label]}, {curve.selector}, {units}"
            name += _describe_num_alike(curves, curve, units)
            if names_have_sizes:
                name += f"; {_describe_size(curve)}"
            # Curves of one name have one entry.
            handle_by_name.setdefault(name, Line2D([], [], label=name, **style))
    return [*handle_by_name.values(), *_handles_of_controls(curves)]


def _describe_num_alike(curves: Sequence[Curve], curve: Curve, units: str) -> str:
    """Return how many curves share the label and selector of a curve and have these units, such as
    those of several seeds, which are not averaged. Return an empty text for one."""
    num_alike = sum(
        other.label == curve.label
        and other.selector == curve.selector
        and units in set(other.rows.units)
        for other in curves
    )
    return f" ({num_alike} runs, a line each)" if num_alike > 1 else ""


def _describe_size(curve: Curve) -> str:
    """Return the windows of a curve, its numbers of targets and documents, and warnings, as one
    line."""
    first = curve.rows.iloc[0]
    size = (
        f"windows {first.windows} tokens, n = {first.num_targets:,.0f} targets, "
        f"{first.num_documents:,.0f} documents"
    )
    warnings = warnings_of_few(first, has_net(curve.rows))
    missing_placebo = describe_missing_placebo(first, curve.is_transfer)
    if missing_placebo:
        warnings.append(missing_placebo)
    return "; ".join([size, *warnings])


def _kinds_of_units(curves: Sequence[Curve]) -> list[str]:
    """Return the kinds of units that are drawn, tokens first."""
    kinds: dict[str, None] = {}
    for curve in curves:
        kinds |= dict.fromkeys(curve.rows.units)
    return sorted(kinds, key=lambda units: units != "tokens")


def _draw_curve(
    axes: Axes, panel: Panel, curve: Curve, units: str, style: Mapping[str, Any]
) -> None:
    """Draw a curve in a panel: its value with the interval, and its controls.

    Args:
        axes: The axes of the panel.
        panel: What it shows.
        curve: The curve.
        units: The kind of units that is drawn.
        style: Colour and marker, as matplotlib takes them.
    """
    rows_of_curve = curve.along(panel.axis)
    # Where the targets have no gap, there is no value, and a control has nothing to be compared
    # with.
    has_value = rows_of_curve[panel.column.name].notna()
    rows = rows_of_curve[(rows_of_curve.units == units) & has_value]
    value = rows[panel.column.name]
    x = rows[panel.axis]
    axes.plot(x, value, **style)
    low = rows[panel.column.low]
    high = rows[panel.column.high]
    if len(rows) > 1:
        drawing.band(axes, x, low, high, style["color"])
        for control in panel.controls:
            values = rows[control.column]
            axes.plot(x, values, linestyle=control.line, linewidth=0.9, color=style["color"])
        return

    # A line and a band need two points; a single one gets error bars and markers.
    _draw_point(axes, x, value, low, high, style["color"])
    for control in panel.controls:
        _draw_point(
            axes,
            x * control.beside,
            rows[control.column],
            rows.get(f"{control.column}_low"),
            rows.get(f"{control.column}_high"),
            style["color"],
            control.marker,
        )


def _draw_point(
    axes: Axes,
    x: pd.Series,
    value: pd.Series,
    low: pd.Series | None,
    high: pd.Series | None,
    color: str,
    marker: str = "",
) -> None:
    """Draw a value with its interval as an error bar, and with a hollow marker if `marker` names
    one."""
    bars = None
    if low is not None and high is not None and low.notna().all():
        bars = [(value - low).clip(lower=0), (high - value).clip(lower=0)]
    axes.errorbar(
        x,
        value,
        bars,
        color=color,
        marker=marker,
        markersize=5,
        markerfacecolor="none",
        linestyle="none",
        linewidth=0.9,
        capsize=2,
    )


def _draw_transferred(axes: Axes, curve: Curve, units: str, color: str) -> None:
    """Draw recovery by units that another model chose, as stars."""
    rows = curve.transferred
    if not len(rows):
        return
    rows = rows[rows.units == units]
    axes.plot(rows.k, rows.recovery, color=color, marker="*", markersize=6, linestyle="none")


def _handles_of_controls(curves: Sequence[Curve]) -> list[Artist]:
    """Return the legend's entries for controls and intervals, which all curves share."""
    if not curves:
        return []
    handles: list[Artist] = []
    # The placebo of removal is drawn as that of recovery is.
    labels = {"placebo targets": PLACEBO_RECOVERY, "best k of unrelated text": UNRELATED}
    has_points = any(curve.rows.k.nunique() == 1 for curve in curves)
    for label, control in labels.items():
        marker = control.marker if has_points else ""
        style: dict[str, Any] = {"linestyle": control.line, "marker": marker, "markersize": 5}
        handles.append(Line2D([], [], linewidth=0.9, color=FAINT, label=label, **style))
    if any(len(curve.transferred) for curve in curves):
        label = "units that another seed chose"
        handles.append(Line2D([], [], marker="*", linestyle="none", color=FAINT, label=label))
    handles.append(Patch(color=FILL, label="95% over documents"))
    return handles


# --- titles and axes ------------------------------------------------------------------------------


def draw_frame(axes: Axes, panel: Panel, curves: Sequence[Curve]) -> None:
    """Draw the title, the axes and the lines at 0 and 1 of a panel whose curves are drawn."""
    values: set[float] = set()
    for curve in curves:
        values |= set(curve.along(panel.axis)[panel.axis])
    draw_axis(axes, panel.axis, values)
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set_ylabel(f"{panel.column.name} (1: the whole gap)")
    for level in (0, 1):
        axes.axhline(level, color=INK, linewidth=0.8, zorder=1)
    _cut_at_shares(axes)


def _cut_at_shares(axes: Axes) -> None:
    """Cut an axis at `_HIGHEST_SHARE`. Higher values are shares of a gap that is nearly 0: they say
    nothing, and would press all other curves to the bottom."""
    low, high = axes.get_ylim()
    if high <= _HIGHEST_SHARE:
        return
    axes.set_ylim(max(low, 1 - _HIGHEST_SHARE), _HIGHEST_SHARE)
    remark = f"cut at {_HIGHEST_SHARE}: the highest is {high:.2g}"
    axes.text(0.98, 0.97, remark, transform=axes.transAxes, ha="right", va="top", fontsize=6)
