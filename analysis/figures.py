"""Figure 2: how few far tokens carry what the long context gives. Never imports torch.

Place in the flow: results → here, once for print (png, pdf, svg) and once inside the report page.

(a) the gap of every target, (b) the mean loss of the chosen targets against k, between the lines
L_short and L_long, (c) what is left of the recovery after the foreign control, (d) the same by
kind of token. One model: two by two panels. Several models: a column each, rows share their axes.
"""

from __future__ import annotations

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

from analysis.results import Results, main_set
from analysis.summary import FAR_STATES
from olmo_sparsity.drawing import one_label_each, render, save
from olmo_sparsity.errors import ConfigError

_NUM_RESAMPLES = 2000

# Okabe and Ito's palette where it is dark enough for a line; every selector has its own marker too.
# Controls that need no model are grey.
_STYLES = {
    "add_one": ("#0072B2", "o"),
    "divergence": ("#D55E00", "s"),
    "add_one_screened": ("#56B4E9", "^"),
    "greedy": ("#009E73", "D"),
    "drop_one": ("#CC79A7", "v"),
    "gradient": ("#E69F00", "P"),
    "attention": ("#882255", "X"),
    "most_frequent": ("#888888", "1"),
    "nearest": ("#888888", "+"),
    "random": ("#888888", "x"),
}
_ON_DARK = {"#0072B2": "#56B4E9", "#56B4E9": "#B3E0FF", "#882255": "#E28AAE", "#888888": "#A8A8A8"}


@dataclass(frozen=True)
class _Theme:
    ink: str = "#1a1a1a"
    faint: str = "#767676"
    fill: str = "#d9d9d9"
    chosen: str = "#7d7d7d"
    paper: str = "white"
    lighter: bool = False

    def settings(self) -> dict[str, Any]:
        return {
            "text.color": self.ink, "axes.labelcolor": self.ink, "axes.edgecolor": self.faint,
            "xtick.color": self.faint, "ytick.color": self.faint, "xtick.labelcolor": self.ink,
            "ytick.labelcolor": self.ink, "axes.facecolor": self.paper,
            "figure.facecolor": self.paper, "savefig.facecolor": self.paper,
            "svg.hashsalt": "figure2",
        }  # fmt: skip


_PRINT = _Theme()
_DARK = _Theme(
    ink="#e8e6e1", faint="#a5a29b", fill="#45474d", chosen="#8f939c", paper="#1d1f24", lighter=True
)


def draw_figure2(results: list[Results], out: Path, labels: list[str] | None = None) -> None:
    """`labels` name the models (default: their own names)."""
    names = _names(results, labels)
    save(lambda: _figure(results, names, _PRINT), out, **_PRINT.settings())


def figure2_svg(results: list[Results], *, dark: bool = False) -> bytes:
    """For the report page."""
    theme = _DARK if dark else _PRINT
    names = _names(results, None)
    return render(lambda: _figure(results, names, theme), "svg", theme.settings())


def _names(results: list[Results], labels: list[str] | None) -> list[str]:
    if not results:
        raise ConfigError("no results to draw; name at least one folder")
    own = [str(result.meta.get("model", {}).get("name", "model")) for result in results]
    return one_label_each(labels, own)


