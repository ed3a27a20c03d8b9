"""Draw the figure of a theory experiment. Never imports torch.

First row: (a) local, (b) non-local, (c) coupled against both bounds, a panel per k; how fast risk
grows. Second: (d) mixture against minimax, which part of locality matters, order at k = 1. Third:
the transformer of bridge.py. Panels without data are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_sparsity import drawing
from olmo_sparsity.io import write_atomically, write_meta
from olmo_sparsity.theory.results import (
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
    "drifting": (drawing.BLACK, "X", "lengths that disagree"),
    "order": (drawing.BLUE, "o", "order of a pair"),
}
_OF_K = {1: (drawing.GREEN, "^"), 2: (drawing.BLUE, "o"), 3: (drawing.PINK, "s")}
# For a screen, not for a printed column.
_SETTINGS = {
    "font.size": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "text.parse_math": True,
    "savefig.dpi": 100,
}
_FLOOR = 1e-4  # lowest risk drawn, as a logarithmic axis has no 0
_BOUNDS = (
    ("bound_stated", (0, (1, 1)), "bound as stated"),
    ("bound_improved", (0, (5, 2)), "bound improved"),
)
_OBJECTIVES = (("mixture", "-"), ("minimax", "--"))

# A title, what draws it, and what it draws; without the last a panel is left out.
Panel = tuple[str, Callable[[Axes, list[Summary], dict[str, Any]], None], list[Summary]]


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
    write_meta(made_by, meta)
    return paths


def _figure(summaries: list[Summary], meta: dict[str, Any]) -> Figure:
    L = meta["train_length"]
    attention = [s for s in summaries if s.model == "attention"]
    bridge = [s for s in summaries if s.model in ("rope", "pose")]
    worst = [s for s in summaries if s.model == "worst_case"]
    longer = _pick(attention, setting="local", objective="mixture")
    attention = _pick(attention, train_length=L)
    main = [s for s in attention if s.setting in ("local", "nonlocal", "coupled")]
    objectives = [s for s in attention if s.objective == "minimax" or s.setting == "drifting"]
    keys = [s for s in attention if s.setting.endswith("_keys")]
    if not any(s.train_length != L for s in longer):
        longer = []
    rows: list[list[Panel]] = [
        [
            *((f"k = {k}", _draw_sparsity, _pick(main, num_places=k)) for k in _ks(main)),
            ("how fast risk grows", _draw_growth, attention + worst if worst else []),
        ],
        [
            ("(d) mixture against minimax (dashed)", _draw_objectives, objectives and attention),
            ("which part of locality matters, k = 2", _draw_locality, keys and attention),
            ("label = order of an adjacent pair", _draw_order, _pick(attention, setting="order")),
            (f"L itself: growth to {meta['test_multiples'][-1]}L", _draw_training_length, longer),
        ],
        [
            (f"a transformer, k = {k}", _draw_bridge, _pick(summaries, num_places=k))
            for k in _ks(bridge)
        ],
    ]
    rows = [shown for row in rows if (shown := [panel for panel in row if panel[2]])]
    rows = rows or [[]]  # no case has a panel: the tables have its numbers
    columns = max(1, *(len(row) for row in rows))
    figure = Figure(figsize=(4.3 * columns, 4.1 * len(rows)))
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for row, line in zip(rows, axes, strict=True):
        for (title, draw_panel, chosen), axis in zip(row, line, strict=False):
            axis.set_axis_on()
            draw_panel(axis, chosen, meta)
            axis.set_title(title, fontsize=11)
            axis.legend(fontsize=6.5, loc="upper left", framealpha=0.85, handlelength=3)
    seeds = str(max((s.num_seeds for s in attention), default=0))
    if bridge:
        seeds += f" ({max(s.num_seeds for s in bridge)} of the transformer)"
    figure.suptitle(
        f"Trained on lengths {L // 2} … {L} (shaded). Means and 95% intervals over {seeds} seeds; "
        f"bounds with constant {meta['bound_constant']:g}",
        fontsize=10,
    )
    figure.tight_layout()
    return figure


def _ks(summaries: list[Summary]) -> list[int]:
    return sorted({s.num_places for s in summaries})


def _axis(axis: Axes, meta: dict[str, Any], bottom: float, top: float) -> None:
    """`top` leaves room for the legend."""
    L = meta["train_length"]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylim(bottom, top)
    axis.set_xlabel("length of the string")
    axis.set_ylabel("risk  1 − h(X)$_Y$")
    axis.axvspan(L / 2, L, color="0.93", zorder=0)
    axis.axhline(1, color="0.3", linewidth=0.8)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")


def _pick(summaries: list[Summary], **wanted: object) -> list[Summary]:
    chosen = [s for s in summaries if all(getattr(s, k) == v for k, v in wanted.items())]
    return sorted(chosen, key=lambda s: s.length)


def _line(
    axis: Axes, line: list[Summary], color: str, marker: str, label: str, style: str = "-"
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
        markersize=4,
        linewidth=1.3,
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
    _axis(axis, meta, bottom=_FLOOR, top=1e11)
    for setting in ("local", "nonlocal", "coupled"):
        line = _pick(summaries, setting=setting, objective="mixture")
        color, marker, label = _STYLES[setting]
        _line(axis, line, color, marker, label)
        if setting != "nonlocal":  # no bound applies (except at k = 1, where it equals local)
            _bound_lines(axis, line, color, f" {label[:3]}")


def _draw_growth(axis: Axes, summaries: list[Summary], meta: dict[str, Any]) -> None:
    """Risk at L̄ over the worst training risk: the bound says at most (L̄/L)² times a constant."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("L̄ / L")
    axis.set_ylabel("risk at L̄ / worst training risk")
    multiples = meta["test_multiples"]
    axis.plot(multiples, [m**2 for m in multiples], "k--", linewidth=1, label="(L̄/L)², the bound")
    axis.plot(multiples, multiples, "k:", linewidth=1, label="L̄/L")
    worst = [s for s in summaries if s.model == "worst_case"]
    _growth(axis, worst, drawing.RED, "*", "worst found")
    for k, (color, marker) in _OF_K.items():
        learned = _pick(
            summaries, model="attention", setting="local", objective="mixture", num_places=k
        )
        _growth(axis, learned, color, marker, f"learned, k = {k}")


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
    axis.set_ylim(1, 1e12)
    axis.set_xlabel("training length L")
    axis.set_ylabel("over worst training risk")
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
    _axis(axis, meta, bottom=1e-3, top=30)
    for k, (color, marker) in _OF_K.items():
        for objective, style in _OBJECTIVES:
            line = _pick(summaries, setting="local", num_places=k, objective=objective)
            _line(axis, line, color, marker, f"local, k = {k}, {objective}", style)
    for objective, style in _OBJECTIVES:
        line = _pick(summaries, setting="drifting", objective=objective)
        color, marker, label = _STYLES["drifting"]
        _line(axis, line, color, marker, f"{label}, {objective}", style)


