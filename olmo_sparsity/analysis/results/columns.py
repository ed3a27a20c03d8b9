"""The columns of the table `summary`, in one list.

The schema of the stored table, the table in a terminal, the tables of the page with their
explanations, and the table in docs/measure.md are made from this list, or compared with it. To add
a column with an interval, add an entry here and its computation to `statistics`: to `_quantities`
if it is a ratio of sums over documents, else to `quantities_with_intervals`. Imports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Display:
    """How a table for readers shows a column."""

    heading: str
    position: int
    """Columns of the table are in this order."""

    has_interval: bool = True
    """Whether the interval of the column, if it has one, is shown with it."""

    digits: int = 2
    sign: Literal["", "+"] = ""
    """`+` where numbers above 0 have a sign, too."""

    width: int = 0
    """Characters in a terminal."""

    where: Literal["all", "with net excess", "without net excess"] = "all"
    """In which tables of a terminal it is shown: of the target sets whose net excess means
    something, of the others, or of all."""


@dataclass(frozen=True, kw_only=True)
class SummaryColumn:
    """A column of `summary`, and two more with the ends of its interval if it has one."""

    name: str
    kind: str
    """Type of the column, as in `tables`: text, int or wide (double); with `?`, it may be null."""

    meaning: str
    """Explanation of the column, on the page and in docs/measure.md."""

    has_interval: bool = False
    end_names: tuple[str, str] | None = None
    """Names of the ends, where these are not the column's name with `_low` and `_high`."""

    is_net: bool = False
    """The placebo's is subtracted, whose documents are few: with few documents its interval is
    stretched to Student's t."""

    of_placebo: bool = False
    """It is a number of placebo targets alone."""

    came_later: bool = False
    """Measurements of an earlier version do not store it. It is then computed from their other
    tables when they are read."""

    terminal: Display | None = None
    page: Display | None = None

    @property
    def low(self) -> str:
        return self.end_names[0] if self.end_names else f"{self.name}_low"

    @property
    def high(self) -> str:
        return self.end_names[1] if self.end_names else f"{self.name}_high"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the stored columns: its own, and those of the ends."""
        return (self.name, self.low, self.high) if self.has_interval else (self.name,)


SUMMARY = (
    SummaryColumn(name="target_set", kind="text", meaning="how the targets were chosen"),
    SummaryColumn(name="units", kind="text", meaning="the kind of distant units"),
    SummaryColumn(name="selector", kind="text", meaning="the rule that ranked the units"),
    SummaryColumn(name="k", kind="int", meaning="how many of the first units are added"),
    SummaryColumn(name="num_tokens", kind="wide", meaning="mean number of tokens in the k units"),
    SummaryColumn(
        name="recovery",
        kind="wide?",
        meaning="Σ (loss_short − loss_set) / Σ gap: a ratio of sums",
        has_interval=True,
        # Named before other columns had intervals; the names of stored tables stay.
        end_names=("low", "high"),
        terminal=Display(heading="recovery", position=1, width=19),
        page=Display(heading="recovery", position=5),
    ),
    SummaryColumn(
        name="placebo_recovery",
        kind="wide?",
        meaning="recovery at placebo targets by the best units of their unrelated text",
        has_interval=True,
        of_placebo=True,
        came_later=True,
        terminal=Display(heading="placebo", position=2, width=7, has_interval=False),
        page=Display(heading="placebo recovery", position=6, has_interval=False),
    ),
    SummaryColumn(
        name="unrelated",
        kind="wide?",
        meaning="recovery by the best units of an unrelated text",
        has_interval=True,
        page=Display(heading="unrelated text", position=7, has_interval=False),
    ),
    SummaryColumn(
        name="excess",
        kind="wide?",
        meaning="`recovery` minus `unrelated`",
        has_interval=True,
        terminal=Display(heading="excess", position=3, width=21, sign="+"),
        page=Display(heading="excess", position=3),
    ),
    SummaryColumn(
        name="excess_nats",
        kind="wide?",
        meaning="excess in nats a target, to compare models",
        has_interval=True,
        terminal=Display(
            heading="nats",
            position=7,
            width=6,
            has_interval=False,
            sign="+",
            where="without net excess",
        ),
    ),
    SummaryColumn(
        name="placebo",
        kind="wide?",
        meaning="excess at placebo targets",
        has_interval=True,
        of_placebo=True,
        page=Display(heading="placebo excess", position=4, has_interval=False),
    ),
    SummaryColumn(
        name="net",
        kind="wide?",
        meaning="`excess` minus `placebo`",
        has_interval=True,
        is_net=True,
        terminal=Display(heading="net", position=4, width=22, sign="+", where="with net excess"),
        page=Display(heading="net excess", position=1),
    ),
    SummaryColumn(
        name="net_equal",
        kind="wide?",
        meaning="the same, own targets weighted to the gaps of the placebo's targets",
        has_interval=True,
        is_net=True,
        terminal=Display(
            heading="equal gaps", position=5, width=22, sign="+", where="with net excess"
        ),
        page=Display(heading="net at equal gaps", position=2),
    ),
    SummaryColumn(
        name="net_nats",
        kind="wide?",
        meaning="net excess in nats a target, to compare models",
        has_interval=True,
        is_net=True,
    ),
    SummaryColumn(
        name="removal",
        kind="wide?",
        meaning="Σ (loss_without − loss_long) / Σ gap: what is lost without the k units",
        has_interval=True,
        terminal=Display(heading="removal", position=6, width=19, where="without net excess"),
        page=Display(heading="lost when removed", position=8),
    ),
    SummaryColumn(
        name="placebo_removal",
        kind="wide?",
        meaning="removal at placebo targets",
        has_interval=True,
        of_placebo=True,
        page=Display(heading="lost in the placebo", position=9, has_interval=False),
    ),
    SummaryColumn(
        name="mean_ratio",
        kind="wide?",
        meaning="the mean over targets of (loss_short − loss_set) / gap",
        page=Display(heading="mean of ratios", position=10),
    ),
    SummaryColumn(
        name="share_enough",
        kind="wide?",
        meaning="the share of targets where that ratio is at least 0.9",
        page=Display(heading="share of targets ≥ 0.9", position=11),
    ),
    SummaryColumn(
        name="lds",
        kind="wide?",
        meaning="mean of `lds` over targets",
        has_interval=True,
        page=Display(heading="LDS", position=14),
    ),
    SummaryColumn(
        name="distance",
        kind="wide?",
        meaning="median distance of the k units of all targets: tokens from a unit's first token "
        "to the target",
        came_later=True,
        terminal=Display(heading="back", position=8, width=6, digits=0),
        page=Display(heading="median distance, tokens", position=12),
    ),
    SummaryColumn(
        name="share_all",
        kind="wide?",
        meaning="the share of targets whose k units are all distant tokens: recovery is 1 there "
        "by construction",
        came_later=True,
        page=Display(heading="share with all distant tokens", position=13),
    ),
    SummaryColumn(name="gap", kind="wide", meaning="mean gap of the targets, in nats"),
    SummaryColumn(name="num_targets", kind="int", meaning="how many targets were evaluated"),
    SummaryColumn(name="num_documents", kind="int", meaning="in how many documents"),
    SummaryColumn(name="num_placebo_targets", kind="int", meaning="the placebo's targets"),
    SummaryColumn(name="num_placebo_documents", kind="int", meaning="in how many documents"),
    SummaryColumn(
        name="token_forwards_per_target",
        kind="wide?",
        meaning="cost of ranking; with the selector `shared` in `costs`, what all selectors share",
        page=Display(heading="token-forwards per target", position=15, digits=0),
    ),
)
"""In the order of the stored table."""

COLUMN = {column.name: column for column in SUMMARY}


def kinds_of_columns() -> dict[str, str]:
    """Return the type of each stored column of `summary`, those of interval ends included."""
    kinds: dict[str, str] = {}
    for column in SUMMARY:
        kinds |= dict.fromkeys(column.names, column.kind)
    return kinds


def later_columns() -> list[str]:
    """Return the stored columns that measurements of an earlier version lack."""
    names: list[str] = []
    for column in SUMMARY:
        if column.came_later:
            names += column.names
    return names


def terminal_columns(has_net: bool) -> list[tuple[SummaryColumn, Display]]:
    """Return the columns of a table in a terminal, in its order. `has_net`: whether net excess
    means something for its targets."""
    where = ("all", "with net excess" if has_net else "without net excess")
    shown = _in_order((column, column.terminal) for column in SUMMARY)
    return [(column, how) for column, how in shown if how.where in where]


def page_columns() -> list[tuple[SummaryColumn, Display]]:
    """Return the columns of a table of the page, from what to believe to what it cost."""
    return _in_order((column, column.page) for column in SUMMARY)


def _in_order(
    columns: Iterable[tuple[SummaryColumn, Display | None]],
) -> list[tuple[SummaryColumn, Display]]:
    shown = [(column, how) for column, how in columns if how is not None]
    return sorted(shown, key=lambda pair: pair[1].position)


_TYPES = {"text": "string", "int": "int32", "wide": "double"}


def documented() -> str:
    """Return the table of docs/measure.md. `x[]` is x with its interval, `?` may be null."""
    lines = ["| column of `summary` | type | meaning |", "|---|---|---|"]
    for column in SUMMARY:
        name = column.name
        if column.has_interval:
            name += "[]"
        kind = column.kind.removesuffix("?")
        if kind != column.kind:
            name += "?"
        meaning = column.meaning
        if column.end_names:
            meaning += f"; its interval is `{column.low}` and `{column.high}`"
        lines.append(f"| `{name}` | {_TYPES[kind]} | {meaning} |")
    return "\n".join(lines) + "\n"
