"""Draw the figure of a theory experiment. Never imports torch.

First block: (a) local, (b) non-local, (c) coupled against both bounds, a panel per k. Second:
mixture against minimax, which part of locality matters, order at k = 1. Third: how fast risk grows.
Fourth: the transformer of bridge.py next to the attention class, a panel per setting and k. Panels
without data are left out. Of a run with a transformer only the fourth is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_sparsity import drawing
from olmo_sparsity.io import write_atomically, write_json
from study.theory.results import (
    Summary,
    markdown_tables,
    read_results,
    summarise,
    write_summary,
)

_STYLES = {
    "local": (drawing.BLUE, "o", "(a) local"),
    "nonlocal": (drawing.RED, "s", "(b) non-local"),
    "coupled": (drawing.GREEN, "^", "(c) non-local, coupled IDs"),
    "local_wide_keys": (drawing.SKY, "D", "local data, keys not local"),
    "nonlocal_wide_keys": (drawing.ORANGE, "v", "non-local, far keys untrained"),
    "nonlocal_token_keys": (drawing.PINK, "P", "non-local, keys blind to places"),
    "drifting": (drawing.BLACK, "X", "drifting"),
    "order": (drawing.BLUE, "o", "order of a pair"),
}
_OF_K = {1: (drawing.GREEN, "^"), 2: (drawing.BLUE, "o"), 3: (drawing.PINK, "s")}
_WIDTH = 8.4
"""In inches: a page shows the figure at about 100 pixels an inch."""

_SETTINGS = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "text.parse_math": True,
    "savefig.dpi": 160,
}
_FLOOR = 1e-4  # lowest risk drawn, as a logarithmic axis has no 0
_BOUNDS = (
    ("bound_stated", (0, (1, 1)), "bound as stated"),
    ("bound_improved", (0, (5, 2)), "improved bound"),
)
_OBJECTIVES = (("mixture", "-"), ("minimax", "--"))

# A title, what draws it, and what it draws; without the last a panel is left out.
Panel = tuple[str, Callable[[Axes, list[Summary], dict[str, Any]], None], list[Summary]]

# Rows of panels, and whether they share one legend.
Block = tuple[list[list[Panel]], bool]


def draw(folder: str | Path, prefix: str | Path) -> list[Path]:
    """Write PREFIX.png, .csv, .md and .meta.json from a results folder."""
    rows, meta = read_results(folder)
    summaries = summarise(rows)
    prefix = Path(prefix)
    png, csv, tables, made_by = paths = [
        prefix.with_name(prefix.name + end) for end in (".png", ".csv", ".md", ".meta.json")
    ]
    drawing.save(lambda: _figure(summaries, meta), png, **_SETTINGS)
    write_summary(csv, rows)
    write_atomically(tables, markdown_tables(summaries, meta))
    write_json(made_by, meta)
    return paths


def _figure(summaries: list[Summary], meta: dict[str, Any]) -> Figure:
    blocks = []
    for rows, shares in _blocks(summaries, meta["train_length"]):
        rows = [shown for row in rows if (shown := [panel for panel in row if panel[2]])]
        if rows:
            blocks.append((rows, shares))
    # No case may have a panel: the tables have its numbers.
    heights = [2.5 * len(rows) + (0.7 if shares else 1.3) for rows, shares in blocks] or [1.0]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.6), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for (rows, shares), part in zip(blocks, parts, strict=False):
        columns = max(map(len, rows))
        axes = part.subplots(len(rows), columns, squeeze=False, sharey=shares)
        for axis in axes.flat:
            axis.set_axis_off()
        labels: dict[str, Artist] = {}
        for row, line in zip(rows, axes, strict=True):
            for (title, draw_panel, chosen), axis in zip(row, line, strict=False):
                axis.set_axis_on()
                draw_panel(axis, chosen, meta)
                axis.set_title(title)
                if shares:
                    axis.label_outer()
                    handles, names = axis.get_legend_handles_labels()
                    labels |= dict(zip(names, handles, strict=True))
                else:
                    axis.legend(
                        loc="upper center",
                        bbox_to_anchor=(0.5, -0.2),
                        ncols=2 if columns < 3 else 1,
                        frameon=False,
                    )
        if shares:
            part.legend(
                list(labels.values()),
                list(labels),
                loc="outside lower center",
                ncols=4,
                frameon=False,
            )
    figure.suptitle(_title(summaries, meta), fontsize=9)
    return figure


def _blocks(summaries: list[Summary], L: int) -> list[Block]:
    bridge = [s for s in summaries if s.model in ("rope", "pose")]
    if bridge:
        cells: list[list[Panel]] = [
            [
                (
                    f"{_STYLES[setting][2]}, k = {k}",
                    _draw_bridge,
                    _pick(bridge, setting=setting, num_places=k)
                    and _pick(summaries, setting=setting, num_places=k),
                )
                for k in _ks(bridge)
            ]
            for setting in ("local", "nonlocal", "coupled")
        ]
        return [(cells, True)]
    every = [s for s in summaries if s.model == "attention"]
    worst = [s for s in summaries if s.model == "worst_case"]
    longer = _pick(every, setting="local", objective="mixture")
    if not any(s.train_length != L for s in longer):
        longer = []
    attention = _pick(every, train_length=L)
    main = [s for s in attention if s.setting in ("local", "nonlocal", "coupled")]
    objectives = [s for s in attention if s.objective == "minimax" or s.setting == "drifting"]
    keys = [s for s in attention if s.setting.endswith("_keys")]
    by_k: list[Panel] = [(f"k = {k}", _draw_sparsity, _pick(main, num_places=k)) for k in _ks(main)]
    questions: list[Panel] = [
        ("(d) mixture or minimax", _draw_objectives, objectives and attention),
        ("which part of locality matters, k = 2", _draw_locality, keys and attention),
        ("label: order of an adjacent pair", _draw_order, _pick(attention, setting="order")),
    ]
    growth: list[Panel] = [
        ("growth of the risk by length, local", _draw_growth, attention + worst if worst else []),
        ("growth to the longest strings by L, local", _draw_training_length, longer),
    ]
    return [([by_k], True), ([questions], False), ([growth], False)]


def _title(summaries: list[Summary], meta: dict[str, Any]) -> str:
    L = meta["train_length"]
    bridge = [s.num_seeds for s in summaries if s.model in ("rope", "pose")]
    seeds = max((s.num_seeds for s in summaries if s.model == "attention"), default=0)
    strings = f"{meta['config']['num_strings']:,} strings a seed and length where sampled"
    if bridge:
        strings = f"{meta['config']['bridge']['num_strings']:,} strings a seed and length"
        of_seeds = f"{max(bridge)} seeds of the transformer, {seeds} of the attention class"
    else:
        of_seeds = f"{seeds} seeds"
    bounds = "" if bridge else f"; bounds with constant {meta['bound_constant']:g}"
    return (
        f"Trained on {L // 2} to {L} tokens (shaded), local: within {meta['local_span']} tokens. "
        f"Means and 95% intervals over\n{of_seeds}; {strings}{bounds}"
    )


def _ks(summaries: list[Summary]) -> list[int]:
    return sorted({s.num_places for s in summaries})


def _axis(axis: Axes, meta: dict[str, Any], bottom: float, top: float) -> None:
    L = meta["train_length"]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylim(bottom, top)
    axis.set_xlabel("length of the string, tokens")
    axis.set_ylabel("risk  1 − h(X)$_Y$")
    axis.axvspan(L / 2, L, color="0.93", zorder=0)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")


def _reference(axis: Axes, at: float, label: str, above: bool = True) -> None:
    axis.axhline(at, color="0.4", linewidth=0.8, linestyle=":", zorder=0)
    axis.annotate(
        label,
        (0.02, at),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2 if above else -2),
        textcoords="offset points",
        va="bottom" if above else "top",
        fontsize=8,
        color="0.3",
    )


_CHANCE = "chance, 0.5"


def _pick(summaries: list[Summary], **wanted: object) -> list[Summary]:
    chosen = [s for s in summaries if all(getattr(s, k) == v for k, v in wanted.items())]
    return sorted(chosen, key=lambda s: s.length)


def _line(
    axis: Axes,
    line: list[Summary],
    color: str,
    marker: str,
    label: str,
    style: str = "-",
    size: float = 4,
) -> None:
    if not line:
        return
    lengths = [s.length for s in line]
    axis.plot(
        lengths,
        [max(s.risk, _FLOOR) for s in line],
        style,
        color=color,
        marker=marker,
        markersize=size,
        linewidth=0.3 * size,
        label=label,
    )
    low, high = ([max(getattr(s, end), _FLOOR) for s in line] for end in ("risk_low", "risk_high"))
    drawing.band(axis, lengths, low, high, color)


def _bound_lines(axis: Axes, line: list[Summary], color: str, label: str) -> None:
    for name, style, title in _BOUNDS:
        at = [(s.length, getattr(s, name)) for s in line if getattr(s, name) == getattr(s, name)]
        if at:
            axis.plot(
                *zip(*at, strict=True),
                linestyle=style,
                color=color,
                linewidth=1,
                label=f"{title}{label}",
            )


def _draw_sparsity(axis: Axes, summaries: list[Summary], meta: dict[str, Any]) -> None:
    _axis(axis, meta, bottom=_FLOOR, top=1e7)
    _reference(axis, 1, "1: vacuous above")
    # Where lines coincide, as at k = 1, each is seen beside the next.
    for setting, size in (("local", 6), ("nonlocal", 4.5), ("coupled", 3)):
        line = _pick(summaries, setting=setting, objective="mixture")
        color, marker, label = _STYLES[setting]
        _line(axis, line, color, marker, label, size=size)
    for setting in ("local", "coupled"):  # non-local has none (but at k = 1, where it equals local)
        color, _, label = _STYLES[setting]
        line = _pick(summaries, setting=setting, objective="mixture")
        _bound_lines(axis, line, color, f", {label[:3]}")


def _draw_growth(axis: Axes, summaries: list[Summary], meta: dict[str, Any]) -> None:
    """Risk over the worst training risk: the bound says at most (L̄/L)² times a constant."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("length / training length L")
    axis.set_ylabel("risk / worst training risk")
    for along in (axis.xaxis, axis.yaxis):
        along.set_major_formatter(lambda x, _: f"{x:g}")
    multiples = meta["test_multiples"]
    axis.plot(
        multiples, [m**2 for m in multiples], "k--", linewidth=1, label="(length / L)², the bound"
    )
    axis.plot(multiples, multiples, "k:", linewidth=1, label="length / L")
    worst = [s for s in summaries if s.model == "worst_case"]
    _growth(axis, worst, drawing.RED, "*", "fastest that a search found")
    for k, (color, marker) in _OF_K.items():
        learned = _pick(
            summaries, model="attention", setting="local", objective="mixture", num_places=k
        )
        _growth(axis, learned, color, marker, f"trained, k = {k}")


