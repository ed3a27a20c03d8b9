"""Draw the picture of study/longer.md from stored results: python -m study.pages.draw_longer."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_sparsity.base.drawing import BLACK, BLUE, GREY, RED, save
from study.longer import NEVER, TRAINED
from study.pages.stored import ROOT, other_table, task_rows

NAMES = {"rope": "RoPE alone", "pose": "RoPE + PoSE"}


def losses(rows: pd.DataFrame, trained: int) -> pd.DataFrame:
    """The share of right answers at the trained length minus that at others, by model and k."""
    right = rows.pivot_table(index=["task", "seed", "k"], columns="length", values="exact_match")
    return right.rsub(right[trained], axis=0)


def panel(axes: Axes, title: str, lost: pd.DataFrame, trained: int, times: dict[int, str]) -> None:
    """A dot a model, a line for the mean, a color for how many times the trained length."""
    for factor, color in times.items():
        found = lost[factor * trained]
        mean = found.groupby("k").mean()
        axes.plot(mean.index, mean, color=color, label=f"{factor} times the trained length")
        for (task, _, k), value in found.items():
            fill = "none" if task == "local" else color
            axes.plot(k, value, "o", color=color, markerfacecolor=fill, markersize=3, alpha=0.7)
    axes.set(title=title, xlabel="k: tokens that determine the answer", ylim=(-0.05, 1.05))
    finish(axes, {k: str(k) for k in mean.index}, "right answers lost")


def finish(axes: Axes, ticks: dict[float, str], lost: str) -> None:
    axes.axhline(0, color=GREY, linewidth=0.5, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks([*ticks], [*ticks.values()])
    axes.set_ylabel(lost)
    axes.legend(frameon=False)


def penalties(axes: Axes) -> None:
    """A thin line a model, a thick one for the mean: what shorter training costs, by k*."""
    found = other_table("longer_by_k").set_index("k")
    for (scheme, models), color in zip(TRAINED.items(), (RED, BLUE), strict=True):
        axes.plot(found.index, found[[*models]], color=color, linewidth=0.5)
        axes.plot(found.index, found[scheme], color=color, label=NAMES[scheme])
    axes.set(title="Wikipedia, next token", xlabel="k*: tokens that recover 0.9 of the gain")
    finish(axes, {k: f"{k:.0f}" if k < NEVER else "more" for k in found.index}, "nats lost")


def draw() -> Figure:
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    panels = figure.subplots(2, 2).flat
    parity = pd.DataFrame(task_rows("sparse_parity_mastery")).assign(k=lambda rows: rows.test_k)
    parity = parity[(parity.train_k == 4) & (parity.k <= 4)]
    panel(panels[0], "Sparse parity, RoPE + PoSE", losses(parity, 50), 50, {4: BLUE, 10: RED})
    rows = {k: task_rows(f"planted_{k}") + task_rows(f"planted_rope_{k}") for k in (1, 8)}
    planted = pd.concat(pd.DataFrame(of).assign(k=k) for k, of in rows.items()).groupby("scheme")
    for axes, scheme in zip(panels[1:3], ("pose", "rope"), strict=True):
        title = f"Planted pieces, {NAMES[scheme]}"
        panel(axes, title, losses(planted.get_group(scheme), 256), 256, {2: BLACK, 4: BLUE})
    penalties(panels[3])
    return figure


if __name__ == "__main__":
    save(draw, ROOT / "docs/figures/longer.png")
