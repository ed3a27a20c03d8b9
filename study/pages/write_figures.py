"""Draw the figures of the pages from what is stored: `python -m study.pages.write_figures [NAME]`.

Their rows are in tables.yaml.
Figures are as wide as a phone shows them, on white; a test fails when one no longer follows from
the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_sparsity.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    band,
    save,
)
from study.pages.stored import (
    FIGURES,
    SHOWN,
    read_evaluations,
    read_meta,
    read_summary,
    task_rows,
)

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
    groups = SHOWN["figures"]["forest"]
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


def between(numbers: Collection[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def legend_above(figure: Figure, axes: Axes, title: str | None = None, ncols: int = 2) -> None:
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside upper left",
        ncols=ncols,
        frameon=False,
        title=title,
        title_fontsize=9,
        alignment="left",
    )


COLORS = (BLUE, RED, GREEN, BLACK, ORANGE, SKY, PINK)


def colored(groups: Collection[Any]) -> Iterator[tuple[Any, str]]:
    return zip(groups, COLORS[: len(groups)], strict=True)  # there are enough, else it fails


def copying() -> Figure:
    """The induction check against the tokens trained."""
    figure = Figure((WIDTH, 3.1), layout="constrained")
    axes = figure.subplots()
    for group, color in colored(SHOWN["figures"]["copying"]):
        for number, name in enumerate(group["of"]):
            rows = list(read_evaluations(name))
            axes.plot(
                [row["millions"] for row in rows],
                [row["induction_drop"] for row in rows],
                color=color,
                label=None if number else group["title"],
            )
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1M", "2M", "5M", "10M", "20M", "50M", "100M"])
    axes.minorticks_off()
    axes.set(xlabel="tokens trained", ylabel="induction check, nats", ylim=(0, None))
    axes.set_title("Loss reduction on a repeated passage of 128 tokens, by seed")
    legend_above(figure, axes)
    return figure


# --- tasks ----------------------------------------------------------------------------------------

OF_SCHEME = {
    "ppc": ("PPC", BLUE),
    "pose": ("RoPE + PoSE", GREEN),
    "rope": ("RoPE alone", RED),
    "pointers": ("pointers", ORANGE),
    "auxiliary": ("auxiliary", GREY),
}


def curves(result: str, k: int | None) -> Iterator[tuple[str, dict[int, list[float]]]]:
    """Exact match of each seed by length, of each scheme."""
    rows = task_rows(result)
    some = [row for row in rows if k is None or row.test_k == k]
    for scheme in OF_SCHEME:
        by_length: dict[int, list[float]] = {}
        for row in some:
            if row.scheme == scheme:
                by_length.setdefault(row.length, []).append(row.exact_match)
        if by_length:
            yield scheme, dict(sorted(by_length.items()))


def length() -> Figure:
    """Exact match of tasks by length: the mean over seeds, and the band from lowest to highest."""
    figure = Figure((WIDTH, 4.2), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True).flat
    shapes: dict[str, Any] = {}
    nums: set[int] = set()
    for axes, shown in zip(panels, SHOWN["figures"]["length"], strict=True):
        for scheme, by_length in curves(shown["result"], shown.get("k")):
            label, color = OF_SCHEME[scheme]
            nums |= {len(seeds) for seeds in by_length.values()}
            times = [number / shown["trained"] for number in by_length]
            (shapes[label],) = axes.plot(
                times,
                [np.mean(seeds) for seeds in by_length.values()],
                "o-",
                color=color,
                markersize=3,
            )
            low, high = ([end(seeds) for seeds in by_length.values()] for end in (min, max))
            band(axes, times, low, high, color)
        axes.set_xscale("log")
        axes.set_xticks([0.5, 1, 2, 5, 10], ["½", "1", "2", "5", "10"])
        axes.minorticks_off()
        axes.axvline(1, color=GREY, linewidth=0.6, linestyle=":")
        axes.set_title(shown["title"])
        axes.set_ylim(-0.03, 1.05)
        if axes.get_subplotspec().is_last_row():
            axes.set_xlabel("length / training length")
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("exact match")
    figure.suptitle(
        f"Mean of {between(nums)} seeds; band: lowest to highest; dotted: training length",
        fontsize=8,
    )
    order = [label for label, _ in OF_SCHEME.values() if label in shapes]
    figure.legend(
        [shapes[label] for label in order],
        order,
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    return figure


DRAWN: dict[str, Callable[[], Figure]] = {
    f"results_{draw.__name__}": draw for draw in (forest, copying, length)
}


if __name__ == "__main__":
    chosen = sys.argv[1:]
    for name, draw in DRAWN.items():
        if not chosen or name.removeprefix("results_") in chosen:
            save(partial(draw), FIGURES / f"{name}.svg", **STYLE)
            print(f"docs/figures/{name}.svg")
