"""Declare the panels of Figure 2 that show shares of the gap, and the controls in each.

    panel                 axis     value, with its interval    controls
    (b)                   k        recovery                    placebo targets, unrelated text
    (c)                   k        removal                     placebo targets
    (d), (e) if needed    length   recovery                    placebo targets, unrelated text
                          step     recovery                    placebo targets, unrelated text

`panels_of` returns those that a figure needs; share_panels.py draws them. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from olmo_sparsity.analysis.report.curves import Curve
from olmo_sparsity.analysis.results.columns import SummaryColumn, column_named


@dataclass(frozen=True, kw_only=True)
class Control:
    """A control that is drawn beside the value of a panel, and how."""

    column: str
    """Its column of the summary."""

    line: Any
    """Its line style, as matplotlib takes it: a text, or (offset, (length of a dash, of a gap))."""

    marker: str
    """Its marker where it has one point only, so that no line can be drawn."""

    beside: float
    """The factor of the marker's place, which moves it to the side of the value, so that error bars
    do not overlap."""


PLACEBO_RECOVERY = Control(column="placebo_recovery", line=":", marker="x", beside=1.08)
PLACEBO_REMOVAL = Control(column="placebo_removal", line=":", marker="x", beside=1.08)
UNRELATED = Control(column="unrelated", line=(0, (3, 1.6)), marker="+", beside=0.93)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of shares of the gap: a column of the summary along an axis."""

    title: str
    axis: str
    """k, length or step."""

    column: SummaryColumn
    """The column that is drawn, with its interval."""

    controls: tuple[Control, ...]


_RECOVERY = column_named("recovery")
_CONTROLS_OF_RECOVERY = (PLACEBO_RECOVERY, UNRELATED)

_PANELS_BY_K = (
    Panel(
        title="(b) Enough? k units added",
        axis="k",
        column=_RECOVERY,
        controls=_CONTROLS_OF_RECOVERY,
    ),
    # Units of an unrelated text cannot be removed from the document's own.
    Panel(
        title="(c) Needed? All but k",
        axis="k",
        column=column_named("removal"),
        controls=(PLACEBO_REMOVAL,),
    ),
)

_TITLES_BY_RUN = {
    "length": "By length: smallest k, last step",
    "step": "By step: smallest k, longest",
}
"""Axis of a panel of runs → its title, after its letter; in the order of the panels."""


def panels_of(curves: Sequence[Curve]) -> list[Panel]:
    """Return the panels to draw: two by k, and one for each of length and step along which a run
    was measured more than once."""
    panels = list(_PANELS_BY_K)
    # Panel (d) is the first of them, whichever axis it has.
    letters = iter("de")
    for axis, title in _TITLES_BY_RUN.items():
        if any(curve.along(axis)[axis].nunique() > 1 for curve in curves):
            panels.append(
                Panel(
                    title=f"({next(letters)}) {title}",
                    axis=axis,
                    column=_RECOVERY,
                    controls=_CONTROLS_OF_RECOVERY,
                )
            )
    return panels
