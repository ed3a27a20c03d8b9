"""Define what all panels of Figure 2 share: inks, axes, and points without a result.

    Missing(label="RoPE", reason="not trained yet", length=4032)   a cross, and a legend's line
    draw_axis(axes, "length", [960, 1984, 4032])                   log 2, with three ticks

figures.py, gap_panel.py and share_panels.py use it. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from matplotlib.axes import Axes

INK = "#1a1a1a"
FAINT = "#767676"
FILL = "#d9d9d9"
WHITE = "#ffffff"

SETTINGS = {
    "text.color": INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "axes.facecolor": WHITE,
    "figure.facecolor": WHITE,
    "savefig.facecolor": WHITE,
}


@dataclass(frozen=True)
class Missing:
    """A point of the figure that has no result, such as a model that was not trained yet."""

    label: str
    """The label of its curve."""

    reason: str
    """The reason why there is no result, which the legend shows."""

    length: float | None = None
    """Length of the long window in tokens, infinite for all earlier text. None if it is not
    known."""

    step: int | None = None
    """Step of the checkpoint. None for the last one."""

    positions: str | None = None
    """The model's position scheme, which determines the colour."""

    @property
    def place(self) -> str:
        """Return length and step in words, as far as they are known."""
        words = []
        if self.length == float("inf"):
            words.append("all text")
        elif self.length is not None:
            words.append(f"{self.length:,.0f}")
        if self.step:
            words.append(f"step {self.step:,}")
        return ", ".join(words)


_AXIS_LABELS = {"k": "k, number of distant units", "length": "long window, tokens", "step": "step"}


def draw_axis(axes: Axes, name: str, values: Collection[float]) -> None:
    """Label the horizontal axis. An axis of k or length is logarithmic, with a tick at each finite
    value; an axis of steps is not.

    Args:
        axes: The panel.
        name: k, length or step.
        values: The values that are drawn.
    """
    axes.set_xlabel(_AXIS_LABELS[name])
    if name == "step":
        return
    ticks = sorted({value for value in values if value < float("inf")})
    if not ticks:
        return
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(ticks[0] * 0.8, ticks[-1] * 1.25)
