"""Draw the picture of docs/longer.md from the stored results: python -m study.pages.draw_longer."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from olmo_sparsity.drawing import BLACK, BLUE, GREY, RED, save
from study.pages.stored import ROOT, task_rows


def rows_of(*names: str) -> pd.DataFrame:
    return pd.concat([pd.DataFrame(task_rows(name)).assign(result=name) for name in names])


def lines(axes: Axes, rows: pd.DataFrame, x: str, label: str, color: str, style: str = "-") -> None:
    """A thin line a model, and their mean."""
    for _, of_model in rows.groupby("seed"):
        axes.plot(of_model[x], of_model.exact_match, style, color=color, alpha=0.3, linewidth=0.6)
    mean = rows.groupby(x).exact_match.mean()
    axes.plot(mean.index, mean, style, color=color, label=label, marker="o", markersize=2.5)


def draw() -> Figure:
    figure = Figure(figsize=(7.2, 2.5), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    parity = rows_of("sparse_parity_mastery")
    for axes, train_k in zip(panels, (2, 4), strict=False):
        for length, color in ((50, BLACK), (200, BLUE), (500, RED)):
            of_length = parity[(parity.train_k == train_k) & (parity.length == length)]
            lines(axes, of_length.sort_values("test_k"), "test_k", f"{length} tokens", color)
        axes.axvline(train_k, color=GREY, linestyle=":", linewidth=0.8)
        axes.set(xlabel="k: marked bits that decide", xticks=(1, 2, 4, 8, 12, 16))
        axes.set_title(f"Sparse parity, trained on k ≤ {train_k}")
    planted = rows_of("planted_1", "planted_8").query("task == 'scattered'").sort_values("length")
    for scheme, name, color in (("pose", "RoPE + PoSE", BLUE), ("rope", "RoPE", RED)):
        for k, style in ((1, "-"), (8, "--")):
            chosen = planted[(planted.scheme == scheme) & (planted.result == f"planted_{k}")]
            lines(panels[2], chosen, "length", f"{name}, k = {k}", color, style)
    panels[2].axvline(256, color=GREY, linestyle=":", linewidth=0.8)
    panels[2].set_xscale("log", base=2)
    panels[2].set_xticks(lengths := sorted(set(planted.length)), [str(n) for n in lengths])
    panels[2].set(xlabel="tokens (trained on 256)", title="Planted pieces in Wikipedia")
    panels[0].set(ylabel="right answers", ylim=(0, 1.02))
    for axes in panels:
        axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    save(draw, ROOT / "docs/figures/longer.png")
