"""Compute recovery, excess, net excess and removal from the tables, with bootstrap intervals.

    losses, targets, recovery → `join_by_target` (pairing.py) → rows of targets
                                                              → `summarize_pairs` → summary

`summarize` does both steps; `as_reported` of reported.py then gives the intervals their final form.
For one row of the summary, the rows of its targets go through these steps:

    rows of targets → sums over documents, and over bootstrap resamples    (target_sums.py)
                    → ratios and differences of these sums
                    → a value with the ends of its interval

All losses are in nats. Sums are over the targets t of one target set; L_k is the loss with the
local window and k distant units:

    R_k = Σ_t (L_short − L_k) / Σ_t (L_short − L_long)    recovery, a ratio of sums
    E_k = R_k − R_k(unrelated)                            excess
    net = E_k − E_k(placebo)                              a test: above 0 beyond chance
    net_equal = the same at equal gaps                    targets weighted to the placebo's gaps
    removal_k = Σ_t (L_without − L_long) / Σ_t gap        the loss without the k

Two pairs of words tell what a number was computed from:

    document, placebo   which distant text the targets were chosen by: the document's own, or an
                        unrelated text in its place. The excess at placebo targets is the effect of
                        choosing targets by their outcome.
    own, unrelated      which units were ranked and added at a target: those of the text that it was
                        chosen by, or those of yet another text, as a control.

Recovery is a ratio of sums, not a mean of ratios, because single targets may have gaps near 0.
Intervals are 95% percentile bootstraps over documents, whose targets are not independent of each
other; parts of a document that was split are resampled together. Differences are resampled in
pairs. Never imports torch.

Dimension key: T targets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.columns import SUMMARY
from olmo_sparsity.analysis.results.intervals import Bootstrapped, resample
from olmo_sparsity.analysis.results.pairing import join_by_target
from olmo_sparsity.analysis.results.target_rows import (
    DOCUMENT,
    KEYS,
    PLACEBO,
    SplitDocuments,
    whole_documents,
)
from olmo_sparsity.analysis.results.target_sums import (
    NO_GAP_NATS,
    SUMMED,
    bootstrap_sums,
    documents_of,
    ratios_of_sums,
)
from olmo_sparsity.base.errors import DataError, check_type

ENOUGH = 0.9
"""Recovery from which k units are said to be enough."""

NUM_NEIGHBORS = 5
"""Each target of the placebo is compared with this many document targets of about its gap."""

RELIABILITY = "unrelated texts"
"""Rows of the table lds with this selector say how well halves of the unrelated texts agree."""

GROUPS = ["target_set", "units", "selector", "k"]
"""The columns that tell a row of the summary from others."""


class TargetRows(NamedTuple):
    """Rows of `join_by_target` that one row of the summary is computed from."""

    document: pd.DataFrame
    """Rows of targets that were chosen in their document's own distant context."""

    placebo: pd.DataFrame
    """Rows of targets that were chosen with an unrelated text in its place."""


# --- from the tables to a summary -----------------------------------------------------------------


def summarize(
    losses: pd.DataFrame,
    targets: pd.DataFrame,
    recovery: pd.DataFrame,
    split_documents: SplitDocuments | None = None,
) -> pd.DataFrame:
    """Return the summary of a measurement: one row for each target set, kind of units, selector and
    k.

    Args:
        losses: The table of losses.
        targets: The table of targets.
        recovery: The table of losses with chosen units.
        split_documents: The parts of documents that were split. The summary counts and resamples
            whole documents.
    """
    tables = {"losses": losses, "targets": targets, "recovery": recovery}
    for name, table in tables.items():
        check_type(name, table, pd.DataFrame, f"the table {name} of results, a DataFrame")
    # Each target has one row of losses. Twice the rows would be twice the weight.
    repeated = losses.duplicated(["document", "target"])
    if repeated.any():
        row = losses[repeated].iloc[0]
        raise DataError(
            f"losses: {repeated.sum()} rows are of targets that earlier rows have, the first of "
            f"document {row.document}, target {row.target}; pass each target once"
        )
    return summarize_pairs(join_by_target(losses, targets, recovery, split_documents))