def _figure(results: list[Results], names: list[str], theme: _Theme) -> Figure:
    many = len(results) > 1
    handles = _legend_handles(results, theme)
    kinds = pd.concat([_kind_rows(result) for result in results]).kind.unique().tolist()
    height_of_kinds = max(1.0, 0.14 * len(kinds))
    if many:
        size = (max(5.5, 1.3 + 1.45 * len(results)), 6.0 + 1.6 * height_of_kinds)
        figure = Figure(figsize=size, layout="constrained")
        heights = [1, 1, 1, height_of_kinds]
        grid = figure.subplots(4, len(results), sharex="row", sharey="row", height_ratios=heights)
        columns = [list(grid[:, i]) for i in range(len(results))]
    else:
        height_of_legend = 0.09 * -(-len(handles) // 4)
        size = (5.5, 2.2 * (1.06 + height_of_kinds + height_of_legend))
        figure = Figure(figsize=size, layout="constrained")
        # Two figures, so that the long labels of (d) do not narrow (b).
        rows: Any = figure.subfigures(3, 1, height_ratios=[1, height_of_kinds, height_of_legend])
        columns = [[*rows[0].subplots(1, 2), *rows[1].subplots(1, 2)]]
        head = f"{_shorten(names[0], 90)}\n{' · '.join(_describe(results[0]))}"
        figure.suptitle(head, fontsize=7, linespacing=1.35)
    for i, (result, name) in enumerate(zip(results, names, strict=True)):
        gaps, losses, excess, by_kind = columns[i]
        _draw_gaps(gaps, result, theme)
        _draw_losses(losses, result, theme)
        _draw_excess(excess, result, theme)
        _draw_kinds(by_kind, result, theme, kinds)
        for axes, title in zip(columns[i], _TITLES, strict=True):
            if i == 0:  # with several models, the first panel of a row names the row
                axes.set_title(title, loc="left", fontweight="bold", pad=7)
            else:
                axes.set_ylabel("")
        if many:
            for axes, label in zip(columns[i], ("gap (nats)", "k", "k"), strict=False):
                axes.set_xlabel(label)
            lines = _describe(result)
            _write_above(gaps, "\n".join(lines), 20, "normal")
            _write_above(gaps, _shorten(name, 24), 22 + 9 * len(lines), "bold")
    foot: Any
    foot, place = (figure, "outside lower center") if many else (rows[2], "center")
    foot.legend(
        handles=handles, loc=place, ncols=4, frameon=False,
        handlelength=2.6, columnspacing=1.4,
    )  # fmt: skip
    return figure


_TITLES = (
    "(a) What the long context gains",
    "(b) Loss with k far tokens",
    "(c) Beyond the foreign control",
    "(d) … by kind of dependency",
)


def _write_above(axes: Axes, text: str, points: float, weight: str) -> None:
    axes.annotate(
        text, (0, 1), xycoords="axes fraction", xytext=(0, points), textcoords="offset points",
        va="bottom", fontsize=6.5, linespacing=1.35, fontweight=weight,
    )  # fmt: skip


def _describe(results: Results) -> list[str]:
    windows = results.meta.get("windows", {})
    losses = _of_report_half(results.losses, results)
    chosen = _chosen(results)
    num_documents = losses.document.nunique()
    num_chosen = len(chosen[["document", "target"]].drop_duplicates())
    return [
        f"long {windows.get('long', '?')}, short {windows.get('short', '?')}",
        f"stride {windows.get('stride', '?')}",
        f"far tokens {FAR_STATES.get(windows.get('far_states'), '?')}",
        f"{num_chosen:,} of {len(losses):,} targets",
        f"{num_documents:,} document{'s' if num_documents != 1 else ''}",
    ]


def _draw_gaps(axes: Axes, results: Results, theme: _Theme) -> None:
    losses = _of_report_half(results.losses, results)
    gaps = (losses.loss_short - losses.loss_long).to_numpy(float)
    axes.set_xlabel("gap  L_short − L_long  (nats)")
    axes.set_ylabel("targets")
    if not len(gaps):
        _say(axes, "not measured", theme)
        return
    # The threshold is an edge of a bin, so that no bar is half chosen.
    threshold = _threshold(results)
    width = max(float(np.ptp(gaps)) / 45, 1e-6)
    start = 0.0 if threshold is None else threshold
    first, last = np.floor((gaps.min() - start) / width), np.ceil((gaps.max() - start) / width)
    edges = start + width * np.arange(first, max(last, first + 1) + 1)
    counts, _ = np.histogram(gaps, edges)
    colors, side = [theme.fill] * len(counts), 1
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}" if count >= 1 else "")
    if threshold is not None:
        colors = [theme.chosen if edge > start - width / 2 else theme.fill for edge in edges[:-1]]
        is_chosen = gaps >= threshold
        held = gaps[is_chosen].sum() / max(np.maximum(gaps, 0).sum(), 1e-9)
        axes.axvline(threshold, color=theme.ink, linewidth=0.8)
        # Beside the line, and above the bars where there are many.
        side = 1 if threshold < edges[0] + 0.65 * (edges[-1] - edges[0]) else -1
        axes.annotate(
            f"gap ≥ {threshold:.2f}\n{is_chosen.mean():.1%} of targets\n{held:.0%} of the gain",
            (threshold, 0.97), xycoords=("data", "axes fraction"), xytext=(4 * side, 0),
            textcoords="offset points", va="top", ha="left" if side > 0 else "right",
            fontsize=6.5, linespacing=1.35,
        )  # fmt: skip
    axes.set_ylim(0.6, max(counts.max() * (3 if side > 0 else 20), 10))
    axes.bar(edges[:-1], counts, width, align="edge", color=colors, linewidth=0)


