"""Hold the result of checking an explanation, and write it as a sentence, as text and as HTML.

    target      own    unrelated: d=0   d=1   d=2     own units are
    " Ayrton"   7.90              0.40  0.90  0.20    better than all three: depends on them
    " was"      0.30              0.10  0.50  0.20    no better than the second: may be chance

checking.py evaluates the targets and makes a `Check`, and `Explanation.check` returns it. The
terminal shows its `repr`, the page (page.py) its `note` and `html`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.report.texts_page import note
from olmo_sparsity.analysis.results.intervals import Interval
from olmo_sparsity.analysis.results.meta import InductionCheck
from olmo_sparsity.analysis.results.view import html_table, places, quoted, sentence


@dataclass(frozen=True, repr=False)
class Check:
    """How much k units of the text, and k units of unrelated texts, lower the losses of targets."""

    table: pd.DataFrame
    """A row for each target: target, end, text, gap, and

        own              by how many nats its k units lower its loss
        unrelated        by how many the k units of an unrelated text do: the mean over draws
        unrelated_most   the largest of these
        better           the number of draws that lower the loss at least as much as the own units
    """

    draws: int
    """The number of unrelated texts."""

    k: int
    excess: Interval
    """Own minus unrelated, in nats a target, with its 95% interval over draws. It holds for these
    targets only."""

    share: float
    """The excess as a share of the gap; NaN if distant tokens raise the loss of a target."""

    placebo: float | None
    """The excess of the targets that an unrelated text seems to help most. None if targets were
    named: only the choice by gap needs a placebo."""

    induction: InductionCheck

    apart: int
    """How many unrelated texts of this length the text to draw from holds without overlap. With
    fewer than `draws`, the draws overlap."""

    tables: dict[str, pd.DataFrame]
    """The tables of `recover`, with own distant tokens and with unrelated texts."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold, without the tables of `recover`."""
        values = vars(self) | {"table": self.table.to_dict("records")}
        return {name: value for name, value in values.items() if name != "tables"}

    # --- in words ---

    @property
    def num_beyond(self) -> int:
        """Return how many targets depend on their own units: distant tokens reduce their losses,
        and these units by more than those of any unrelated text."""
        # Own units that raise the loss may still be better than those of unrelated texts.
        is_reduced = (self.table.gap > 0) & (self.table.own > 0)
        return int((is_reduced & (self.table.better == 0)).sum())

    @property
    def verdict(self) -> str:
        """Return a sentence on how many targets depend on distant units."""
        text = (
            f"{self.num_beyond} of {len(self.table)} targets depend on distant units, which lower "
            "the loss more than those of any unrelated text"
        )
        num_raised = int((self.table.gap <= 0).sum())
        if num_raised:
            text += f"; at {num_raised} all distant tokens together raise the loss"
        return text

    @property
    def summary(self) -> str:
        """Return the excess with its interval, and the excess of the placebo, as text."""
        excess, low, high = self.excess
        text = f"excess {excess:+.2f} nats a target [{low:+.2f}, {high:+.2f}]"
        if np.isfinite(self.share):
            text += f", {self.share:.2f} of the gap"
        if self.placebo is not None:
            text += f"; of placebo targets {self.placebo:+.2f}: net {excess - self.placebo:+.2f}"
        return text

    @property
    def warning(self) -> str:
        """Return reasons to distrust the check, as text; empty if there are none."""
        reasons = []
        if self.apart < self.draws:
            reasons.append(
                f"the {self.draws} unrelated texts overlap: there is text for {self.apart}"
            )
        if not self.induction["has_induction"]:
            drop = self.induction["drop"] / max(self.induction["loss_first"], 1e-9)
            reasons.append(
                f"this model copies little from its context (a repeated passage costs {drop:.0%} "
                "less); such models mostly gain little from distant text"
            )
        return "; ".join(reasons)

    # --- as HTML and as text ---

    @property
    def note(self) -> str:
        """Return the verdict as HTML."""
        reasons = " ".join(sentence(text) for text in (self.summary, self.warning) if text)
        # Targets that were chosen by their gaps have an excess by this choice alone, as large as
        # the placebo's. Named targets have none.
        excess_by_chance = 0.0 if self.placebo is None else self.placebo
        is_good = self.num_beyond > 0 and self.excess.low > excess_by_chance
        return note(sentence(self.verdict), reasons, is_good=is_good)

    @property
    def html(self) -> str:
        """Return the table as HTML."""
        table = self.table
        columns = {
            "target": table.text.map(quoted),
            "where": map(places, table.target, table.end),
            "gap": table.gap,
            "own units": table.own,
            "unrelated": table.unrelated,
            "at most": table.unrelated_most,
            "do as well": [f"{num} of {self.draws}" for num in table.better],
        }
        caption = (
            f"Loss reduction in nats by {self.k} distant units, and by as many units of "
            f"{self.draws} unrelated texts, selected by the same rule"
        )
        return html_table(caption, columns, is_open=True)

    def __repr__(self) -> str:
        lines = [
            f"check: {self.draws} unrelated texts in place of the distant context, {self.k} units "
            "chosen in each by the same rule"
        ]
        for row in self.table.itertuples():
            lines.append(
                f"  {quoted(row.text)} ({places(row.target, row.end)}): own {row.own:+.2f} nats, "
                f"unrelated {row.unrelated:+.2f} (at most {row.unrelated_most:+.2f}); "
                f"{row.better} of {self.draws} do as well"
            )
        lines += [f"  {line}" for line in (self.summary, self.verdict, self.warning) if line]
        return "\n".join(lines)
