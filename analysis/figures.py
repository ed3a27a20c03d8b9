"""Figure 2: how few far units carry what the long context gives. Never imports torch.

Place in the flow: results → here, once for print (png, pdf, svg) and once inside the report page.

(a) the gap of every target, own and by the placebo, (b) the mean loss of the chosen targets against
k, between L_short and L_long, (c) what is left of the recovery after foreign control and placebo,
(d) after the foreign control, by kind of token. One model: two by two panels. Several models: a
column each, rows share their axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
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
from analysis.statistics import KEYS, interval, resample_weights
from analysis.summary import FAR_STATES
from olmo_sparsity.drawing import one_label_each, render, save
from olmo_sparsity.errors import ConfigError

_CURVE = ["selector", "units"]

# Okabe and Ito's palette where it is dark enough for a line; every selector has its own marker too.
# Controls that need no model are grey.
_SELECTORS = {
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
# Of single tokens, then of every other kind of units: a line and how its markers are filled.
_UNITS: Any = [("-", "full"), ("-.", "left"), ((0, (9, 2)), "top"), ((0, (4, 1, 1, 1)), "right")]
_FOREIGN: Any = (0, (3, 1.6))
_PLACEBO: Any = ":"
_ON_DARK = {"#0072B2": "#56B4E9", "#56B4E9": "#B3E0FF", "#882255": "#E28AAE", "#888888": "#A8A8A8"}

Styles = dict[tuple[str, str], dict[str, Any]]
"""Of each (selector, units), in the order of the legend."""


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
    return one_label_each(labels, [str(result.meta.model["name"]) for result in results])


def _figure(results: list[Results], names: list[str], theme: _Theme) -> Figure:
    many = len(results) > 1
    styles = _styles(results, theme)
    tables = [_of_main_set(result, result.dependencies) for result in results]
    ks = set().union(*(table.k for table in tables))
    k = 1 if 1 in ks else max(ks, default=1)
    tables = [table[table.k == k].dropna(subset=["excess_recovery"]) for table in tables]
    kinds = pd.concat(tables).kind.unique().tolist()
    summaries = [_of_main_set(result, result.summary) for result in results]
    beyond = "net" if all(rows.net.notna().any() for rows in summaries if len(rows)) else "excess"
    handles = _legend_handles(styles, theme, beyond)
    titles = (
        "(a) What the long context gains",
        "(b) Loss with k far units",
        "(c) Net of foreign and placebo" if beyond == "net" else "(c) Beyond foreign; no placebo",
        f"(d) Excess by kind, k = {k}",
    )
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
        _draw_losses(losses, result, theme, styles)
        _draw_excess(excess, result, theme, styles, beyond)
        _draw_kinds(by_kind, tables[i], theme, styles, kinds)
        for axes, title in zip(columns[i], titles, strict=True):
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
    foot: Any = figure if many else rows[2]
    foot.legend(
        handles=handles, loc="outside lower center" if many else "center", ncols=4, frameon=False,
        handlelength=2.6, columnspacing=1.4,
    )  # fmt: skip
    return figure


def _write_above(axes: Axes, text: str, points: float, weight: str) -> None:
    axes.annotate(
        text, (0, 1), xycoords="axes fraction", xytext=(0, points), textcoords="offset points",
        va="bottom", fontsize=6.5, linespacing=1.35, fontweight=weight,
    )  # fmt: skip


def _describe(results: Results) -> list[str]:
    windows, losses = results.meta.windows, results.reported
    num_documents, num_chosen = losses.document.nunique(), len(_chosen_losses(results))
    return [
        f"long {windows['long']}, short {windows['short']}",
        f"stride {windows['stride']}",
        f"far units {FAR_STATES[windows['far_states']]}",
        f"{num_chosen:,} of {len(losses):,} targets",
        f"{num_documents:,} document{'s' if num_documents != 1 else ''}",
    ]


def _draw_gaps(axes: Axes, results: Results, theme: _Theme) -> None:
    losses = results.reported
    gaps = (losses.loss_short - losses.loss_long).to_numpy(float)
    placebo = (losses.loss_short - losses.placebo_loss_long).to_numpy(float)
    axes.set_xlabel("gap  L_short − L_long  (nats)")
    axes.set_ylabel("targets")
    if not len(gaps):
        _say(axes, "not measured", theme)
        return
    # The threshold is an edge of a bin, so that no bar is half chosen.
    threshold = results.meta.targets.get("threshold")
    both = np.concatenate([gaps, placebo])
    width = max(float(np.ptp(both)) / 45, 1e-6)
    start = 0.0 if threshold is None else threshold
    first, last = np.floor((both.min() - start) / width), np.ceil((both.max() - start) / width)
    edges = start + width * np.arange(first, max(last, first + 1) + 1)
    counts, by_placebo = (np.histogram(some, edges)[0] for some in (gaps, placebo))
    colors, side = [theme.fill] * len(counts), 1
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}" if count >= 1 else "")
    if threshold is not None:
        colors = [theme.chosen if edge > start - width / 2 else theme.fill for edge in edges[:-1]]
        is_chosen = gaps >= threshold
        axes.axvline(threshold, color=theme.ink, linewidth=0.8)
        # Beside the line, and above the bars where there are many.
        side = 1 if threshold < edges[0] + 0.65 * (edges[-1] - edges[0]) else -1
        axes.annotate(
            f"gap ≥ {threshold:.2f}\n{is_chosen.mean():.1%} of targets\n"
            f"{gaps[is_chosen].sum():+,.0f} nats, all: {gaps.sum():+,.0f}\n"
            f"unrelated text: {(placebo >= threshold).mean():.1%}",
            (threshold, 0.97), xycoords=("data", "axes fraction"), xytext=(4 * side, 0),
            textcoords="offset points", va="top", ha="left" if side > 0 else "right",
            fontsize=6.5, linespacing=1.35,
        )  # fmt: skip
    axes.set_ylim(0.6, max(counts.max(), by_placebo.max(), 3) * (3 if side > 0 else 20))
    axes.bar(edges[:-1], counts, width, align="edge", color=colors, linewidth=0)
    axes.stairs(by_placebo, edges, color=theme.ink, linewidth=0.8)


def _draw_losses(axes: Axes, results: Results, theme: _Theme, styles: Styles) -> None:
    _draw_k_axis(axes, results)
    axes.set_ylabel("mean loss (nats)")
    chosen, losses = _chosen(results), _chosen_losses(results)
    if not len(chosen):
        _say(axes, "no targets chosen", theme)
        return
    for name in ("short", "long"):
        level = losses[f"loss_{name}"].mean()
        axes.axhline(level, color=theme.ink, linewidth=0.8, zorder=1)
        axes.annotate(
            f"L_{name}", (1, level), xycoords=("axes fraction", "data"), fontsize=7,
            xytext=(3, 0), textcoords="offset points", va="center",
        )  # fmt: skip
    alpha = 0.13 if len(styles) <= 5 else 0.06
    curves = _loss_curves(chosen)
    for (curve, style), control in product(reversed(styles.items()), ("foreign", "own")):
        rows = curves.get((*curve, control))  # the first on top
        if rows is None:
            continue
        if control == "foreign":
            hollow = {"linestyle": _FOREIGN, "markerfacecolor": theme.paper, "fillstyle": "full"}
            axes.plot(rows.k, rows["mean"], **style | hollow, linewidth=0.9, markeredgewidth=0.8)
            continue
        axes.plot(rows.k, rows["mean"], **style)
        band = (rows.k, rows.low, rows.high)
        axes.fill_between(*band, color=style["color"], alpha=alpha, linewidth=0, zorder=0)
    axes.margins(y=0.12)


def _draw_excess(axes: Axes, results: Results, theme: _Theme, styles: Styles, beyond: str) -> None:
    _draw_k_axis(axes, results)
    axes.set_ylabel("net excess recovery" if beyond == "net" else "excess recovery")
    axes.axhline(0, color=theme.ink, linewidth=0.8, zorder=1)
    rows = _of_main_set(results, results.summary).dropna(subset=[beyond])
    if not len(rows):
        _say(axes, "not measured", theme)
        return
    curves = dict(iter(rows.sort_values("k").groupby(_CURVE)))
    shown = [name for name in styles if name in curves]
    for i, name in enumerate(shown):
        curve, style = curves[name], styles[name]
        k = curve.k * 2 ** (_side_by_side(i, len(shown)) * 0.35)
        axes.errorbar(
            k, curve[beyond], _lengths(curve, beyond, f"{beyond}_low", f"{beyond}_high"),
            elinewidth=0.8, capsize=0, **style,
        )  # fmt: skip
        axes.plot(k, curve.placebo, color=style["color"], linestyle=_PLACEBO, linewidth=0.9)


def _draw_kinds(
    axes: Axes, rows: pd.DataFrame, theme: _Theme, styles: Styles, kinds: list[str]
) -> None:
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
    shown = [curve for curve in styles if curve[1] == "tokens" and curve[0] in set(rows.selector)]
    for i, curve in enumerate(shown):
        some = rows[rows.selector == curve[0]]
        y = [kinds.index(kind) + _side_by_side(i, len(shown)) for kind in some.kind]
        axes.errorbar(
            some.excess_recovery, y, elinewidth=0.8, **styles[curve] | {"linestyle": "none"},
            xerr=_lengths(some, "excess_recovery", "excess_low", "excess_high"),
        )  # fmt: skip


def _side_by_side(i: int, num: int) -> float:
    """Where the i-th of several intervals at one place is drawn; all within ± 0.4."""
    return min(0.2, 0.8 / num) * (i - (num - 1) / 2)


def _draw_k_axis(axes: Axes, results: Results) -> None:
    ks = sorted(results.recovery.k.unique()) or [1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set_xlim(ks[0] * 0.8, ks[-1] * 1.25)
    axes.set_xlabel("k, number of far units")


def _say(axes: Axes, text: str, theme: _Theme) -> None:
    place: Any = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(0.5, 0.5, text, color=theme.faint, **place)


def _legend_handles(styles: Styles, theme: _Theme, beyond: str) -> list[Artist]:
    handles: list[Artist] = []
    for (selector, units), style in styles.items():
        name = _spell(selector) + ("" if units == "tokens" else f", {units}")
        handles.append(Line2D([], [], label=name, **style))
    lines = [(_FOREIGN, "foreign control"), (_PLACEBO, "(c): placebo")]
    for line, label in lines if beyond == "net" else lines[:1]:
        style = {"linestyle": line, "linewidth": 0.9, "color": theme.faint}
        handles.append(Line2D([], [], label=label, **style))
    handles.append(Patch(fill=False, edgecolor=theme.ink, label="(a): placebo"))
    handles.append(Patch(color=theme.fill, label="95% over documents\n(b): of L_short − L_k"))
    return handles


def _shorten(name: str, limit: int) -> str:
    """The end of a path says most."""
    return name if len(name) <= limit else "…" + name[1 - limit :]


def _spell(name: str) -> str:
    return str(name).replace("_", " ")


def _styles(results: list[Results], theme: _Theme) -> Styles:
    tables = [t[_CURVE] for result in results for t in (result.summary, result.recovery)]
    tables += [result.dependencies[["selector"]].assign(units="tokens") for result in results]
    found = pd.concat([table.drop_duplicates() for table in tables])
    selectors = list(dict.fromkeys([*_SELECTORS, *found.selector]))
    units = ["tokens", *sorted({*found.units} - {"tokens"})]
    pairs = set(found.itertuples(index=False, name=None))
    styles: Styles = {}
    for selector, unit in (pair for pair in product(selectors, units) if pair in pairs):
        color, marker = _SELECTORS.get(selector, (theme.ink, "."))
        line, fill = _UNITS[min(units.index(unit), len(_UNITS) - 1)]
        styles[selector, unit] = {
            "color": _ON_DARK.get(color, color) if theme.lighter else color, "marker": marker,
            "markersize": 3.5, "linestyle": line, "fillstyle": fill,
            "markerfacecoloralt": theme.paper,
        }  # fmt: skip
    return styles


def _lengths(rows: pd.DataFrame, value: str, low: str, high: str) -> np.ndarray:
    """What matplotlib wants of an interval: how far it reaches to each side."""
    lengths = np.array([rows[value] - rows[low], rows[high] - rows[value]], dtype=float)
    return np.maximum(np.nan_to_num(lengths), 0)


def _of_main_set(results: Results, rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.target_set == main_set(results.targets.target_set)]


def _chosen_losses(results: Results) -> pd.DataFrame:
    """Rows of losses that the panels speak of."""
    targets = _of_main_set(results, results.targets)
    return results.losses.merge(targets.loc[targets.far_part == "document", KEYS], on=KEYS)


def _chosen(results: Results) -> pd.DataFrame:
    """Rows of recovery that the panels speak of, with the target's loss_short."""
    rows = results.recovery[results.recovery.far_part == "document"]
    return rows.merge(_chosen_losses(results)[[*KEYS, "loss_short"]], on=KEYS)