def _draw_losses(axes: Axes, results: Results, theme: _Theme) -> None:
    _draw_k_axis(axes, results)
    axes.set_ylabel("mean loss (nats)")
    losses, chosen = _of_report_half(results.losses, results), _chosen(results)
    lines = losses.merge(chosen[["document", "target"]].drop_duplicates())
    if not len(lines):
        _say(axes, "no targets chosen", theme)
        return
    for name in ("short", "long"):
        level = lines[f"loss_{name}"].mean()
        axes.axhline(level, color=theme.ink, linewidth=0.8, zorder=1)
        axes.annotate(
            f"L_{name}", (1, level), xycoords=("axes fraction", "data"), fontsize=7,
            xytext=(3, 0), textcoords="offset points", va="center",
        )  # fmt: skip
    alpha = 0.13 if chosen.selector.nunique() <= 5 else 0.06
    for (selector, control), curve in _loss_curves(chosen).items():
        color, marker = _style(selector, theme)
        own = control == "own"
        axes.plot(
            curve.k, curve["mean"], color=color, marker=marker, markersize=3.5 if own else 2.5,
            linestyle="-" if own else (0, (3, 1.6)), linewidth=1.2 if own else 0.9,
            markerfacecolor=color if own else theme.paper, markeredgewidth=0.8,
        )  # fmt: skip
        if own:
            axes.fill_between(
                curve.k, curve.low, curve.high, color=color, alpha=alpha, linewidth=0, zorder=0
            )
    axes.margins(y=0.12)


def _draw_excess(axes: Axes, results: Results, theme: _Theme) -> None:
    _draw_k_axis(axes, results)
    axes.set_ylabel("excess recovery")
    axes.axhline(0, color=theme.ink, linewidth=0.8, zorder=1)
    rows = results.summary
    rows = rows[(rows.target_set == _target_set(results)) & (rows.control == "own")]
    rows = rows.dropna(subset=["excess"])
    if not len(rows):
        _say(axes, "not measured", theme)
        return
    selectors = _in_order(rows.selector)
    for i, selector in enumerate(selectors):
        color, marker = _style(selector, theme)
        curve = rows[rows.selector == selector].sort_values("k")
        k = curve.k * 2 ** (_side_by_side(i, len(selectors)) * 0.35)
        axes.errorbar(
            k, curve.excess, _lengths(curve, "excess", "excess_low", "excess_high"), color=color,
            marker=marker, markersize=3.5, elinewidth=0.8, capsize=0,
        )  # fmt: skip


def _draw_kinds(axes: Axes, results: Results, theme: _Theme, kinds: list[str]) -> None:
    rows = _kind_rows(results)
    axes.set_xlabel("excess recovery")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if kinds:
        axes.set_yticks(range(len(kinds)), [_spell(kind) for kind in kinds], fontsize=6.5)
        axes.set_ylim(len(kinds) - 0.5, -0.5)  # the first kind on top
    if not len(rows):
        _say(axes, "not measured", theme)
        if not kinds:
            axes.set_axis_off()
        return
    axes.axvline(0, color=theme.ink, linewidth=0.8, zorder=1)
    selectors = _in_order(rows.selector)
    for i, selector in enumerate(selectors):
        color, marker = _style(selector, theme)
        some = rows[rows.selector == selector]
        y = [kinds.index(kind) + _side_by_side(i, len(selectors)) for kind in some.kind]
        axes.errorbar(
            some.excess_recovery, y, color=color, marker=marker, markersize=3.5, linestyle="none",
            xerr=_lengths(some, "excess_recovery", "excess_low", "excess_high"), elinewidth=0.8,
        )  # fmt: skip


def _kind_rows(results: Results) -> pd.DataFrame:
    rows = results.dependencies
    return rows[rows.target_set == _target_set(results)].dropna(subset=["excess_recovery"])


def _side_by_side(i: int, num: int) -> float:
    """Where the i-th of several intervals at one place is drawn; all within ± 0.4."""
    return min(0.2, 0.8 / num) * (i - (num - 1) / 2)


def _draw_k_axis(axes: Axes, results: Results) -> None:
    ks = sorted(results.recovery.k.unique()) or [1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_xlim(ks[0] * 0.8, ks[-1] * 1.25)
    axes.set_xlabel("k, number of far tokens")


def _say(axes: Axes, text: str, theme: _Theme) -> None:
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=theme.faint
    )  # fmt: skip


