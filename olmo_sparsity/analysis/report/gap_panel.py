"""Draw panel (a) of Figure 2: mean L_short − L_long in nats, by the length of the long window.

      0.4 |            ──●──●        a line for each run and step; earlier steps are fainter
          |      ──●──     ░░░       grey: longer than the trained length
      0.0 |──────────────────────
          |  ×                       a cross: no result, such as a model that was not trained yet
           128   256   512    all    long="all" has no length: it is drawn at twice the longest one

figures.py calls `draw_gaps`. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from olmo_sparsity.analysis.report.curves import Curve
from olmo_sparsity.analysis.report.figure_style import FAINT, FILL, INK, Missing, draw_axis


def draw_gaps(
    axes: Axes,
    curves: Sequence[Curve],
    missing: Sequence[Missing],
    colors: Mapping[str, str],
) -> None:
    """Draw the panel of gaps.

    Args:
        axes: The panel.
        curves: The runs.
        missing: Points without a result.
        colors: Label of a curve → its colour.
    """
    axes.set_title("(a) What distant text adds", loc="left", fontweight="bold")
    axes.set_ylabel("L_short − L_long (nats),\nmean of reported tokens")
    axes.axhline(0, color=INK, linewidth=0.8, zorder=1)

    lengths = _finite_lengths(curves, missing)
    # Where long="all" is drawn.
    place_of_all = 2 * max(lengths, default=1.0)
    steps: set[float] = set()
    for curve in curves:
        steps |= set(curve.gaps.step)
    for curve in curves:
        _draw_gaps_of_run(axes, curve, sorted(steps), place_of_all, colors[curve.label])
    _draw_missing(axes, missing, place_of_all, colors)

    _draw_axis_of_lengths(axes, lengths, place_of_all, has_all=_has_all_text(curves, missing))
    # After the axis, whose limits it reads.
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


def _draw_gaps_of_run(
    axes: Axes, curve: Curve, steps: Sequence[float], place_of_all: float, color: str
) -> None:
    """Draw the gaps of one run, a line for each step.

    Args:
        axes: The panel.
        curve: The run.
        steps: The steps of all runs, in order, which decide how faint a line is.
        place_of_all: Where long="all" is drawn.
        color: The colour of the run.
    """
    for step, rows_of_step in curve.gaps.groupby("step"):
        rows = rows_of_step.sort_values("length")
        x = rows.length.replace(float("inf"), place_of_all)
        rank = steps.index(step) + 1
        axes.errorbar(
            x,
            rows.gap,
            [rows.gap - rows.gap_low, rows.gap_high - rows.gap],
            color=color,
            alpha=0.25 + 0.75 * rank / len(steps),  # 1 for the last step
            marker="o",
            markersize=4,
            linewidth=1,
            capsize=2,
        )
        if step != steps[-1]:
            end_of_line = (x.iloc[-1], rows.gap.iloc[-1])
            axes.annotate(f" step {step:,.0f}", end_of_line, fontsize=5, color=color, va="center")


def _draw_missing(
    axes: Axes, missing: Sequence[Missing], place_of_all: float, colors: Mapping[str, str]
) -> None:
    """Draw a cross for each point without a result, at the lower end of the panel, as it has no
    value. A point with long="all" is drawn at `place_of_all`."""
    for point in missing:
        if point.length is None:
            continue
        place = place_of_all if point.length == float("inf") else point.length
        axes.plot(
            [place],
            [0.03],  # a fraction of the panel's height
            marker="x",
            color=colors[point.label],
            linestyle="none",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )


def _has_all_text(curves: Sequence[Curve], missing: Sequence[Missing]) -> bool:
    """Return whether a point has no finite length, as with long="all"."""
    is_drawn = any((curve.gaps.length == float("inf")).any() for curve in curves)
    return is_drawn or any(point.length == float("inf") for point in missing)


def _draw_axis_of_lengths(
    axes: Axes, lengths: Sequence[float], place_of_all: float, *, has_all: bool
) -> None:
    """Draw the axis of lengths, with a tick for long="all" if a point has it."""
    draw_axis(axes, "length", lengths)
    if not has_all:
        return
    ticks = sorted(set(lengths))
    axes.set_xticks([*ticks, place_of_all])
    axes.set_xticklabels([*(f"{length:,.0f}" for length in ticks), "all"])
    axes.set_xlim(min(ticks, default=place_of_all) * 0.8, place_of_all * 1.25)


def _shade_beyond(axes: Axes, trained_lengths: set[int]) -> None:
    """Mark the lengths that models were trained on. If all have the same, shade the lengths beyond
    it."""
    left, right = axes.get_xlim()
    for length in trained_lengths:
        if left < length < right:
            axes.axvline(length, color=FAINT, linewidth=0.8, linestyle="--", zorder=0)
    if len(trained_lengths) == 1 and max(trained_lengths) < right:
        (trained_length,) = trained_lengths
        first_shaded = max(left, trained_length)
        axes.axvspan(first_shaded, right, color=FILL, alpha=0.5, linewidth=0, zorder=0)
        label = f"beyond the trained {trained_length:,}"
        axes.text(0.98, 0.97, label, transform=axes.transAxes, ha="right", va="top", fontsize=6)
        axes.set_xlim(left, right)  # which the shading may have moved
