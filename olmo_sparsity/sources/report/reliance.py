"""Say whether an answer relies on a source, for `assert attribution.relies_on("faq.md")`.

Place in the flow: `Attribution.relies_on` (attribution.py) → **a `Reliance`**, which is true or
false, and which pytest prints if the assertion fails:

    expected: faq.md; found: statement 0, 'It opened in 1921.', relies on report.pdf (4.1 nats)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

import numpy as np
import pandas as pd

from olmo_sparsity.base.errors import printable
from olmo_sparsity.sources.report.table_rows import StatementRow

MAX_SHOWN = 3
"""Largest number of statements that a failed assertion shows: pytest prints 240 characters of an
object."""


@dataclass(frozen=True)
class Reliance:
    """True or false, with what was expected and found."""

    holds: bool
    explanation: str
    """What was expected and found, as `describe_reliance` returns it."""

    def __bool__(self) -> bool:
        return self.holds

    def __repr__(self) -> str:
        return self.explanation


def describe_reliance(expected: str, rows: pd.DataFrame, relies: Sequence[bool]) -> str:
    """Return what was expected and what was found, such as "expected: faq.md; found: statement 0,
    'It opened in 1921.', relies on bridge.txt (9.2 nats); 2 more".

    Args:
        expected: The name of a source, or "no source".
        rows: Statements that were asked about, from `Attribution.statements`.
        relies: Whether each of them relies on that source. If no source is expected, whether it
            relies on any.
    """
    # Those statements come first that decide the assertion, as not all are shown.
    order = np.argsort(np.logical_not(relies), kind="stable")
    shown = [_describe_row(row) for row in rows.iloc[order[:MAX_SHOWN]].itertuples()]
    if len(rows) > MAX_SHOWN:
        shown.append(f"{len(rows) - MAX_SHOWN} more")
    return printable(f"expected: {expected}; found: {'; '.join(shown)}")


def _describe_row(row: StatementRow) -> str:
    """Return the verdict on a statement in a few words."""
    if row.kind == "undecided":
        verdict = "is undecided"
    else:
        conjunction = {"either": " or ", "both": " and "}.get(row.kind, "")
        verdict = f"relies on {conjunction.join(row.sources) or 'no source'}"
    # Little of the text, as pytest cuts what is long.
    text = shorten(row.text, 24, placeholder="…")
    return f"statement {row.Index}, '{text}', {verdict} ({row.nats:.1f} nats)"
