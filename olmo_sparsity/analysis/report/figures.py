"""Draw Figure 2: how much distant text helps, and how much of that a few units recover.

    (a)        how much distant text reduces the loss, by the length of the window and the step
    (b)        how much of that k distant units recover, next to unrelated text and placebo targets
    (c)        how much is lost without these units
    (d), (e)   recovery by length and by step, where a run was measured at several

`draw_figure2` sorts results into curves (curves.py) and writes the file; `draw_headline` draws the
panels. Never imports torch.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.report.curves import Curve, Drawn, curves_of, run_of
from olmo_sparsity.analysis.results.doubts import (
    describe_missing_placebo,
    has_net,
    warnings_of_few,
)
from olmo_sparsity.base import drawing
from olmo_sparsity.base.errors import ConfigError, DataError, check_type, printable
from olmo_sparsity.base.files import path_of

_COLORS = (
    drawing.BLUE,
    drawing.RED,
    drawing.GREEN,
    drawing.ORANGE,
    drawing.PINK,
    drawing.SKY,
    drawing.BLACK,
)
_COLOR_OF_SCHEME = {"pose": drawing.BLUE, "contiguous": drawing.RED, "randomized": drawing.GREEN}
"""Colour of each position scheme. It does not depend on which other models are drawn."""

_MARKERS = ("o", "s", "^", "D", "v", "P")
"""Markers of the kinds of units, in the order in which they are drawn."""

_UNRELATED: Any = (0, (3, 1.6))
"""Line style of the best units of an unrelated text: dashes, as matplotlib takes them (offset, (on,
off))."""

_PLACEBO: Any = ":"
"""Line style of placebo targets."""

_CONTROL_MARKERS = {"placebo_recovery": "x", "placebo_removal": "x", "unrelated": "+"}
"""Marker of a control where it has one point only, so that no line can be drawn."""

_BESIDE = {"placebo_recovery": 1.08, "placebo_removal": 1.08, "unrelated": 0.93}
"""Factors that move such markers to the side of the value, so that error bars do not overlap."""

_INK = "#1a1a1a"
_FAINT = "#767676"
_FILL = "#d9d9d9"
_WHITE = "#ffffff"

_SETTINGS = {
    "text.color": _INK,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "axes.facecolor": _WHITE,
    "figure.facecolor": _WHITE,
    "savefig.facecolor": _WHITE,
}


@dataclass(frozen=True)
class Missing:
    """A point of the figure that has no result, and why."""

    label: str
    reason: str
    length: float | None = None
    """None: unknown; infinite: all earlier text."""

    step: int | None = None
    """None: the last one."""

    positions: str | None = None
    """The model's position scheme, which determines the colour."""

    @property
    def place(self) -> str:
        """Return length and step in words, as far as they are known."""
        parts = []
        if self.length == float("inf"):
            parts.append("all text")
        elif self.length is not None:
            parts.append(f"{self.length:,.0f}")
        if self.step:
            parts.append(f"step {self.step:,}")
        return ", ".join(parts)


def draw_figure2(
    results: Sequence[Drawn],
    out: Path,
    labels: list[str] | None = None,
    missing: Sequence[Missing] = (),
) -> None:
    """Write Figure 2 to `out`.

    Args:
        results: Measurements, at least one unless all points are missing.
        out: The file: .png, .pdf or .svg.
        labels: Names for the results, or for their runs and models. Results of one label are of one
            scheme, such as its seeds. Default: the names of runs and models.
        missing: Points that have no result, which the legend lists with their reasons.
    """
    is_list = isinstance(results, list | tuple)
    if not is_list or not all(hasattr(result, "meta") for result in results):
        shown = printable(repr(results))[:60]
        raise ConfigError(f"results={shown} must be a list of what `measure` returned")
    out = path_of("out", out)
    if labels is not None:
        check_type("labels", labels, str, "a list of names, one for each model", several=True)
    if not results and not missing:
        raise ConfigError("no results to draw; pass at least one folder")
    kinds_of_gaps = set()
    for result in results:
        interpretation = interpretation_of(result.meta.windows["distant_states"])
        kinds_of_gaps.add(interpretation.replaces)
    if len(kinds_of_gaps) > 1:
        raise DataError("gaps of masked and of replaced distant text differ; draw them apart")
    names = [run_of(result) for result in results]
    runs = list(dict.fromkeys(names))
    # With a label for each run, results of a run share it; otherwise there is one for each result.
    if labels is not None and len(labels) == len(runs):
        names = [labels[runs.index(name)] for name in names]
        labels = None
    curves = curves_of(results, drawing.one_label_each(labels, names))
    drawing.save(lambda: draw_headline(curves, missing), out, **_SETTINGS)


