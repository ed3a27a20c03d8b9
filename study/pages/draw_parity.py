"""Draw the paper's experiment on sparse parity, docs/figures/sparse_parity.png, from the stored
trials: `python -m study.pages.draw_parity`.

A panel for each scheme and each K_train of which both schemes have a model. A panel says of how
many models it shows those that learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pandas as pd
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from olmo_sparsity.base.drawing import GREY, save
from olmo_sparsity.base.errors import DataError
from study.pages.stored import ROOT
from study.parity.models import NAMES, Model, select
from study.parity.table import SCHEMES, read_table, table_settings

PICTURE = ROOT / "docs/figures/sparse_parity.png"
CHANCE = 0.5
TRAINED_ALPHA = 0.25
CUT: Literal["--"] = "--"

Color = tuple[float, float, float, float]


def draw(models: list[Model], trained: Sequence[int]) -> Figure:
    """Draw a row for each scheme, a column for each K_train. `trained`: shortest and longest."""
    train_ks = drawn_ks(models)
    tested = sorted({k for model in models for k in model.accuracy.index})
    colors = colors_of(tested)
    figure = Figure(figsize=(1.2 + 2.1 * len(train_ks), 3.9), layout="constrained")
    grid = figure.subplots(len(SCHEMES), len(train_ks), sharex=True, sharey=True, squeeze=False)
    for row, scheme in zip(grid, SCHEMES, strict=True):
        row[0].set_ylabel(f"{NAMES[scheme]}\naccuracy")
        for axes, train_k in zip(row, train_ks, strict=True):
            panel(axes, select(models, scheme, train_k), colors, trained)
    for axes, train_k in zip(grid[0], train_ks, strict=True):
        axes.set_title(f"K_train = {train_k}")
    for axes in grid[-1]:
        axes.set_xlabel("tokens")
    figure.legend(
        handles=legend_of(colors), title="k_test", loc="outside right center", frameon=False
    )
    return figure


def drawn_ks(models: list[Model]) -> list[int]:
    """Return each K_train of which every scheme has a model, so that no panel is empty."""
    train_ks = sorted({model.train_k for model in models})
    drawn = [k for k in train_ks if all(select(models, scheme, k) for scheme in SCHEMES)]
    if not drawn:
        raise DataError(
            "no K_train has a model with PoSE and one with RoPE alone; "
            "run `make -f study/Makefile parity_table`"
        )
    return drawn


def colors_of(tested: Sequence[int]) -> dict[int, Color]:
    # The last fifth of the map is too pale for a line on white.
    shades = colormaps["viridis"].resampled(256)
    last = max(1, len(tested) - 1)
    return {k: shades(0.8 * place / last) for place, k in enumerate(tested)}


def legend_of(colors: dict[int, Color]) -> list[Artist]:
    lines = [Line2D([], [], color=color, label=f"{k}") for k, color in colors.items()]
    untrained = Line2D([], [], color=GREY, linestyle=CUT, label="k_test >\nK_train")
    shaded = Patch(color=GREY, alpha=TRAINED_ALPHA, linewidth=0, label="trained\nlengths")
    return [*lines, untrained, shaded]


def panel(
    axes: Axes, models: list[Model], colors: dict[int, Color], trained: Sequence[int]
) -> None:
    """Draw a line for each k, the mean over models that mastered their k, and a band from the
    worst to the best of them."""
    axes.axvspan(*trained, color=GREY, alpha=TRAINED_ALPHA, linewidth=0)
    axes.axhline(CHANCE, color=GREY, linewidth=0.5)
    learnt = [model for model in models if model.mastered]
    axes.text(
        0.98,
        0.02,
        f"{len(learnt)} of {len(models)} learnt",
        transform=axes.transAxes,
        horizontalalignment="right",
        fontsize=6,
    )
    axes.set_ylim(-0.02, 1.02)
    axes.set_xticks([50, 200, 500])
    if not learnt:
        return
    accuracy = pd.concat(
        {model.trial.seed: model.accuracy for model in learnt}, names=["seed", "k"]
    )
    for k, color in colors.items():
        of_k = accuracy.xs(k, level="k").dropna(axis=1)  # at a short length a large k does not fit
        style = "-" if k <= learnt[0].train_k else CUT
        axes.plot(of_k.columns, of_k.mean(), style, color=color, linewidth=1)
        axes.fill_between(
            of_k.columns, of_k.min(), of_k.max(), color=color, alpha=0.12, linewidth=0
        )


if __name__ == "__main__":
    save(lambda: draw(read_table(), table_settings().train_lengths), PICTURE)
