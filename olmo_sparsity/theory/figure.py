"""The theory figure: results → matplotlib. Never imports torch.

Top row, one panel per k: (a) local, (b) non-local, (c) coupled, measured risk against both bounds.
Bottom row: (d) mixture against minimax, what part of locality matters, order at k = 1, the bridge.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from olmo_sparsity.theory.results import Summary, read_results, summarise, write_summary

# Okabe and Ito's palette: told apart by colour-blind readers; markers differ as well.
_STYLES = {
    "local": ("#0072B2", "o", "(a) local"),
    "nonlocal": ("#D55E00", "s", "(b) non-local"),
    "coupled": ("#009E73", "^", "(c) non-local, coupled IDs"),
    "local_wide_keys": ("#56B4E9", "D", "local data, keys not local"),
    "nonlocal_wide_keys": ("#E69F00", "v", "non-local, far keys untrained"),
    "nonlocal_token_keys": ("#CC79A7", "P", "non-local, keys blind to places"),
    "drifting": ("#000000", "X", "lengths that disagree"),
    "order": ("#0072B2", "o", "order of a pair"),
}
_FLOOR = 1e-4  # lowest risk drawn: a risk of 0 has no place on a logarithmic axis


def draw(folder: str | Path, prefix: str | Path) -> list[Path]:
    """Write PREFIX.svg, .png, .csv and .meta.json from a results folder."""
    rows, meta = read_results(folder)
    summaries = summarise(rows)
    figure = _figure(summaries, meta)
    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    paths = [prefix.with_name(prefix.name + end) for end in (".svg", ".png", ".csv", ".meta.json")]
    with warnings.catch_warnings():  # fonts that lack a combining macron still draw the letter
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        # Without a date and with a fixed salt, equal results give equal bytes.
        with matplotlib.rc_context({"svg.hashsalt": "theory"}):
            figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=130)
    plt.close(figure)
    write_summary(paths[2], rows)
    paths[3].write_text(json.dumps(meta, indent=2, ensure_ascii=False) + "\n")
    return paths


def _figure(summaries: list[Summary], meta: dict[str, Any]) -> plt.Figure:
    L = meta["train_length"]
    sparsities = sorted({s.num_places for s in summaries if s.setting == "local"}) or [1]
    bridge = [s for s in summaries if s.model != "attention"]
    bottom = [_draw_objectives, _draw_locality, _draw_order]
    columns = max(len(sparsities), len(bottom))
    figure, axes = plt.subplots(
        3 if bridge else 2, columns, figsize=(4.4 * columns, 11.2 if bridge else 7.8), squeeze=False
    )
    attention = [s for s in summaries if s.model == "attention"]
    for axis, k in zip(axes[0], sparsities, strict=False):
        _draw_sparsity(axis, [s for s in attention if s.num_places == k], L)
        axis.set_title(f"k = {k}")
    for axis, draw_panel in zip(axes[1], bottom, strict=False):
        draw_panel(axis, attention, L)
    if bridge:
        for axis, k in zip(axes[2], sorted({s.num_places for s in bridge}), strict=False):
            _draw_bridge(axis, [s for s in summaries if s.num_places == k], L)
            axis.set_title(f"a transformer on the same data, k = {k}")
    for axis in axes.flat:
        if not axis.has_data():
            axis.set_axis_off()
            continue
        axis.set_xlabel("length of the string")
        axis.set_ylabel("risk  1 − h(X)$_Y$")
        axis.legend(fontsize=6.5, loc="best", framealpha=0.8)
    seeds = max(s.num_seeds for s in summaries)
    figure.suptitle(
        f"Trained on lengths {L // 2} … {L} (shaded). Means and 95% intervals over {seeds} seeds; "
        f"bounds with constant {meta['bound_constant']:g}",
        fontsize=10,
    )
    figure.tight_layout()
    return figure


def _axis(axis: Axes, L: int) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
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
        lengths, [max(s.risk, _FLOOR) for s in line], style,
        color=color, marker=marker, markersize=4, linewidth=1.3, label=label,
    )  # fmt: skip
    axis.fill_between(
        lengths,
        [max(s.risk_low, _FLOOR) for s in line],
        [max(s.risk_high, _FLOOR) for s in line],
        color=color,
        alpha=0.2,
        linewidth=0,
    )


def _bound_lines(axis: Axes, line: list[Summary], color: str, label: str) -> None:
    for name, style, title in (
        ("bound_stated", (0, (1, 1)), "as stated"),
        ("bound_improved", (0, (5, 2)), "improved"),
    ):
        at = [(s.length, getattr(s, name)) for s in line if getattr(s, name) == getattr(s, name)]
        if at:
            axis.plot(
                *zip(*at, strict=True), linestyle=style, color=color, linewidth=1,
                label=f"bound {title}{label}",
            )  # fmt: skip


def _draw_sparsity(axis: Axes, summaries: list[Summary], L: int) -> None:
    _axis(axis, L)
    for setting in ("local", "nonlocal", "coupled"):
        line = _pick(summaries, setting=setting, objective="mixture")
        color, marker, label = _STYLES[setting]
        _line(axis, line, color, marker, label)
        if setting != "nonlocal":  # there both bounds refuse
            _bound_lines(axis, line, color, "" if setting == "local" else " (coupled)")


def _draw_objectives(axis: Axes, summaries: list[Summary], L: int) -> None:
    _axis(axis, L)
    axis.set_title("(d) mixture (filled line) against minimax (dashed)")
    for k, color, marker in ((1, "#009E73", "^"), (2, "#0072B2", "o"), (3, "#D55E00", "s")):
        for objective, style in (("mixture", "-"), ("minimax", "--")):
            line = _pick(summaries, setting="local", num_places=k, objective=objective)
            _line(axis, line, color, marker, f"local, k = {k}, {objective}", style)
    for objective, style in (("mixture", "-"), ("minimax", "--")):
        line = _pick(summaries, setting="drifting", objective=objective)
        color, marker, label = _STYLES["drifting"]
        _line(axis, line, color, marker, f"{label}, {objective}", style)


def _draw_locality(axis: Axes, summaries: list[Summary], L: int) -> None:
    _axis(axis, L)
    axis.set_title("which part of locality matters, k = 2")
    names = ("local", "local_wide_keys", "nonlocal", "nonlocal_wide_keys", "nonlocal_token_keys")
    for setting in names:
        line = _pick(summaries, setting=setting, num_places=2, objective="mixture")
        _line(axis, line, *_STYLES[setting])


def _draw_order(axis: Axes, summaries: list[Summary], L: int) -> None:
    _axis(axis, L)
    axis.set_title("label = order of an adjacent pair")
    axis.axhline(0.5, color="0.5", linewidth=0.8, linestyle=":")
    for k, color, marker in ((1, "#D55E00", "s"), (2, "#0072B2", "o")):
        line = _pick(summaries, setting="order", attention_places=k)
        _line(axis, line, color, marker, f"attention over subsets of {k}")


def _draw_bridge(axis: Axes, summaries: list[Summary], L: int) -> None:
    _axis(axis, L)
    for setting in ("local", "nonlocal", "coupled"):
        color, marker, label = _STYLES[setting]
        for model, style in (("rope", ":"), ("pose", "-")):
            line = _pick(summaries, setting=setting, model=model)
            _line(axis, line, color, marker, f"{label}, {model}", style)
        ideal = _pick(summaries, setting=setting, model="attention", objective="mixture")
        if ideal:
            axis.plot(
                [s.length for s in ideal], [max(s.risk, _FLOOR) for s in ideal],
                color=color, linewidth=0.8, alpha=0.5,
            )  # fmt: skip