def _draw_locality(axis: Axes, summaries: list[Summary], meta: dict[str, Any]) -> None:
    _axis(axis, meta, bottom=5e-3, top=10)
    names = ("local", "local_wide_keys", "nonlocal", "nonlocal_wide_keys", "nonlocal_token_keys")
    for setting in names:
        line = _pick(summaries, setting=setting, num_places=2, objective="mixture")
        _line(axis, line, *_STYLES[setting])


def _draw_order(axis: Axes, summaries: list[Summary], meta: dict[str, Any]) -> None:
    _axis(axis, meta, bottom=1e-3, top=5)
    axis.axhline(0.5, color="0.5", linewidth=0.8, linestyle=":")
    for k in (1, 2):
        color, marker = _OF_K[k]
        line = _pick(summaries, setting="order", attention_places=k)
        _line(axis, line, color, marker, f"attention over subsets of {k}")


def _draw_bridge(axis: Axes, summaries: list[Summary], meta: dict[str, Any]) -> None:
    _axis(axis, meta, bottom=_FLOOR, top=100)
    for setting in ("local", "nonlocal", "coupled"):
        color, marker, label = _STYLES[setting]
        for model, style, name in (("pose", "-", "RoPE + PoSE"), ("rope", ":", "RoPE")):
            line = _pick(summaries, setting=setting, model=model)
            _line(axis, line, color, marker, f"{label}, {name}", style)
        ideal = _pick(summaries, setting=setting, model="attention", objective="mixture")
        if ideal:  # the class of Definition 3.3, thin and without marks
            axis.plot(
                [s.length for s in ideal],
                [max(s.risk, _FLOOR) for s in ideal],
                color=color,
                linewidth=0.8,
                alpha=0.5,
            )