# --- the figure ---------------------------------------------------------------------------------


def colors_of(curves: Sequence[Curve], missing: Sequence[Missing] = ()) -> dict[str, str]:
    """Return the colour of each label: that of its position scheme, or else the next free colour.
    It does not depend on the order of the results."""
    schemes = {curve.label: curve.trained.get("positions") for curve in curves}
    for point in missing:
        schemes[point.label] = schemes.get(point.label) or point.positions
    colors: dict[str, str] = {}
    for label in sorted(schemes):
        color = _COLOR_OF_SCHEME.get(str(schemes[label]))
        is_free = color not in colors.values()
        if color is not None and is_free:
            colors[label] = color
    for label in sorted(schemes.keys() - colors.keys()):
        free = [color for color in _COLORS if color not in colors.values()]
        colors[label] = free[0] if free else drawing.GREY
    return colors


@dataclass(frozen=True)
class _Panel:
    """A panel of the figure: a column of the summary along an axis."""

    axis: str
    """k, length or step."""

    title: str
    value: str
    """The column that is drawn."""

    prefix_of_ends: str
    """What precedes `low` and `high` in the names of the columns with its interval."""

    controls: Mapping[str, Any]
    """The columns of the controls → the style of their lines."""


_CONTROLS_OF_RECOVERY = {"placebo_recovery": _PLACEBO, "unrelated": _UNRELATED}

_PANELS = (
    _Panel("k", "(b) Enough? k units added", "recovery", "", _CONTROLS_OF_RECOVERY),
    _Panel("k", "(c) Needed? All but k", "removal", "removal_", {"placebo_removal": _PLACEBO}),
)


def draw_headline(curves: Sequence[Curve], missing: Sequence[Missing] = ()) -> Figure:
    """Draw all panels: the gap by length and step; recovery and removal by k, own text against
    placebo targets and unrelated text; and recovery by length or step where a run has several."""
    panels = [*_PANELS, *_panels_of_runs(curves)]
    num_panels = 1 + len(panels)  # the first is that of gaps
    num_columns = 2 if num_panels == 4 else 3
    num_rows = math.ceil(num_panels / num_columns)
    height = 3.1 + 2.3 * (num_rows - 1) + 0.13 * len(missing)
    figure = Figure(figsize=(7.5, height), layout="constrained")
    if not curves and not missing:
        figure.text(0.5, 0.5, "not measured", ha="center", va="center", color=_FAINT)
        return figure

    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes in grid[num_panels:]:
        axes.set_visible(False)
    colors = colors_of(curves, missing)
    _draw_gaps(grid[0], curves, missing, colors)
    labels = [curve.label for curve in curves] + [point.label for point in missing]
    names = drawing.short_labels(labels)
    handles = _draw_curves(figure, list(grid[1:]), panels, curves, colors, names)
    for axes, panel in zip(grid[1:], panels, strict=False):
        _draw_frame(axes, panel, curves)

    handles += _handles_of_missing(missing, colors, names)
    longest = max(len(str(handle.get_label())) for handle in handles)
    entries_per_row = 1 if longest > 55 else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=entries_per_row, frameon=False)
    return figure


def _panels_of_runs(curves: Sequence[Curve]) -> list[_Panel]:
    """Return a panel for each axis along which a run was measured more than once."""
    panels: list[_Panel] = []
    letters = iter("de")
    for axis in ("length", "step"):
        if any(curve.along(axis)[axis].nunique() > 1 for curve in curves):
            title = f"({next(letters)}) {_TITLES[axis]}"
            panels.append(_Panel(axis, title, "recovery", "", _CONTROLS_OF_RECOVERY))
    return panels


def _draw_frame(axes: Axes, panel: _Panel, curves: Sequence[Curve]) -> None:
    """Draw the title, the axes and the lines at 0 and 1 of a panel whose curves are drawn."""
    values: set[float] = set()
    for curve in curves:
        values |= set(curve.along(panel.axis)[panel.axis])
    _draw_axis(axes, panel.axis, values)
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set_ylabel(f"{panel.value} (1: the whole gap)")
    for level in (0, 1):
        axes.axhline(level, color=_INK, linewidth=0.8, zorder=1)
    _cut_at_shares(axes)


_HIGHEST_SHARE = 1.75
"""An axis of recovery or removal ends here."""


def _cut_at_shares(axes: Axes) -> None:
    """Cut an axis at `_HIGHEST_SHARE`. Higher values are shares of a gap that is nearly 0: they say
    nothing, and would press all other curves to the bottom."""
    low, high = axes.get_ylim()
    if high <= _HIGHEST_SHARE:
        return
    axes.set_ylim(max(low, 1 - _HIGHEST_SHARE), _HIGHEST_SHARE)
    remark = f"cut at {_HIGHEST_SHARE}: the highest is {high:.2g}"
    axes.text(0.98, 0.97, remark, transform=axes.transAxes, ha="right", va="top", fontsize=6)


