"""Draw the figure of results from what is stored: `python -m study.pages.write_figures`.

Its rows are in tables.yaml. It is as wide as a phone shows it, on white.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_sparsity.drawing import BLUE, GREY, ORANGE, save
from study.pages.stored import FIGURES, SHOWN, read_meta, read_summary

WIDTH = 4.6
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "svg.fonttype": "path",
}
OF_K = {1: (BLUE, 0.17), 4: (ORANGE, -0.17)}
"""A colour for each k, and the offset of its mark from the middle of its row."""


def interval_of(axes: Axes, row: Any, column: str, at: float, color: str, marker: str) -> None:
    """A point with its interval; nothing where a measurement lacks it."""
    value = row.get(column, np.nan)
    if np.isfinite(value):
        ends = [row[f"{column}_low"], row[f"{column}_high"]]
        axes.plot(ends, [at, at], color=color, linewidth=1.1, solid_capstyle="butt")
        axes.plot([value], [at], marker, color=color, markersize=4)


def forest() -> Figure:
    """Every headline measurement: recovery, net excess and removal of its best distant units."""
    groups = SHOWN["forest"]
    num_rows = sum(len(group["of"]) + 1.4 for group in groups)
    figure = Figure((WIDTH, 0.9 + 0.165 * num_rows), layout="constrained")
    columns = figure.subplots(1, 3, sharey=True)
    at, labels = 0.0, {}
    windows, titles_of_groups = windows_of(next(iter(groups[0]["of"]))), set()
    figure.suptitle(
        f"Windows of {windows} tokens where no others are named; 95% over documents", fontsize=8
    )
    for group in groups:
        of_group = windows_of(next(iter(group["of"])))
        title = group["title"] if of_group == windows else f"{group['title']}, {of_group}"
        titles_of_groups.add(title)
        labels[at], at = title, at - 1
        for name, called in group["of"].items():
            rows = read_summary(name, group.get("set", "gap"), group.get("units", "tokens"))
            labels[at] = f"{called}, n = {rows.loc['add_one', 1].num_targets:.0f}"
            for k, (color, up) in OF_K.items():
                if ("add_one", k) in rows.index:
                    draw_row(columns, rows.loc["add_one", k], at + up, color)
            at -= 1
        at -= 0.4
    titles = ("recovery", "net excess", "removal")
    for axes, title, edges in zip(columns, titles, ((0, 1), (0, 0.2), (0, 1)), strict=True):
        axes.set_title(title)
        axes.set_ylim(at + 0.6, 0.8)
        axes.tick_params(left=False)
        axes.spines["left"].set_visible(False)
        for edge in edges:
            axes.axvline(edge, color=GREY, linewidth=0.6, linestyle="-" if edge == 0 else ":")
    columns[0].set_yticks(list(labels), list(labels.values()))
    for text in columns[0].get_yticklabels():
        if text.get_text() in titles_of_groups:
            text.set_fontweight("bold")
    marks = [("o", BLUE, "k = 1"), ("o", ORANGE, "k = 4"), ("|", GREY, "unrelated text, k = 1")]
    marks.append((":", GREY, "whole gap; net excess 0.2"))
    if any(line.get_marker() == "s" for line in columns[1].lines):
        marks.append(("s", GREY, "excess (no placebo)"))
    shapes = [
        columns[0].plot([], [], mark, color=color, markersize=4, label=label)[0]
        for mark, color, label in marks
    ]
    figure.legend(handles=shapes, loc="outside lower right", ncols=2, frameon=False)
    return figure


def draw_row(columns: list[Axes], row: Any, at: float, color: str) -> None:
    recovery, net, removal = columns
    interval_of(recovery, row, "recovery", at, color, "o")
    if color == OF_K[1][0]:
        recovery.plot([row.get("foreign", np.nan)], [at], "|", color=GREY, markersize=5)
    if np.isfinite(row.get("net", np.nan)):
        interval_of(net, row, "net", at, color, "o")
    else:
        interval_of(net, row, "excess", at, color, "s")
    interval_of(removal, row, "removal", at, color, "o")


def windows_of(name: str) -> str:
    """The long and the local window of a measurement, in tokens."""
    windows = read_meta(name.split(" + ")[0])["windows"]
    return f"{windows['long']} / {windows['short']}"


if __name__ == "__main__":
    save(forest, FIGURES / "results_forest.svg", **STYLE)
