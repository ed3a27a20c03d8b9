"""Sum targets over documents, and compute recovery, excess and removal from the sums.

    rows of `join_by_target` → `bootstrap_sums` → TargetSums
                             → `ratios_of_sums` → {"recovery": …, "excess": …}

Two documents with three targets, in nats:

    document  own_reduction  unrelated_reduction   gap
           1            2.0                  0.5   4.0
           1            1.0                  0.5   2.0
           3            1.5                  0.0   3.0      sums of all: 4.5, 1.0 and 9.0

    recovery = 4.5 / 9.0 = 0.50    unrelated = 1.0 / 9.0 = 0.11    excess = 0.39

Each sum is a `Bootstrapped` number (intervals.py): the sum over all documents, and over each
resample of them. So are the ratios, whose intervals follow. statistics.py explains the columns, and
by which targets and documents they are computed. Never imports torch.

Dimension key: M documents, T targets, Q values of an item (the sums in `TargetSums`), R resamples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.intervals import Bootstrapped, elementwise, resample

NO_GAP_NATS = 1e-4
"""Below this mean gap, ratios to it consist of rounding errors."""


class TargetSums(NamedTuple):
    """Sums over targets, of all documents and of each bootstrap resample. The fields are also the
    columns of `join_by_target` that are summed, in nats but for `weight`."""

    own_reduction: Bootstrapped
    """Σ (L_short − L_k): by how much the loss falls when the k own units are added."""

    unrelated_reduction: Bootstrapped
    """The same for the k units of an unrelated text."""

    removal_increase: Bootstrapped
    """Σ (L_without − L_long): by how much the loss rises when the k own units are removed."""

    gap: Bootstrapped
    """Σ (L_short − L_long)."""

    weight: Bootstrapped
    """The number of targets: each has a weight of 1, unless targets are weighted to equal gaps."""


SUMMED = list(TargetSums._fields)
"""The columns of `join_by_target` that are summed, in the order of `TargetSums`."""


def documents_of(*row_groups: pd.DataFrame) -> pd.Index:
    """Return the whole documents that have a target in any of these tables, each once. Documents
    that are resampled together must be listed together."""
    return pd.Index(np.unique(np.concatenate([rows.whole_document for rows in row_groups])))


def bootstrap_sums(rows: pd.DataFrame, documents: pd.Index) -> TargetSums:
    """Sum the columns of `SUMMED` over the targets of all documents, and over those of each
    resample.

    Args:
        rows: Rows of targets.
        documents: The documents to resample. Some may have no target in `rows`.
    """
    return TargetSums(*resample(_sums_by_document(rows, documents)))


def _sums_by_document(rows: pd.DataFrame, documents: pd.Index) -> np.ndarray:
    """Return sums_MQ: each column of `SUMMED`, summed over the targets of each document. A sum is 0
    for a document without targets, and NaN if it has targets, but no value of them is known.

        documents of three targets and their own_reduction    first 2.0, first 1.0, third NaN
        sums of the three documents                           3.0, 0.0, NaN
    """
    # `DataFrame.groupby` would take ten times as long.
    document_T = documents.get_indexer(rows.whole_document)  # the row of sums_MQ of each target
    sums = []
    for name in SUMMED:
        values_T = rows[name].to_numpy(float)
        is_known_T = ~np.isnan(values_T)
        known_values_T = np.where(is_known_T, values_T, 0.0)
        sums_M = np.bincount(document_T, known_values_T, len(documents)).astype(float)
        if not is_known_T.all():
            sums_M[np.setdiff1d(document_T, document_T[is_known_T])] = np.nan
        sums.append(sums_M)
    return np.stack(sums, axis=1)


def ratios_of_sums(sums: TargetSums) -> dict[str, Bootstrapped]:
    """Compute the columns that are ratios of sums over targets: name → value. Columns that are not,
    such as a median, belong in `quantities_with_intervals`."""
    gap = known_gap(sums.gap, sums.weight)
    # Both numbers come from the same resamples, so their difference has a paired interval.
    excess_nats = sums.own_reduction - sums.unrelated_reduction
    return {
        "recovery": sums.own_reduction / gap,
        "unrelated": sums.unrelated_reduction / gap,
        "excess": excess_nats / gap,
        "removal": sums.removal_increase / gap,
        "excess_nats": excess_nats / sums.weight,
    }


def known_gap(gap: Bootstrapped, num_targets: Bootstrapped) -> Bootstrapped:
    """Return the sum of gaps, with NaN in place of a sum of about 0 or below: there is nothing to
    recover then, and a ratio to it would be noise."""

    def gap_or_nan(gap_R: np.ndarray, num_targets_R: np.ndarray) -> np.ndarray:
        return np.where(gap_R >= NO_GAP_NATS * num_targets_R, gap_R, np.nan)

    return elementwise(gap_or_nan, gap, num_targets)