def summarize_pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the summary of rows that `join_by_target` returned."""
    summary = []
    for group_values, target_rows in group_targets(rows).items():
        document_rows, placebo_rows = target_rows
        # A ratio for each target means something only if each has a gap.
        ratios = pd.Series(dtype=float)
        if document_rows.gap.min() >= NO_GAP_NATS:
            ratios = document_rows.own_reduction / document_rows.gap
        summary.append(
            {
                **dict(zip(GROUPS, group_values, strict=True)),
                "num_tokens": document_rows.num_tokens_own.mean(),
                **_stored_names(quantities_with_intervals(target_rows)),
                "mean_ratio": ratios.mean(),
                "share_enough": (ratios >= ENOUGH).mean(),
                "gap": document_rows.gap.mean(),
                "num_targets": len(document_rows),
                "num_documents": document_rows.whole_document.nunique(),
                "num_placebo_targets": len(placebo_rows),
                "num_placebo_documents": placebo_rows.whole_document.nunique(),
            }
        )
    return pd.DataFrame(summary)


def group_targets(rows: pd.DataFrame) -> dict[tuple, TargetRows]:
    """Return the rows of document and of placebo targets by the columns of `GROUPS`, for each group
    that has document targets."""
    document_rows = rows[rows.distant_part == DOCUMENT]
    placebo_rows = rows[rows.distant_part == PLACEBO]
    no_rows = placebo_rows[:0]  # for groups without a placebo: empty, but with the same columns
    placebo_groups = dict(list(placebo_rows.groupby(GROUPS)))
    return {
        group_values: TargetRows(group, placebo_groups.get(group_values, no_rows))
        for group_values, group in document_rows.groupby(GROUPS)
    }


def _stored_names(numbers: dict[str, float]) -> dict[str, float]:
    """Return the numbers under the names of the stored table, in which the ends of one interval
    have names of their own: `low` for `recovery_low`."""
    stored_name: dict[str, str] = {}
    for column in SUMMARY:
        if column.has_interval:
            stored_name[f"{column.name}_low"] = column.low
            stored_name[f"{column.name}_high"] = column.high
    return {stored_name.get(name, name): number for name, number in numbers.items()}


# --- the columns that have intervals --------------------------------------------------------------


def quantities_with_intervals(target_rows: TargetRows) -> dict[str, float]:
    """Compute the columns of a row of the summary that have intervals, such as recovery and net
    excess. Return each value under its name, and the ends of its interval under the name with
    `_low` and `_high`."""
    document_rows, placebo_rows = target_rows
    # A resample draws as many documents as are listed, so the list matters: numbers at document
    # targets need the documents of these alone, differences to the placebo those of both kinds.
    ratios = ratios_of_sums(bootstrap_sums(document_rows, documents_of(document_rows)))
    differences = placebo_and_net(target_rows, documents_of(document_rows, placebo_rows))
    placebo_recovery = {"placebo_recovery": _placebo_recovery(placebo_rows)}
    return with_intervals(ratios | differences | placebo_recovery)


def placebo_and_net(target_rows: TargetRows, documents: pd.Index) -> dict[str, Bootstrapped]:
    """Compute excess and removal at placebo targets, and net excess, which subtracts this excess.
    Return name → value.

    Args:
        target_rows: The rows of document and of placebo targets.
        documents: The documents of both, as one resample must draw the same for both.
    """
    document_rows, placebo_rows = target_rows
    # Placebo targets have other gaps than document targets, and excess may depend on the gap. So
    # `net_equal` compares them with document targets of about their gaps.
    weights_T = weights_of_equal_gaps(document_rows.gap, placebo_rows.gap)
    weighted_rows = document_rows.assign(**document_rows[SUMMED].mul(weights_T, axis=0))
    at_document = ratios_of_sums(bootstrap_sums(document_rows, documents))
    at_equal_gaps = ratios_of_sums(bootstrap_sums(weighted_rows, documents))
    at_placebo = ratios_of_sums(bootstrap_sums(placebo_rows, documents))
    return {
        # The column has had this name from the beginning: it is the excess at placebo targets.
        "placebo": at_placebo["excess"],
        "placebo_removal": at_placebo["removal"],
        "net": at_document["excess"] - at_placebo["excess"],
        "net_equal": at_equal_gaps["excess"] - at_placebo["excess"],
        "net_nats": at_document["excess_nats"] - at_placebo["excess_nats"],
    }


def weights_of_equal_gaps(document_gaps: pd.Series, placebo_gaps: pd.Series) -> np.ndarray:
    """Return a weight for each document target, such that weighted document targets have gaps about
    as large as the placebo's.

    Each placebo target spreads a weight of 1 over the `NUM_NEIGHBORS` document targets of about its
    gap. With three neighbours:

        document gaps          0.2   0.3   0.5   4.0   5.0
        placebo target 0.3     1/3   1/3   1/3
        placebo target 0.4           1/3   1/3   1/3
        weights                1/3   2/3   2/3   1/3     0
    """
    order = np.argsort(document_gaps.to_numpy(), kind="stable")
    num_targets = len(document_gaps)
    num_neighbors = min(NUM_NEIGHBORS, num_targets)

    # Ranks of the neighbours of each placebo target: half of them have smaller gaps, where there
    # are as many. In the example above, a placebo gap of 0.4 would be third, at rank 2; its
    # neighbours have the ranks 1, 2 and 3. One of 0.1 would be first, with the ranks 0, 1 and 2.
    rank_of_placebo = np.searchsorted(document_gaps.to_numpy()[order], placebo_gaps)
    first_rank = np.clip(rank_of_placebo - num_neighbors // 2, 0, num_targets - num_neighbors)
    ranks = first_rank[:, None] + np.arange(num_neighbors)
    return np.bincount(order[ranks].ravel(), minlength=num_targets) / num_neighbors


def _placebo_recovery(placebo_rows: pd.DataFrame) -> Bootstrapped:
    """Return the recovery at placebo targets by the best units of their unrelated text."""
    if placebo_rows.empty:
        return Bootstrapped(np.nan, np.empty(0))
    return ratios_of_sums(bootstrap_sums(placebo_rows, documents_of(placebo_rows)))["recovery"]


def with_intervals(values: dict[str, Bootstrapped]) -> dict[str, float]:
    """Return each value with the ends of its interval, under the name with `_low` and `_high`."""
    numbers: dict[str, float] = {}
    for name, bootstrapped in values.items():
        value, low, high = bootstrapped.interval()
        numbers |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return numbers


# --- the table lds --------------------------------------------------------------------------------


def mean_lds(
    targets: pd.DataFrame, lds: pd.DataFrame, split_documents: SplitDocuments | None = None
) -> pd.DataFrame:
    """Return the mean of the column `lds` over targets, with its interval: a row for each target
    set, kind of units and selector.

    Args:
        targets: The table of targets.
        lds: The table of linear datamodeling scores.
        split_documents: The parts of documents that were split, which are resampled together.
    """
    rows = []
    document_targets = targets[targets.distant_part == DOCUMENT].merge(lds, on=KEYS)
    for group_values, group in document_targets.groupby(["target_set", "units", "selector"]):
        whole_document = whole_documents(group.document, split_documents).to_numpy()
        sums_by_document = group.groupby(whole_document).lds.agg(["sum", "count"])
        lds_sum, num_targets = resample(sums_by_document)
        rows.append((*group_values, *(lds_sum / num_targets).interval()))
    columns = ["target_set", "units", "selector", "lds", "lds_low", "lds_high"]
    return pd.DataFrame(rows, columns=columns)
