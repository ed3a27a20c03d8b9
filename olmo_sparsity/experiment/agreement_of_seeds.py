"""Say in which signs the seeds of a comparison agree, as lines of `compare`.

    2 seeds: pose minus rope, long=960
      L_short - L_long: above 0 in all 2 seeds; 2 of 2 intervals exclude 0
      net at equal gaps, tokens, k=1: not the same sign: above 0 in 1 of 2 seeds; 0 of 2 …

Place in the flow: a comparison (comparisons.py), and the tables of its pairs →
**`describe_agreement`** → the command `compare` (command/compare.py), which prints the lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from olmo_sparsity.analysis.results.meta import main_set
from olmo_sparsity.experiment.comparisons import Comparison

NET_EQUAL = "net_equal"
"""The column whose sign seeds are to share: net excess at equal gaps, the strictest test of one
measurement."""

GAP = "mean_gap"
"""The column with the difference of L_short − L_long, which is the same in each row of a pair."""


def describe_agreement(comparison: Comparison, tables: Sequence[pd.DataFrame]) -> list[str]:
    """Return lines that say, for the mean gap and for each k, whether all seeds have the same sign,
    and how many intervals exclude 0. Only the rows that the figure draws count: those of the first
    selector, and of the main set of targets.

    Args:
        tables: What `compare_with_remarks` returned for each pair that is finished, one at least.
    """
    schemes = f"{comparison.first_scheme} minus {comparison.second_scheme}"
    seeds = f"{len(tables)} seeds"
    if len(tables) < len(comparison.pairs):
        seeds = f"{len(tables)} of {len(comparison.pairs)} seeds"
    lines = [f"{seeds}: {schemes}, long={comparison.long}"]

    # The gap is the same in each row of a table, so its first row stands for the seed.
    gaps = pd.concat([table.head(1) for table in tables])
    lines.append(f"  L_short - L_long: {_describe_signs(gaps, GAP)}")

    # All seeds below each other; grouping by k puts the same k of all seeds together.
    rows = pd.concat([_drawn_rows(table) for table in tables])
    rows = rows[rows[NET_EQUAL].notna()]
    if rows.empty:
        return [*lines, "  net at equal gaps: no value"]
    for (units, k), of_seeds in rows.groupby(["units", "k"], sort=False):
        signs = _describe_signs(of_seeds, NET_EQUAL)
        lines.append(f"  net at equal gaps, {units}, k={k}: {signs}")
    return lines


def _drawn_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the main target set and the first selector."""
    rows = table[table.target_set == main_set(table.target_set)]
    return rows[rows.selector == rows.selector.iloc[0]]


def _describe_signs(of_seeds: pd.DataFrame, column: str) -> str:
    """Return which signs the values of a column have, and how many of their intervals exclude 0.

    Args:
        of_seeds: One row of each seed.
        column: The column, which has an interval.
    """
    values = of_seeds[column]
    low = of_seeds[f"{column}_low"]
    high = of_seeds[f"{column}_high"]
    num_above = int((values > 0).sum())
    num_below = int((values < 0).sum())
    seeds = "the only seed" if len(values) == 1 else f"all {len(values)} seeds"
    if num_above == len(values):
        signs = f"above 0 in {seeds}"
    elif num_below == len(values):
        signs = f"below 0 in {seeds}"
    else:
        signs = f"not the same sign: above 0 in {num_above} of {len(values)} seeds"
    # An interval may be missing where too few documents were measured.
    num_intervals = int(low.notna().sum())
    num_excluding = int(((low > 0) | (high < 0)).sum())
    return f"{signs}; {num_excluding} of {num_intervals} intervals exclude 0"
