"""Declare the columns of the table `summary`: what is stored.

    SummaryColumn(name="excess", type=FLOAT64.or_null, meaning="`recovery` minus `unrelated`",
                  has_interval=True)          → the columns excess, excess_low and excess_high

The schema of the stored table (schemas.py), the explanations on the page and the table in
docs/measure.md are made from `SUMMARY`, or compared with it. shown_columns.py says which of these
columns a terminal and a page show.

To add a column with an interval, add an entry to `SUMMARY`, one to `TERMINAL` or `PAGE` of
shown_columns.py if readers should see it, and its computation to `statistics`: to `ratios_of_sums`
if it is a ratio of the sums in `TargetSums`, else to `quantities_with_intervals`. A new sum is a
field of `TargetSums` and a column of `join_by_target`. This module imports nothing of the project.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class ColumnType:
    """The type of a column of a stored table."""

    name: Literal["text", "bool", "int32", "int64", "float32", "float64"]
    is_nullable: bool = False
    """Whether a value may be absent. NaN is stored as absent."""

    @property
    def or_null(self) -> ColumnType:
        """Return the same type for a column whose values may be absent."""
        return replace(self, is_nullable=True)


TEXT = ColumnType("text")
BOOL = ColumnType("bool")
INT32 = ColumnType("int32")
INT64 = ColumnType("int64")
FLOAT32 = ColumnType("float32")
FLOAT64 = ColumnType("float64")


@dataclass(frozen=True, kw_only=True)
class SummaryColumn:
    """A column of `summary`, and two more with the ends of its interval if it has one."""

    name: str
    type: ColumnType
    meaning: str
    """Explanation of the column, on the page and in docs/measure.md."""

    has_interval: bool = False
    end_names: tuple[str, str] | None = None
    """Names of the ends, where these are not the column's name with `_low` and `_high`."""

    is_net: bool = False
    """Whether the placebo's value is subtracted. Few documents have placebo targets, so that the
    interval is stretched to Student's t."""

    is_of_placebo: bool = False
    """Whether it is computed from placebo targets alone."""

    came_later: bool = False
    """Whether measurements of an earlier version do not store it. It is then computed from their
    other tables when they are read."""

    @property
    def low(self) -> str:
        """Return the name of the column with the lower end of the interval."""
        return self.end_names[0] if self.end_names else f"{self.name}_low"

    @property
    def high(self) -> str:
        """Return the name of the column with the upper end of the interval."""
        return self.end_names[1] if self.end_names else f"{self.name}_high"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the stored columns: its own, and those of the ends."""
        return (self.name, self.low, self.high) if self.has_interval else (self.name,)


SUMMARY = (
    SummaryColumn(name="target_set", type=TEXT, meaning="how the targets were chosen"),
    SummaryColumn(name="units", type=TEXT, meaning="the kind of distant units"),
    SummaryColumn(name="selector", type=TEXT, meaning="the rule that ranked the units"),
    SummaryColumn(name="k", type=INT32, meaning="how many of the first units are added"),
    SummaryColumn(name="num_tokens", type=FLOAT64, meaning="mean number of tokens in the k units"),
    SummaryColumn(
        name="recovery",
        type=FLOAT64.or_null,
        meaning="Σ (loss_short − loss_set) / Σ gap: a ratio of sums",
        has_interval=True,
        # Named before other columns had intervals; the names of stored tables stay.
        end_names=("low", "high"),
    ),
    SummaryColumn(
        name="placebo_recovery",
        type=FLOAT64.or_null,
        meaning="recovery at placebo targets by the best units of their unrelated text",
        has_interval=True,
        is_of_placebo=True,
        came_later=True,
    ),
    SummaryColumn(
        name="unrelated",
        type=FLOAT64.or_null,
        meaning="recovery by the best units of an unrelated text",
        has_interval=True,
    ),
    SummaryColumn(
        name="excess",
        type=FLOAT64.or_null,
        meaning="`recovery` minus `unrelated`",
        has_interval=True,
    ),
    SummaryColumn(
        name="excess_nats",
        type=FLOAT64.or_null,
        meaning="excess in nats a target, to compare models",
        has_interval=True,
    ),
    SummaryColumn(
        name="placebo",
        type=FLOAT64.or_null,
        meaning="excess at placebo targets",
        has_interval=True,
        is_of_placebo=True,
    ),
    SummaryColumn(
        name="net",
        type=FLOAT64.or_null,
        meaning="`excess` minus `placebo`",
        has_interval=True,
        is_net=True,
    ),
    SummaryColumn(
        name="net_equal",
        type=FLOAT64.or_null,
        meaning="the same, own targets weighted to the gaps of the placebo's targets",
        has_interval=True,
        is_net=True,
    ),
    SummaryColumn(
        name="net_nats",
        type=FLOAT64.or_null,
        meaning="net excess in nats a target, to compare models",
        has_interval=True,
        is_net=True,
    ),
    SummaryColumn(
        name="removal",
        type=FLOAT64.or_null,
        meaning="Σ (loss_without − loss_long) / Σ gap: what is lost without the k units",
        has_interval=True,
    ),
    SummaryColumn(
        name="placebo_removal",
        type=FLOAT64.or_null,
        meaning="removal at placebo targets",
        has_interval=True,
        is_of_placebo=True,
    ),
    SummaryColumn(
        name="mean_ratio",
        type=FLOAT64.or_null,
        meaning="the mean over targets of (loss_short − loss_set) / gap",
    ),
    SummaryColumn(
        name="share_enough",
        type=FLOAT64.or_null,
        meaning="the share of targets where that ratio is at least 0.9",
    ),
    SummaryColumn(
        name="lds",
        type=FLOAT64.or_null,
        meaning="mean of `lds` over targets",
        has_interval=True,
    ),
    SummaryColumn(
        name="distance",
        type=FLOAT64.or_null,
        meaning="median distance of the k units of all targets: tokens from a unit's first token "
        "to the target",
        came_later=True,
    ),
    SummaryColumn(
        name="share_all",
        type=FLOAT64.or_null,
        meaning="the share of targets whose k units are all distant tokens: recovery is 1 there "
        "by construction",
        came_later=True,
    ),
    SummaryColumn(name="gap", type=FLOAT64, meaning="mean gap of the targets, in nats"),
    SummaryColumn(name="num_targets", type=INT32, meaning="how many targets were evaluated"),
    SummaryColumn(name="num_documents", type=INT32, meaning="in how many documents"),
    SummaryColumn(name="num_placebo_targets", type=INT32, meaning="the placebo's targets"),
    SummaryColumn(name="num_placebo_documents", type=INT32, meaning="in how many documents"),
    SummaryColumn(
        name="token_forwards_per_target",
        type=FLOAT64.or_null,
        meaning="cost of ranking; with the selector `shared` in `costs`, what all selectors share",
    ),
)
"""In the order of the stored table."""


def column_named(name: str) -> SummaryColumn:
    """Return the entry of `SUMMARY` with this name."""
    return next(column for column in SUMMARY if column.name == name)


def types_of_columns() -> dict[str, ColumnType]:
    """Return the type of each stored column of `summary`, those of interval ends included."""
    types: dict[str, ColumnType] = {}
    for column in SUMMARY:
        types |= dict.fromkeys(column.names, column.type)
    return types


def later_columns() -> list[str]:
    """Return the stored columns that measurements of an earlier version lack."""
    names: list[str] = []
    for column in SUMMARY:
        if column.came_later:
            names += column.names
    return names


_TYPES_OF_DOCS = {"text": "string", "int32": "int32", "float64": "double"}
"""Types as Parquet's tools print them."""


def documentation_table() -> str:
    """Return the table of docs/measure.md. There `x[]` is a column with its interval, and `x?` a
    column that may be null."""
    lines = ["| column of `summary` | type | meaning |", "|---|---|---|"]
    for column in SUMMARY:
        name = column.name
        if column.has_interval:
            name += "[]"
        if column.type.is_nullable:
            name += "?"
        meaning = column.meaning
        if column.end_names:
            meaning += f"; its interval is `{column.low}` and `{column.high}`"
        lines.append(f"| `{name}` | {_TYPES_OF_DOCS[column.type.name]} | {meaning} |")
    return "\n".join(lines) + "\n"