def _loss_curves(chosen: pd.DataFrame) -> dict[tuple[str, ...], pd.DataFrame]:
    """(selector, units, control) → mean loss by k with its 95% interval. Draws of one target are
    averaged before anything else, and whole documents are resampled. The interval is that of the
    distance to L_short: how hard a document is moves both lines alike and says nothing about k."""
    by = [*_CURVE, "control", "k", *KEYS]
    regained = chosen.assign(regained=chosen.loss_short - chosen.loss_set)
    of_targets = regained.groupby(by).regained.mean()
    of_documents = of_targets.groupby([*_CURVE, "control", "k", "document"]).agg(["sum", "count"])
    of_documents = of_documents.unstack("document", fill_value=0)
    loss_short = chosen.drop_duplicates(KEYS).loss_short.mean()
    weights_RD = resample_weights(chosen.document.nunique())
    curves: dict[tuple[str, ...], list] = {}
    for (*curve, k), row in of_documents.iterrows():
        total_D, count_D = row["sum"].to_numpy(), row["count"].to_numpy()
        with np.errstate(invalid="ignore"):
            mean_R = (weights_RD @ total_D) / (weights_RD @ count_D)
        # What is regained is lost from the loss.
        mean, high, low = loss_short - np.array(interval(mean_R, total_D.sum() / count_D.sum()))
        curves.setdefault(tuple(curve), []).append((k, mean, low, high))
    columns = ["k", "mean", "low", "high"]
    return {curve: pd.DataFrame(rows, columns=columns) for curve, rows in curves.items()}