def _growth(axis: Axes, summaries: list[Summary], color: str, marker: str, label: str) -> None:
    line = [s for s in summaries if s.length >= s.train_length]
    axis.plot(
        [s.length / s.train_length for s in line],
        [s.risk / s.delta_worst for s in line],
        color=color,
        marker=marker,
        markersize=4,
        linewidth=1.3,
        label=label,
    )


def _draw_training_length(axis: Axes, summaries: list[Summary], meta: dict[str, Any]) -> None:
    """Growth against L, which the stated bound has as a factor."""
    multiple = meta["test_multiples"][-1]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylim(1, 1e10)
    axis.set_xlabel("training length L, tokens")
    axis.set_ylabel(f"risk at {multiple}L / worst training risk")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    longest = [s for s in summaries if s.length == multiple * s.train_length]
    for k in (1, 2):
        color, marker = _OF_K[k]
        line = sorted(_pick(longest, num_places=k), key=lambda s: s.train_length)
        lengths = [s.train_length for s in line]
        for name, style, label in (*_BOUNDS, ("risk", "-", "measured")):
            axis.plot(
                lengths,
                [getattr(s, name) / s.delta_worst for s in line],
                linestyle=style,
                color=color,
                marker=marker,
                markersize=4,
                label=f"{label}, k = {k}",
            )


