"""Compute where the chosen units are, and at how many targets they are all distant tokens.

These are the columns `distance` and `share_all` of the summary. With `long="all"` and `short=8`,
two targets and the first unit of each, for k = 1:

    target  distant_first  distance    num_tokens  distant tokens
        48             12        36             9              40
        16              0        16             8               8    all of them

    distance = 26, the median of 36 and 16       share_all = 0.5

stored_results.py adds them to a summary. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.results.statistics import GROUPS
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, KEYS
from olmo_sparsity.text.windows import Windows


def ranked_units_with_distance(targets: pd.DataFrame, influence: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each ranked unit of the documents' own distant context, in each target set
    of its target. The column `distance` is the number of tokens from the unit's first token to the
    target."""
    columns = [*KEYS, "units", "selector", "rank", "distant_first"]
    ranked = _with_target_sets(targets, influence, columns)
    return ranked.assign(distance=ranked.target - ranked.distant_first)


def median_distances(
    targets: pd.DataFrame, influence: pd.DataFrame, ks: Sequence[int]
) -> pd.DataFrame:
    """Return the median `distance` of the first k units of all targets, for each k and the other
    columns of `GROUPS`."""
    ranked = ranked_units_with_distance(targets, influence)
    groups_without_k = [name for name in GROUPS if name != "k"]
    medians_by_k = []
    for k in ks:
        # As an attribute, `ranked.rank` is the method of pandas.
        first_k = ranked[ranked["rank"] <= k]
        medians = first_k.groupby(groups_without_k).distance.median().reset_index()
        medians_by_k.append(medians.assign(k=k)[[*GROUPS, "distance"]])
    return pd.concat(medians_by_k, ignore_index=True)


def shares_with_all_distant(
    targets: pd.DataFrame, recovery: pd.DataFrame, windows: Mapping[str, Any]
) -> pd.DataFrame:
    """Return the fraction of targets whose k units hold all distant tokens, as the column
    `share_all`, by the columns of `GROUPS`. At such targets recovery is 1 whatever the units are.

    Args:
        targets: The table of targets.
        recovery: The table of losses with chosen units.
        windows: The section `windows` of meta.json.
    """
    columns = [*KEYS, "units", "selector", "k", "num_tokens"]
    rows = _with_target_sets(targets, recovery, columns)
    num_distant = _num_distant_tokens(rows.target, windows)
    rows = rows.assign(share_all=(rows.num_tokens >= num_distant).astype(float))
    return rows.groupby(GROUPS).share_all.mean().reset_index()


def _num_distant_tokens(targets: pd.Series, stored_windows: Mapping[str, Any]) -> pd.Series:
    """Return the number of distant tokens of each target: those before the local window of its
    block."""
    windows = Windows.from_stored(stored_windows)
    start = windows.start_of(targets)
    return start - windows.first_distant(start) - windows.short


def _with_target_sets(
    targets: pd.DataFrame, rows: pd.DataFrame, columns: list[str]
) -> pd.DataFrame:
    """Return the rows of the documents' own units, each once for every target set of its target.

    Args:
        targets: The table of targets.
        rows: The table influence or recovery.
        columns: The columns of it to return.
    """
    is_own = (rows.distant_part == DOCUMENT) & (rows.control == "own")
    document_targets = targets[targets.distant_part == DOCUMENT]
    target_sets = document_targets[[*KEYS, "target_set"]]
    return target_sets.merge(rows.loc[is_own, columns], on=KEYS)
