"""Draw the picture of docs/longer.md from the stored results: python -m study.pages.draw_longer."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_sparsity.drawing import BLACK, BLUE, GREY, RED, save
from study.pages.stored import ROOT, task_rows


def lost(rows: pd.DataFrame, trained: int) -> pd.DataFrame:
    """The share of right answers at the trained length minus that at others, by model and k."""
    right = rows.pivot_table(index=["task", "seed", "k"], columns="length", values="exact_match")
    return right.rsub(right[trained], axis=0)


def panel(axes: Axes, losses: pd.DataFrame, trained: int, times: dict[int, str]) -> None:
    """A dot a model, a line for the mean, a color for how many times the trained length."""
    for factor, color in times.items():
        found = losses[factor * trained]
        mean = found.groupby("k").mean()
        axes.plot(mean.index, mean, color=color, label=f"{factor} times the trained length")
        for (task, _, k), value in found.items():
            fill = "none" if task == "local" else color
            axes.plot(k, value, "o", color=color, markerfacecolor=fill, markersize=3, alpha=0.7)
    axes.axhline(0, color=GREY, linewidth=0.5, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks := sorted(set(losses.index.get_level_values("k"))), [str(k) for k in ks])
    axes.set(xlabel="k: tokens that determine the answer", ylim=(-0.05, 1.05))
    axes.legend(frameon=False)


def draw() -> Figure:
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    parity = pd.DataFrame(task_rows("sparse_parity_mastery")).assign(k=lambda rows: rows.test_k)
    parity = parity[(parity.train_k == 4) & (parity.k <= 4)]
    panel(panels[0], lost(parity, 50), 50, {4: BLUE, 10: RED})
    named = {k: pd.DataFrame(task_rows(f"planted_{k}")).assign(k=k) for k in (1, 8)}
    planted = dict(list(pd.concat(named.values()).groupby("scheme")))
    for axes, scheme in zip(panels[1:], ("pose", "rope"), strict=True):
        panel(axes, lost(planted[scheme], 256), 256, {2: BLACK, 4: BLUE})
    titles = ("Sparse parity, RoPE + PoSE", "Planted pieces, RoPE + PoSE", "Planted, RoPE alone")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title)
    panels[0].set_ylabel("right answers lost")
    return figure


if __name__ == "__main__":
    save(draw, ROOT / "docs/figures/longer.png")
