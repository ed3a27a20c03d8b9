"""Draw README's first figure, docs/figures/readme.png, from the stored measurements:
`python -m study.pages.draw_readme`.

Its models (study/configs/experiments/readme.yaml) are trained with RoPE + PoSE and with RoPE alone
at 256 tokens, and measured with long windows inside and beyond that length. Panels:

    (a) L_short - L_long against the long window, the mean of all tokens
    (b) recovery by the k most influential tokens at the trained length, beside placebo targets
    (c) the same far beyond it, of RoPE + PoSE; RoPE alone has hardly any gap there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from olmo_sparsity.base.drawing import BLUE, GREY, RED, band, save
from study.pages.stored import ROOT, measurements, read_summary, stored_rows

PICTURE = ROOT / "docs/figures/readme.png"
TRAINED_LENGTH = 256
WINDOWS = (128, 256, 480, 960)
SELECTOR = "add_one_screened"
PLACEBO_LINE: Literal[":"] = ":"


@dataclass(frozen=True)
class Scheme:
    """A position scheme, as its measurements are named and as it is drawn."""

    key: str
    label: str
    color: str
    marker: str


POSE = Scheme("pose", "RoPE + PoSE", BLUE, "o")
ROPE = Scheme("rope", "RoPE alone", RED, "s")
SCHEMES = (POSE, ROPE)


# --- what is stored -------------------------------------------------------------------------------


def name_of(scheme: Scheme, window: int) -> str:
    """Return the name under which `make -f study/Makefile readme` stores a measurement."""
    return f"readme_{scheme.key}_{window}"


def read_gaps(scheme: Scheme) -> pd.Series:
    """Return L_short - L_long in nats by window, the mean of all tokens."""
    gaps = {}
    for window in WINDOWS:
        losses = measurements()[name_of(scheme, window)]["mean_losses"]
        gaps[window] = losses["loss_short"]["mean"] - losses["loss_long"]["mean"]
    return pd.Series(gaps)


def read_placebo_recovery(scheme: Scheme, window: int) -> pd.Series:
    """Return recovery at placebo targets by k."""
    rows = stored_rows(name_of(scheme, window))
    rows = rows[(rows.selector == SELECTOR) & (rows.distant_part == "placebo")]
    sums = rows.groupby("k")[["own_reduction", "gap"]].sum()
    return sums.own_reduction / sums.gap


# --- the picture ----------------------------------------------------------------------------------


def draw() -> Figure:
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    gap_axes, inside_axes, beyond_axes = figure.subplots(1, 3)
    draw_gaps(gap_axes)
    inside_axes.set_title(f"(b) At {TRAINED_LENGTH} tokens, as trained", loc="left")
    draw_recovery(inside_axes, SCHEMES, TRAINED_LENGTH)
    beyond_axes.set_title(f"(c) At {WINDOWS[-1]} tokens", loc="left")
    draw_recovery(beyond_axes, (POSE,), WINDOWS[-1])
    beyond_axes.text(
        0.97,
        0.03,
        "RoPE alone: hardly any gap",
        transform=beyond_axes.transAxes,
        horizontalalignment="right",
        color=ROPE.color,
        fontsize=6.5,
    )
    figure.legend(handles=legend(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def draw_gaps(axes: Axes) -> None:
    axes.set_title("(a) Loss that distant text saves", loc="left")
    axes.set_xlabel("long window, tokens")
    axes.set_ylabel("L_short − L_long, nats")
    axes.set_xscale("log", base=2)
    axes.set_xticks(WINDOWS, [str(window) for window in WINDOWS])
    axes.minorticks_off()
    axes.axhline(0, color="black", linewidth=0.6)
    axes.axvspan(TRAINED_LENGTH, WINDOWS[-1] * 1.1, color=GREY, alpha=0.18, linewidth=0, zorder=0)
    axes.set_xlim(WINDOWS[0] / 1.1, WINDOWS[-1] * 1.1)
    for scheme in SCHEMES:
        gaps = read_gaps(scheme)
        axes.plot(gaps.index, gaps, color=scheme.color, marker=scheme.marker, markersize=3)
    axes.text(
        TRAINED_LENGTH * 1.06,
        0.03,
        "longer than trained",
        transform=axes.get_xaxis_transform(),
        fontsize=6.5,
    )


def draw_recovery(axes: Axes, schemes: Sequence[Scheme], window: int) -> None:
    """Draw recovery by k, with its 95% interval over documents, beside that at placebo targets."""
    axes.set_xlabel("k, number of distant tokens")
    axes.set_ylabel("recovery (share of the gap)")
    axes.set_xscale("log", base=2)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set_ylim(0, 1.6)
    for scheme in schemes:
        own = read_summary(name_of(scheme, window)).loc[SELECTOR]
        placebo = read_placebo_recovery(scheme, window)
        axes.plot(own.index, own.recovery, color=scheme.color, marker=scheme.marker, markersize=3)
        band(axes, own.index, own.recovery_low, own.recovery_high, scheme.color)
        axes.plot(placebo.index, placebo, PLACEBO_LINE, color=scheme.color)
        axes.set_xticks(own.index, [str(k) for k in own.index])
    axes.minorticks_off()


def legend() -> list[Artist]:
    schemes: list[Artist] = [
        Line2D([], [], color=scheme.color, marker=scheme.marker, markersize=3, label=scheme.label)
        for scheme in SCHEMES
    ]
    placebo = Line2D([], [], color=GREY, linestyle=PLACEBO_LINE, label="at placebo targets")
    interval = Patch(color=GREY, alpha=0.3, linewidth=0, label="95% over documents")
    return [*schemes, placebo, interval]


if __name__ == "__main__":
    save(draw, PICTURE)
