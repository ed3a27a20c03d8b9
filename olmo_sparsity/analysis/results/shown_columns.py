"""Declare which columns of the table `summary` are shown where, and how.

    TERMINAL  what `olmo-sparsity measure` prints, in the order of its table
    PAGE      what the page of `olmo-sparsity report` shows, in the order of its tables

    TERMINAL["excess"]    21 characters, with a sign also above 0:   +0.61 [+0.45, +0.77]

terminal_table.py and report/number_tables.py ask `terminal_columns` and `page_columns`. Never
imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from olmo_sparsity.analysis.results.columns import SummaryColumn, column_named


@dataclass(frozen=True, kw_only=True)
class Display:
    """How a table for readers shows a column."""

    heading: str
    has_interval: bool = True
    """Whether the interval of the column, if it has one, is shown with it."""

    digits: int = 2
    sign: Literal["", "+"] = ""
    """`+` gives numbers above 0 a sign, too."""

    width: int = 0
    """Characters in a terminal; a page fits its columns to their content."""

    where: Literal["all", "with net excess", "without net excess"] = "all"
    """In which tables of a terminal the column is shown. Net excess means something only where
    targets were selected by their gap; the tables of other target sets show removal and nats
    instead."""


class ShownColumn(NamedTuple):
    """A column of `summary`, and how a table shows it."""

    column: SummaryColumn
    display: Display


HEADINGS = {
    "recovery": "recovery",
    "placebo_recovery": "placebo recovery",
    "unrelated": "unrelated",
    "excess": "excess",
    "placebo": "placebo excess",
    "net": "net",
    "net_equal": "net at equal gaps",
    "net_nats": "net, nats",
    "excess_nats": "excess, nats",
    "removal": "removal",
    "placebo_removal": "placebo removal",
    "distance": "back",
}
"""Column → its words, which are the same in a terminal and on a page."""


def _shown_as(name: str, **how: Any) -> Display:
    return Display(heading=HEADINGS[name], **how)


TERMINAL = {
    "recovery": _shown_as("recovery", width=19),
    "placebo_recovery": _shown_as("placebo_recovery", width=16, has_interval=False),
    "unrelated": _shown_as("unrelated", width=9, has_interval=False),
    "excess": _shown_as("excess", width=21, sign="+"),
    "placebo": _shown_as(
        "placebo", width=14, has_interval=False, sign="+", where="with net excess"
    ),
    "net": _shown_as("net", width=22, sign="+", where="with net excess"),
    "net_equal": _shown_as("net_equal", width=22, sign="+", where="with net excess"),
    "removal": _shown_as("removal", width=19, where="without net excess"),
    "excess_nats": _shown_as(
        "excess_nats", width=12, has_interval=False, sign="+", where="without net excess"
    ),
    "distance": _shown_as("distance", width=6, digits=0),
}
"""The columns of a table in a terminal, in its order."""

PAGE = {
    "recovery": _shown_as("recovery"),
    "placebo_recovery": _shown_as("placebo_recovery", has_interval=False),
    "unrelated": _shown_as("unrelated", has_interval=False),
    "excess": _shown_as("excess"),
    "placebo": _shown_as("placebo", has_interval=False),
    "net": _shown_as("net"),
    "net_equal": _shown_as("net_equal"),
    "removal": _shown_as("removal"),
    "placebo_removal": _shown_as("placebo_removal", has_interval=False),
    "mean_ratio": Display(heading="mean of ratios"),
    "share_enough": Display(heading="share of targets ≥ 0.9"),
    "distance": _shown_as("distance", digits=0),
    "share_all": Display(heading="share with all distant tokens"),
    "lds": Display(heading="LDS"),
    "token_forwards_per_target": Display(heading="token-forwards per target", digits=0),
}
"""The columns of a table of the page, in its order: those of the terminal first, the cost last."""


def terminal_columns(shows_net: bool) -> list[ShownColumn]:
    """Return the columns of a table in a terminal, in its order. They differ by whether net excess
    means something for its targets (`has_net`)."""
    shown = [ShownColumn(column_named(name), display) for name, display in TERMINAL.items()]
    where = ("all", "with net excess" if shows_net else "without net excess")
    return [entry for entry in shown if entry.display.where in where]


def page_columns() -> list[ShownColumn]:
    """Return the columns of a table of the page, in its order."""
    return [ShownColumn(column_named(name), display) for name, display in PAGE.items()]
