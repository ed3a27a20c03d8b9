"""Draw Figure 2: how much distant text helps, and how much of that a few units recover.

    (a)        how much distant text reduces the loss, by the length of the window and the step
    (b)        how much of that k distant units recover, next to unrelated text and placebo targets
    (c)        how much is lost without these units
    (d), (e)   recovery by length and by step, where a run was measured at several

`draw_figure2` sorts results into curves (curves.py) and writes the file; `draw_panels` draws the
panels: (a) by gap_panel.py, those of panels.py by share_panels.py. Never imports torch.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.report.curves import Curve, DrawnResults, curves_of, run_of
from olmo_sparsity.analysis.report.figure_style import FAINT, SETTINGS, Missing
from olmo_sparsity.analysis.report.gap_panel import draw_gaps
from olmo_sparsity.analysis.report.panels import panels_of
from olmo_sparsity.analysis.report.share_panels import common_size, draw_curves, draw_frame
from olmo_sparsity.base import drawing
from olmo_sparsity.base.errors import ConfigError, DataError, check_type, printable
from olmo_sparsity.base.path_options import path_of

_COLORS = (
    drawing.BLUE,
    drawing.RED,
    drawing.GREEN,
    drawing.ORANGE,
    drawing.PINK,
    drawing.SKY,
    drawing.BLACK,
)
_LINE_CHARACTERS = 120
"""Characters that a line below or above the panels may have; a longer one would be cut off."""

_LONG_LABEL = 55
"""If a label of the legend has more characters, each entry has a row of its own."""

_LEGEND_LINES = 5
"""Lines of a legend below each other that have room in the height of the figure."""

_COLOR_OF_SCHEME = {"pose": drawing.BLUE, "contiguous": drawing.RED, "randomized": drawing.GREEN}
"""Colour of each position scheme. It does not depend on which other models are drawn."""


def draw_figure2(
    results: Sequence[DrawnResults],
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
    _check_arguments(results, labels, missing)
    out = path_of("out", out)
    _check_one_kind_of_gap(results)
    curves = curves_of(results, _names_of(results, labels))
    drawing.save(lambda: draw_panels(curves, missing), out, **SETTINGS)


def _check_arguments(
    results: Sequence[DrawnResults], labels: list[str] | None, missing: Sequence[Missing]
) -> None:
    """Raise ConfigError if an argument of `draw_figure2` has a wrong type, or if there is nothing
    to draw."""
    is_list = isinstance(results, list | tuple)
    if not is_list or not all(hasattr(result, "meta") for result in results):
        shown = printable(repr(results))[:60]
        raise ConfigError(f"results={shown} must be a list of what `measure` returned")
    if labels is not None:
        check_type("labels", labels, str, "a list of names, one for each model", several=True)
    if not results and not missing:
        raise ConfigError("no results to draw; pass at least one folder")


def _check_one_kind_of_gap(results: Sequence[DrawnResults]) -> None:
    """Raise DataError if the gaps of some results are from masked distant text, and those of others
    from replaced text."""
    replaces_text = set()
    for result in results:
        interpretation = interpretation_of(result.meta.windows["distant_states"])
        replaces_text.add(interpretation.replaces)
    if len(replaces_text) > 1:
        raise DataError("gaps of masked and of replaced distant text differ; draw them apart")


def _names_of(results: Sequence[DrawnResults], labels: list[str] | None) -> list[str]:
    """Return the name of each result's curve: its label, or else the name of its run or model."""
    run_names = [run_of(result) for result in results]
    runs = list(dict.fromkeys(run_names))
    # With a label for each run, results of a run share it; otherwise there is one for each result.
    if labels is not None and len(labels) == len(runs):
        return [labels[runs.index(name)] for name in run_names]
    return drawing.one_label_each(labels, run_names)


# --- the figure -----------------------------------------------------------------------------------


def draw_panels(curves: Sequence[Curve], missing: Sequence[Missing] = ()) -> Figure:
    """Draw all panels in one figure, with a legend below them.

    Args:
        curves: The runs.
        missing: Points without a result, which the legend lists.
    """
    panels = panels_of(curves)
    num_panels = 1 + len(panels)  # the first is that of gaps
    num_columns = 2 if num_panels == 4 else 3
    num_rows = math.ceil(num_panels / num_columns)
    height = 3.1 + 2.3 * (num_rows - 1) + 0.13 * len(missing)
    figure = Figure(figsize=(7.5, height), layout="constrained")
    if not curves and not missing:
        figure.text(0.5, 0.5, "not measured", ha="center", va="center", color=FAINT)
        return figure

    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes in grid[num_panels:]:
        axes.set_visible(False)
    colors = colors_of(curves, missing)
    draw_gaps(grid[0], curves, missing, colors)
    labels = [curve.label for curve in curves] + [point.label for point in missing]
    # Long enough for the name of a model and what tells its curve from others.
    names = drawing.short_labels(labels, max_length=60)
    handles = draw_curves(list(grid[1:]), panels, curves, colors, names)
    for axes, panel in zip(grid[1:], panels, strict=False):
        draw_frame(axes, panel, curves)

    handles += _handles_of_missing(missing, colors, names)
    figure.suptitle(textwrap.fill(common_size(curves), _LINE_CHARACTERS), fontsize=7.5)
    _add_legend(figure, handles, num_lines_with_room=_LEGEND_LINES + len(missing))
    return figure


def _add_legend(figure: Figure, handles: Sequence[Artist], num_lines_with_room: int) -> None:
    """Add the legend below the panels. Entries with long labels have a row each, and make the
    figure higher.

    Args:
        handles: The entries.
        num_lines_with_room: How many lines below each other have room in the height so far. More
            lines would flatten the panels.
    """
    longest_label = max(len(str(handle.get_label())) for handle in handles)
    entries_per_row = 1 if longest_label > _LONG_LABEL else 3
    num_lines = 0
    for handle in handles:
        lines = textwrap.wrap(str(handle.get_label()), _LINE_CHARACTERS)
        handle.set_label("\n".join(lines))
        num_lines += len(lines)
    if entries_per_row == 1:
        num_lines_without_room = max(0, num_lines - num_lines_with_room)
        figure.set_figheight(figure.get_figheight() + 0.17 * num_lines_without_room)
    figure.legend(handles=handles, loc="outside lower center", ncols=entries_per_row, frameon=False)


def colors_of(curves: Sequence[Curve], missing: Sequence[Missing] = ()) -> dict[str, str]:
    """Return label → colour: that of its position scheme, or else the next free colour. It does not
    depend on the order of the results."""
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


def _handles_of_missing(
    missing: Iterable[Missing], colors: Mapping[str, str], names: Mapping[str, str]
) -> list[Artist]:
    """Return an entry of the legend for each label and reason: a cross, the name, and the lengths
    and steps without a result."""
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
        handles.append(
            Line2D([], [], marker="x", linestyle="none", color=colors[label], label=text)
        )
    return handles