def _draw_objectives(axis: Axes, summaries: list[Summary], meta: dict[str, Any]) -> None:
    _axis(axis, meta, bottom=1e-3, top=1)
    for k, (color, marker) in _OF_K.items():
        for objective, style in _OBJECTIVES:
            line = _pick(summaries, setting="local", num_places=k, objective=objective)
            _line(axis, line, color, marker, f"local, k = {k}, {objective}", style)
    for objective, style in _OBJECTIVES:
        line = _pick(summaries, setting="drifting", objective=objective)
        color, marker, label = _STYLES["drifting"]
        _line(axis, line, color, marker, f"{label}, {objective}", style)


def _draw_locality(axis: Axes, summaries: list[Summary], meta: dict[str, Any]) -> None:
    _axis(axis, meta, bottom=5e-3, top=1)
    _reference(axis, 0.5, _CHANCE)
    names = ("local", "local_wide_keys", "nonlocal", "nonlocal_wide_keys", "nonlocal_token_keys")
    for setting in names:
        line = _pick(summaries, setting=setting, num_places=2, objective="mixture")
        _line(axis, line, *_STYLES[setting])


def _draw_order(axis: Axes, summaries: list[Summary], meta: dict[str, Any]) -> None:
    _axis(axis, meta, bottom=1e-3, top=1)
    _reference(axis, 0.5, _CHANCE)
    for k in (1, 2):
        color, marker = _OF_K[k]
        line = _pick(summaries, setting="order", attention_places=k)
        _line(axis, line, color, marker, f"attention over {'pairs' if k == 2 else 'single places'}")


def _draw_bridge(axis: Axes, summaries: list[Summary], meta: dict[str, Any]) -> None:
    _axis(axis, meta, bottom=_FLOOR, top=2)
    _reference(axis, 0.5, _CHANCE)
    ideal = _pick(summaries, model="attention", objective="mixture")
    _line(axis, ideal, drawing.BLACK, "", "attention class (Definition 3.3)", "--")
    for model, color, marker, name in (
        ("rope", drawing.RED, "s", "RoPE"),
        ("pose", drawing.BLUE, "o", "RoPE + PoSE"),
    ):
        line = _pick(summaries, model=model)
        _line(axis, line, color, marker, f"transformer, {name}")