def _legend_handles(results: list[Results], theme: _Theme) -> list[Artist]:
    names = pd.concat([_chosen(result).selector for result in results])
    handles: list[Artist] = []
    for selector in _in_order(names):
        color, marker = _style(selector, theme)
        handles.append(
            Line2D([], [], color=color, marker=marker, markersize=3.5, label=_spell(selector))
        )
    dashes: Any = (0, (3, 1.6))
    handles.append(
        Line2D([], [], color=theme.faint, linestyle=dashes, linewidth=0.9, label="foreign control")
    )
    handles.append(Patch(color=theme.fill, label="95% over documents\n(b): of L_short − L_k"))
    return handles


def _shorten(name: str, limit: int) -> str:
    """The end of a path says most."""
    return name if len(name) <= limit else "…" + name[1 - limit :]


def _spell(name: str) -> str:
    return str(name).replace("_", " ")


def _style(selector: str, theme: _Theme) -> tuple[str, str]:
    color, marker = _STYLES.get(selector, (theme.ink, "."))
    return (_ON_DARK.get(color, color) if theme.lighter else color), marker


def _in_order(selectors: pd.Series) -> list[str]:
    found = selectors.unique().tolist()
    return [s for s in _STYLES if s in found] + [s for s in found if s not in _STYLES]


def _lengths(rows: pd.DataFrame, value: str, low: str, high: str) -> np.ndarray:
    """What matplotlib wants of an interval: how far it reaches to each side."""
    lengths = np.array([rows[value] - rows[low], rows[high] - rows[value]], dtype=float)
    return np.maximum(np.nan_to_num(lengths), 0)


def _target_set(results: Results) -> str:
    return main_set(results.recovery.target_set) or "gap"


def _threshold(results: Results) -> float | None:
    """As the measurement fixed it; None where targets were given or planted."""
    threshold = results.meta.get("targets", {}).get("threshold")
    return None if threshold is None else float(threshold)


def _of_report_half(rows: pd.DataFrame, results: Results) -> pd.DataFrame:
    losses = results.losses
    return rows[rows.document.isin(losses.document[losses.half == "report"])]


def _chosen(results: Results) -> pd.DataFrame:
    """Rows of recovery that the panels speak of, with the target's loss_short."""
    rows = results.recovery[results.recovery.target_set == _target_set(results)]
    losses = results.losses[["document", "target", "loss_short"]]
    return _of_report_half(rows, results).merge(losses, on=["document", "target"])


def _loss_curves(chosen: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    """(selector, control) → mean loss by k with its 95% interval. Draws of one target are averaged
    before anything else, and whole documents are resampled. The interval is that of the distance to
    L_short: how hard a document is moves both lines alike and says nothing about k."""
    by = ["selector", "control", "k", "document", "target"]
    by_target = (chosen.loss_short - chosen.loss_set).groupby([chosen[name] for name in by]).mean()
    loss_short = chosen.drop_duplicates(["document", "target"]).loss_short.mean()
    sums = by_target.groupby(["selector", "control", "k", "document"]).agg(["sum", "count"])
    documents = np.unique(chosen.document)
    rng = np.random.default_rng(0)
    weights = rng.multinomial(
        len(documents), np.full(len(documents), 1 / len(documents)), _NUM_RESAMPLES
    )
    curves: dict[tuple[str, str], list] = {}
    for (selector, control, k), group in sums.groupby(level=["selector", "control", "k"]):
        places = np.searchsorted(documents, group.index.get_level_values("document"))
        drawn = weights[:, places]
        num_drawn = drawn @ group["count"].to_numpy()
        means = (drawn @ group["sum"].to_numpy())[num_drawn > 0] / num_drawn[num_drawn > 0]
        mean = group["sum"].sum() / group["count"].sum()
        high, low = np.quantile(means, [0.025, 0.975])  # what is regained is lost from the loss
        row = (k, loss_short - mean, loss_short - low, loss_short - high)
        curves.setdefault((selector, control), []).append(row)
    order = {selector: i for i, selector in enumerate(_in_order(chosen.selector))}
    return {
        key: pd.DataFrame(curves[key], columns=["k", "mean", "low", "high"])
        for key in sorted(curves, key=lambda key: (-order[key[0]], key[1]))  # the first on top
    }
