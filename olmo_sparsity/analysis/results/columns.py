"""The columns of the table `summary`, in one list.

The schema of the stored table, the summary in a terminal, the table of the page and the table in
docs/measure.md are made from it, or checked against it. To add a column with an interval, add an
entry here and its computation to `statistics`. Imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SummaryColumn:
    """A column of `summary`, and two more with the ends of its interval if it has one."""

    name: str
    kind: str
    """Its type, as in `tables`: text, int or wide (double); with `?`, it may be null."""

    meaning: str
    """What docs/measure.md says of it."""

    has_interval: bool = False
    end_names: tuple[str, str] | None = None
    """Names of the ends, where these are not the column's name with `_low` and `_high`."""

    is_net: bool = False
    """The placebo's is subtracted, whose documents are few: with few documents its interval is
    stretched to Student's t."""

    of_placebo: bool = False
    """It is a number of placebo targets alone."""

    terminal: str = ""
    """Heading in a terminal; empty: it is not shown there."""

    page: str = ""
    """Heading on the page; empty: it is not shown there."""

    page_position: int = 0
    """Columns of the page are ordered by this number, from what to believe to what it cost."""

    page_interval: bool = True
    """Whether the page shows the interval, if there is one."""

    @property
    def low(self) -> str:
        return self.end_names[0] if self.end_names else f"{self.name}_low"

    @property
    def high(self) -> str:
        return self.end_names[1] if self.end_names else f"{self.name}_high"

    @property
    def names(self) -> tuple[str, ...]:
        """The stored columns."""
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
        end_names=("low", "high"),
        terminal="recovery",
        page="recovery",
        page_position=5,
    ),
    SummaryColumn(
        name="placebo_recovery",
        kind="wide?",
        meaning="recovery at placebo targets by the best units of their unrelated text",
        has_interval=True,
        of_placebo=True,
        terminal="placebo",
        page="placebo recovery",
        page_position=6,
        page_interval=False,
    ),
    SummaryColumn(
        name="unrelated",
        kind="wide?",
        meaning="recovery by the best units of an unrelated text",
        has_interval=True,
        page="unrelated text",
        page_position=7,
        page_interval=False,
    ),
    SummaryColumn(
        name="excess",
        kind="wide?",
        meaning="`recovery` minus `unrelated`",
        has_interval=True,
        terminal="excess",
        page="excess",
        page_position=3,
    ),
    SummaryColumn(
        name="excess_nats",
        kind="wide?",
        meaning="excess in nats a target, to compare models",
        has_interval=True,
        terminal="nats",
    ),
    SummaryColumn(
        name="placebo",
        kind="wide?",
        meaning="excess at placebo targets",
        has_interval=True,
        of_placebo=True,
        page="placebo excess",
        page_position=4,
        page_interval=False,
    ),
    SummaryColumn(
        name="net",
        kind="wide?",
        meaning="`excess` minus `placebo`",
        has_interval=True,
        is_net=True,
        terminal="net",
        page="net excess",
        page_position=1,
    ),
    SummaryColumn(
        name="net_equal",
        kind="wide?",
        meaning="the same, own targets weighted to the gaps of the placebo's targets",
        has_interval=True,
        is_net=True,
        terminal="equal gaps",
        page="net at equal gaps",
        page_position=2,
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
        terminal="removal",
        page="lost when removed",
        page_position=8,
    ),
    SummaryColumn(
        name="placebo_removal",
        kind="wide?",
        meaning="removal at placebo targets",
        has_interval=True,
        of_placebo=True,
        page="lost in the placebo",
        page_position=9,
        page_interval=False,
    ),
    SummaryColumn(
        name="mean_ratio",
        kind="wide?",
        meaning="the mean over targets of (loss_short − loss_set) / gap",
        page="mean of ratios",
        page_position=10,
    ),
    SummaryColumn(
        name="share_enough",
        kind="wide?",
        meaning="the share of targets where that ratio is at least 0.9",
        page="share of targets ≥ 0.9",
        page_position=11,
    ),
    SummaryColumn(
        name="lds",
        kind="wide?",
        meaning="mean of `lds` over targets",
        has_interval=True,
        page="LDS",
        page_position=14,
    ),
    SummaryColumn(
        name="distance",
        kind="wide?",
        meaning="median distance of the k units of all targets: tokens from a unit's first token "
        "to the target",
        terminal="back",
        page="median distance, tokens",
        page_position=12,
    ),
    SummaryColumn(
        name="share_all",
        kind="wide?",
        meaning="the share of targets whose k units are all distant tokens: recovery is 1 there "
        "by construction",
        page="share with all distant tokens",
        page_position=13,
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
        page="token-forwards per target",
        page_position=15,
    ),
)
"""In the order of the stored table."""

COLUMN = {column.name: column for column in SUMMARY}


def kinds_of_columns() -> dict[str, str]:
    """Return the type of each stored column of `summary`, those of interval ends included."""
    return {name: column.kind for column in SUMMARY for name in column.names}


def page_columns() -> list[SummaryColumn]:
    """Return the columns that the page shows, in its order."""
    return sorted((c for c in SUMMARY if c.page), key=lambda column: column.page_position)


def documented() -> str:
    """Return the table of docs/measure.md; [] marks a column with an interval."""
    lines = ["| column of `summary` | meaning |", "|---|---|"]
    for column in SUMMARY:
        name = f"`{column.name}[]`" if column.has_interval else f"`{column.name}`"
        meaning = column.meaning
        if column.end_names:
            meaning += f"; its interval is `{column.low}` and `{column.high}`"
        lines.append(f"| {name} | {meaning} |")
    return "\n".join(lines) + "\n"