def _draw_curves(
    figure: Figure,
    grid: Sequence[Axes],
    panels: Sequence[_Panel],
    curves: Sequence[Curve],
    colors: Mapping[str, str],
    names: Mapping[str, str],
) -> list[Artist]:
    """Draw the curves of all panels but that of gaps, and return the entries of the legend.
    `names`: label → its name in the legend."""
    sizes = [_describe_size(curve) for curve in curves]
    is_shared = len(set(sizes)) == 1
    figure.suptitle(sizes[0] if is_shared else "", fontsize=7.5)
    kinds = _kinds_of_units(curves)
    handles: dict[str, Artist] = {}
    for curve, size in zip(curves, sizes, strict=True):
        for units in kinds:
            if units not in set(curve.rows.units):
                continue
            color = colors[curve.label]
            marker = _MARKERS[kinds.index(units) % len(_MARKERS)]
            style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4}
            for axes, panel in zip(grid, panels, strict=False):
                _draw_curve(axes, panel, curve, units, style)
            _draw_transferred(grid[0], curve, units, color)
            name = f"{names[curve.label]}, {curve.selector}, {units}"
            if not is_shared:
                name += f"; {size}"
            handles.setdefault(name, Line2D([], [], label=name, **style))
    return [*handles.values(), *_handles_of_controls(curves)]


def _describe_size(curve: Curve) -> str:
    """Return the windows of a curve, its numbers of targets and documents, and what makes it
    doubtful."""
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
    axes: Axes, panel: _Panel, curve: Curve, units: str, style: Mapping[str, Any]
) -> None:
    """Draw a curve in a panel: its value with the interval, and its controls."""
    rows = curve.along(panel.axis)
    rows = rows[rows.units == units]
    # Where the targets have no gap, a control has nothing to be compared with.
    rows = rows[rows[panel.value].notna()]
    x = rows[panel.axis]
    axes.plot(x, rows[panel.value], **style)
    low = rows[f"{panel.prefix_of_ends}low"]
    high = rows[f"{panel.prefix_of_ends}high"]
    if len(rows) > 1:
        drawing.band(axes, x, low, high, style["color"])
        for column, line in panel.controls.items():
            axes.plot(x, rows[column], linestyle=line, linewidth=0.9, color=style["color"])
        return
    # A line and a band need two points; a single one gets error bars and markers.
    _draw_point(axes, x, rows[panel.value], low, high, style["color"])
    for column in panel.controls:
        ends = (rows.get(f"{column}_low"), rows.get(f"{column}_high"))
        marker = _CONTROL_MARKERS[column]
        _draw_point(axes, x * _BESIDE[column], rows[column], *ends, style["color"], marker)


def _draw_point(
    axes: Axes,
    x: pd.Series,
    value: pd.Series,
    low: pd.Series | None,
    high: pd.Series | None,
    color: str,
    marker: str = "",
) -> None:
    """Draw a value with its interval as an error bar, and with a hollow marker if there is one."""
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
    controls = (
        (_PLACEBO, "placebo_recovery", "placebo targets"),
        (_UNRELATED, "unrelated", "best k of unrelated text"),
    )
    has_points = any(curve.rows.k.nunique() == 1 for curve in curves)
    for line, column, label in controls:
        marker = _CONTROL_MARKERS[column] if has_points else ""
        style: dict[str, Any] = {"linestyle": line, "marker": marker, "markersize": 5}
        handles.append(Line2D([], [], linewidth=0.9, color=_FAINT, label=label, **style))
    if any(len(curve.transferred) for curve in curves):
        label = "units that another seed chose"
        handles.append(Line2D([], [], marker="*", linestyle="none", color=_FAINT, label=label))
    handles.append(Patch(color=_FILL, label="95% over documents"))
    return handles


