"""Draw the paper's experiment on sparse parity: `python -m study.pages.draw_parity [FOLDER]`.

It writes docs/figures/sparse_parity.png from the stored trials; of those in another FOLDER,
sparse_parity.png in that folder. While a panel has no model yet, it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from olmo_sparsity.base.drawing import GREY, save
from olmo_sparsity.base.errors import DataError
from study.pages.stored import ROOT
from study.parity import NAMES, Model, read_models, table_settings

PICTURE = ROOT / "docs/figures/sparse_parity.png"
CHANCE = 0.5
TRAINED_ALPHA = 0.25
CUT: Literal["--"] = "--"

Color = tuple[float, float, float, float]


def draw(models: Sequence[Model], train_ks: Sequence[int], trained: Sequence[int]) -> Figure:
    """Draw a row for each scheme, a column for each K_train. `trained`: shortest and longest."""
    refuse_empty(models, train_ks)
    tested = sorted({k for model in models for k in model.accuracy.index})
    # The last fifth of the map is too pale for a line on white.
    shades = colormaps["viridis"].resampled(256)
    colors = {k: shades(0.8 * place / max(1, len(tested) - 1)) for place, k in enumerate(tested)}
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    grid = figure.subplots(len(NAMES), len(train_ks), sharex=True, sharey=True, squeeze=False)
    for row, (scheme, name) in zip(grid, NAMES.items(), strict=True):
        row[0].set_ylabel(f"{name}\naccuracy")
        for axes, train_k in zip(row, train_ks, strict=True):
            chosen = [
                model for model in models if (model.trial.scheme, model.k) == (scheme, train_k)
            ]
            panel(axes, chosen, colors, trained)
            if scheme == next(iter(NAMES)):
                axes.set_title(f"K_train = {train_k}")
    for axes in grid[-1]:
        axes.set_xlabel("tokens")
    lines = [Line2D([], [], color=color, label=f"{k}") for k, color in colors.items()]
    more = Line2D([], [], color=GREY, linestyle=CUT, label="k_test >\nK_train")
    shaded = Patch(color=GREY, alpha=TRAINED_ALPHA, linewidth=0, label="trained\nlengths")
    figure.legend(
        handles=[*lines, more, shaded], title="k_test", loc="outside right center", frameon=False
    )
    return figure


def refuse_empty(models: Sequence[Model], train_ks: Sequence[int]) -> None:
    there = {(model.trial.scheme, model.k) for model in models}
    missing = [f"{scheme} {k}" for scheme in NAMES for k in train_ks if (scheme, k) not in there]
    if missing:
        remedy = "run `make -f study/Makefile parity_table`"
        raise DataError(f"no model is trained of {', '.join(missing)}; {remedy}")


def panel(
    axes: Axes, models: Sequence[Model], colors: dict[int, Color], trained: Sequence[int]
) -> None:
    """A line for each k is the mean over models that mastered their k, a band all of them."""
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
    right = pd.concat({model.trial.seed: model.accuracy for model in learnt}, names=["seed", "k"])
    for k, color in colors.items():
        of_k = right.xs(k, level="k").dropna(axis=1)  # at a short length a large k does not fit
        style = "-" if k <= learnt[0].k else CUT
        axes.plot(of_k.columns, of_k.mean(), style, color=color, linewidth=1)
        axes.fill_between(
            of_k.columns, of_k.min(), of_k.max(), color=color, alpha=0.12, linewidth=0
        )


def main(words: Sequence[str]) -> None:
    settings = table_settings(*words)
    models = read_models(settings)
    path = Path(words[0]) / PICTURE.name if words else PICTURE
    save(lambda: draw(models, sorted(settings.train_ks), settings.train_lengths), path)


if __name__ == "__main__":
    main(sys.argv[1:])
