"""Draw README's first figure, docs/figures/readme.png, from the stored measurements:
`python -m study.pages.draw_readme`.

Its models (study/configs/experiments/readme.yaml) are trained with RoPE + PoSE and with RoPE alone
at 256 tokens, and measured with long windows inside and beyond that length. Panels:

    (a) L_short - L_long against the long window, the mean of all tokens
    (b) recovery by the k most influential tokens at the trained length, beside placebo targets
    (c) the same far beyond it, of the models that have a gap there, with transfer between seeds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from olmo_sparsity.base.drawing import BLUE, GREY, RED, band, save
from study.pages.stored import ROOT, measurements, stored_rows

PICTURE = ROOT / "docs/figures/readme.png"
TRAINED_LENGTH = 256
WINDOWS = (128, 256, 480, 960)
SELECTOR = "add_one_screened"


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


def name_of(scheme: Scheme, seed: int, window: int) -> str:
    """Return the name under which `make -f study/Makefile readme` stores a measurement."""
    return f"readme_{scheme.key}_seed{seed}_{window}"


def name_of_transfer(scheme: Scheme, seed: int) -> str:
    """Return the name of the measurement of a model with the tokens that other models chose."""
    return f"{name_of(scheme, seed, WINDOWS[-1])}_transfer"


def stored_seeds() -> list[int]:
    """Return the seeds of which all measurements of both schemes are stored."""
    stored = measurements()
    seeds = {
        int(name.split("seed")[1].split("_")[0]) for name in stored if name.startswith("readme_")
    }
    return sorted(
        seed
        for seed in seeds
        if all(name_of(scheme, seed, window) in stored for scheme in SCHEMES for window in WINDOWS)
    )


def read_gaps(scheme: Scheme, seeds: Sequence[int]) -> pd.DataFrame:
    """Return L_short - L_long in nats, the mean of all tokens: a row a seed, a column a window."""
    gaps = {}
    for seed in seeds:
        for window in WINDOWS:
            losses = measurements()[name_of(scheme, seed, window)]["mean_losses"]
            gaps[seed, window] = losses["loss_short"]["mean"] - losses["loss_long"]["mean"]
    return pd.Series(gaps).unstack()


def read_recovery(name: str, distant_part: str) -> pd.Series:
    """Return recovery by k: of the own targets where `distant_part` is "document", of the placebo
    targets where it is "placebo"."""
    rows = stored_rows(name)
    rows = rows[(rows.selector == SELECTOR) & (rows.distant_part == distant_part)]
    sums = rows.groupby("k")[["own", "gap"]].sum()
    return sums.own / sums.gap


def read_recoveries(
    scheme: Scheme, seeds: Sequence[int], window: int, distant_part: str
) -> pd.DataFrame:
    """Return `read_recovery` of all seeds: a row a seed, a column a k."""
    return pd.DataFrame(
        {seed: read_recovery(name_of(scheme, seed, window), distant_part) for seed in seeds}
    ).T


def read_transfer(scheme: Scheme, seeds: Sequence[int]) -> pd.DataFrame:
    """Return recovery by the tokens that another seed chose: a row a seed, a column a k."""
    transfers = {}
    for seed in seeds:
        name = name_of_transfer(scheme, seed)
        if name in measurements():
            transfers[seed] = read_recovery(name, "document")
    return pd.DataFrame(transfers).T


# --- the picture ----------------------------------------------------------------------------------


def draw(seeds: Sequence[int]) -> Figure:
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    gap_axes, inside_axes, beyond_axes = figure.subplots(1, 3)
    draw_gaps(gap_axes, seeds)
    inside_axes.set_title(f"(b) At {TRAINED_LENGTH} tokens, as trained", loc="left")
    draw_recovery(inside_axes, SCHEMES, seeds, TRAINED_LENGTH)
    beyond_axes.set_title(f"(c) At {WINDOWS[-1]} tokens", loc="left")
    draw_recovery(beyond_axes, (POSE,), seeds, WINDOWS[-1])
    draw_transfer(beyond_axes, POSE, seeds)
    beyond_axes.text(
        0.97,
        0.03,
        "RoPE alone: no gap to recover",
        transform=beyond_axes.transAxes,
        horizontalalignment="right",
        color=ROPE.color,
        fontsize=6.5,
    )
    beyond_axes.sharey(inside_axes)
    figure.legend(handles=legend(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def draw_gaps(axes: Axes, seeds: Sequence[int]) -> None:
    """Draw a line for the mean over seeds and a point for each seed."""
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
        gaps = read_gaps(scheme, seeds)
        axes.plot(gaps.columns, gaps.mean(), color=scheme.color)
        for _, gaps_of_seed in gaps.iterrows():
            axes.plot(
                gaps.columns,
                gaps_of_seed,
                scheme.marker,
                color=scheme.color,
                markersize=3,
                alpha=0.7,
            )
    axes.text(
        TRAINED_LENGTH * 1.06,
        0.03,
        "longer than trained",
        transform=axes.get_xaxis_transform(),
        fontsize=6.5,
    )


def draw_recovery(axes: Axes, schemes: Sequence[Scheme], seeds: Sequence[int], window: int) -> None:
    """Draw the mean over seeds at own and at placebo targets, with a band over the seeds."""
    axes.set_xlabel("k, number of distant tokens")
    axes.set_ylabel("recovery (share of the gap)")
    axes.set_xscale("log", base=2)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set_ylim(0, 1.6)
    for scheme in schemes:
        own = read_recoveries(scheme, seeds, window, "document")
        placebo = read_recoveries(scheme, seeds, window, "placebo")
        axes.plot(own.columns, own.mean(), color=scheme.color, marker=scheme.marker, markersize=3)
        axes.plot(placebo.columns, placebo.mean(), ":", color=scheme.color)
        for recovery in (own, placebo):
            band(axes, recovery.columns, recovery.min(), recovery.max(), scheme.color)
        axes.set_xticks(own.columns, [str(k) for k in own.columns])
    axes.minorticks_off()


def draw_transfer(axes: Axes, scheme: Scheme, seeds: Sequence[int]) -> None:
    transfer = read_transfer(scheme, seeds)
    for _, recovery in transfer.iterrows():
        axes.plot(recovery.index, recovery, "D", color="none", markeredgecolor=scheme.color)


def legend() -> list[Artist]:
    lines: list[Artist] = [
        Line2D([], [], color=scheme.color, marker=scheme.marker, markersize=3, label=scheme.label)
        for scheme in SCHEMES
    ]
    return [
        *lines,
        Line2D([], [], color=GREY, linestyle=":", label="at placebo targets"),
        Line2D(
            [], [], color="none", marker="D", markeredgecolor=GREY, label="chosen by another seed"
        ),
        Patch(color=GREY, alpha=0.3, linewidth=0, label="lowest to highest seed"),
    ]


if __name__ == "__main__":
    save(lambda: draw(stored_seeds()), PICTURE)