def _draw_gaps(
    axes: Axes,
    curves: Sequence[Curve],
    missing: Sequence[Missing],
    colors: Mapping[str, str],
) -> None:
    """Draw the panel of gaps: mean L_short − L_long of all tokens by the length of the long window.
    Steps before the last one are fainter. Lengths beyond the trained one are shaded."""
    axes.set_title("(a) What distant text adds", loc="left", fontweight="bold")
    axes.set_ylabel("L_short − L_long (nats),\nmean of reported tokens")
    axes.axhline(0, color=_INK, linewidth=0.8, zorder=1)
    lengths = _finite_lengths(curves, missing)
    # long="all" has no length, and is drawn at twice the longest one.
    all_text = 2 * max(lengths, default=1.0)
    steps: set[float] = set()
    for curve in curves:
        steps |= set(curve.gaps.step)
    for curve in curves:
        _draw_gaps_of(axes, curve, sorted(steps), all_text, colors[curve.label])
    for point in missing:
        if point.length is None:
            continue
        place = all_text if point.length == float("inf") else point.length
        # At the lower end of the panel, as the point has no value.
        axes.plot(
            [place],
            [0.03],
            marker="x",
            color=colors[point.label],
            linestyle="none",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )
    _draw_axis(axes, "length", lengths)
    has_all = any((curve.gaps.length == float("inf")).any() for curve in curves)
    if has_all or any(point.length == float("inf") for point in missing):
        ticks = sorted(set(lengths))
        axes.set_xticks([*ticks, all_text])
        axes.set_xticklabels([*(f"{length:,.0f}" for length in ticks), "all"])
        axes.set_xlim(min(ticks, default=all_text) * 0.8, all_text * 1.25)
    trained_lengths = {
        int(curve.trained["length"]) for curve in curves if curve.trained.get("length")
    }
    _shade_beyond(axes, trained_lengths)


def _finite_lengths(curves: Sequence[Curve], missing: Sequence[Missing]) -> list[float]:
    """Return the lengths of all points, without those of long="all"."""
    lengths: list[float] = []
    for curve in curves:
        lengths += [length for length in curve.gaps.length if np.isfinite(length)]
    for point in missing:
        if point.length is not None and np.isfinite(point.length):
            lengths.append(point.length)
    return lengths


def _draw_gaps_of(
    axes: Axes, curve: Curve, steps: Sequence[float], all_text: float, color: str
) -> None:
    """Draw the gaps of one run, a line for each step. `all_text`: where long="all" is drawn."""
    for step, rows in curve.gaps.groupby("step"):
        rows = rows.sort_values("length")
        x = rows.length.replace(float("inf"), all_text)
        rank = steps.index(step) + 1
        axes.errorbar(
            x,
            rows.gap,
            [rows.gap - rows.gap_low, rows.gap_high - rows.gap],
            color=color,
            alpha=0.25 + 0.75 * rank / len(steps),
            marker="o",
            markersize=4,
            linewidth=1,
            capsize=2,
        )
        if step != steps[-1]:
            end = (x.iloc[-1], rows.gap.iloc[-1])
            axes.annotate(f" step {step:,.0f}", end, fontsize=5, color=color, va="center")


def _shade_beyond(axes: Axes, trained: set[int]) -> None:
    """Mark the trained lengths, and shade what lies beyond if all models have the same."""
    left, right = axes.get_xlim()
    for length in trained:
        if left < length < right:
            axes.axvline(length, color=_FAINT, linewidth=0.8, linestyle="--", zorder=0)
    if len(trained) == 1 and max(trained) < right:
        axes.axvspan(max(left, *trained), right, color=_FILL, alpha=0.5, linewidth=0, zorder=0)
        label = f"beyond the trained {max(trained):,}"
        axes.text(0.98, 0.97, label, transform=axes.transAxes, ha="right", va="top", fontsize=6)
        axes.set_xlim(left, right)


def _handles_of_missing(
    missing: Iterable[Missing], colors: Mapping[str, str], names: Mapping[str, str]
) -> list[Artist]:
    """Return an entry of the legend for each label and reason, with the lengths and steps that have
    no point."""
    places: dict[tuple[str, str], list[str]] = {}
    for point in missing:
        places.setdefault((point.label, point.reason), []).append(point.place)
    handles: list[Artist] = []
    for (label, reason), places_of_label in places.items():
        name = names[label]
        shown = "; ".join(dict.fromkeys(place for place in places_of_label if place))
        if shown:
            name += f" ({shown})"
        text = textwrap.shorten(f"{name}: {' '.join(reason.split())}", 240, placeholder=" …")
        entry = "\n".join(textwrap.wrap(text, 120))
        handles.append(
            Line2D([], [], marker="x", linestyle="none", color=colors[label], label=entry)
        )
    return handles


_TITLES = {
    "length": "By length: smallest k, last step",
    "step": "By step: smallest k, longest",
}
_LABELS = {"k": "k, number of distant units", "length": "long window, tokens", "step": "step"}


def _draw_axis(axes: Axes, name: str, values: Collection[float]) -> None:
    """Label an axis of k, length or step. The first two are logarithmic, with a tick at each finite
    value."""
    axes.set_xlabel(_LABELS[name])
    if name == "step":
        return
    ticks = sorted({value for value in values if value < float("inf")})
    if not ticks:
        return
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(ticks[0] * 0.8, ticks[-1] * 1.25)
