"""Hold what all panels of Figure 2 share: inks, the points without a result, and axes.

Never imports torch.
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
    """A point of the figure that has no result, and why."""

    label: str
    reason: str
    length: float | None = None
    """None: unknown; infinite: all earlier text."""

    step: int | None = None
    """None: the last one."""

    positions: str | None = None
    """The model's position scheme, which determines the colour."""

    @property
    def place(self) -> str:
        """Return length and step in words, as far as they are known."""
        parts = []
        if self.length == float("inf"):
            parts.append("all text")
        elif self.length is not None:
            parts.append(f"{self.length:,.0f}")
        if self.step:
            parts.append(f"step {self.step:,}")
        return ", ".join(parts)


_AXIS_LABELS = {"k": "k, number of distant units", "length": "long window, tokens", "step": "step"}


def draw_axis(axes: Axes, name: str, values: Collection[float]) -> None:
    """Label an axis of k, length or step. The first two are logarithmic, with a tick at each finite
    value."""
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
