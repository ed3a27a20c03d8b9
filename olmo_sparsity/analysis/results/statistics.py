"""Compute recovery, excess, net excess and removal from the tables, with bootstrap intervals.

    losses, targets, recovery → `pair` → rows of targets → `summarize_pairs` → summary

`summarize` does both steps; `as_reported` of reported.py then gives the intervals their final form.
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

Dimension key: D documents, T targets, V values.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.columns import SUMMARY
from olmo_sparsity.analysis.results.intervals import Bootstrapped, elementwise, resample
from olmo_sparsity.analysis.results.target_rows import (
    DOCUMENT,
    KEYS,
    PLACEBO,
    Parts,
    distant_part_losses,
    losses_of_targets,
    whole_documents,
)
from olmo_sparsity.base.errors import DataError, check_type

ENOUGH = 0.9
"""Recovery from which k units are said to be enough."""

NUM_NEIGHBORS = 5
"""Each target of the placebo is compared with so many document targets of about its gap."""

NO_GAP_NATS = 1e-4
"""Below this mean gap, ratios to it consist of rounding errors."""

RELIABILITY = "unrelated texts"
"""Rows of the table lds with this selector say how well halves of the unrelated texts agree."""

GROUPS = ["target_set", "units", "selector", "k"]
"""The columns that tell a row of the summary from others."""


class TargetSums(NamedTuple):
    """Sums over targets, of all documents and of each bootstrap resample. The fields are also the
    columns of `pair` that are summed, in nats but for `weight`."""

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


class TargetRows(NamedTuple):
    """Rows of `pair` that one row of the summary is computed from."""

    document: pd.DataFrame
    """Rows of targets that were chosen in their document's own distant context."""

    placebo: pd.DataFrame
    """Rows of targets that were chosen with an unrelated text in its place."""


# --- from the tables to a summary -----------------------------------------------------------------


def summarize(
    losses: pd.DataFrame,
    targets: pd.DataFrame,
    recovery: pd.DataFrame,
    parts: Parts | None = None,
) -> pd.DataFrame:
    """Return one row for each target set, kind of units, selector and k. `parts`: of documents that
    were split; the summary counts and resamples whole documents."""
    tables = {"losses": losses, "targets": targets, "recovery": recovery}
    for name, table in tables.items():
        check_type(name, table, pd.DataFrame, f"the table {name} of results, a DataFrame")
    return summarize_pairs(pair(losses, targets, recovery, parts))


def pair(
    losses: pd.DataFrame,
    targets: pd.DataFrame,
    recovery: pd.DataFrame,
    parts: Parts | None = None,
) -> pd.DataFrame:
    """Join the tables: return a row for each target in each of its sets, kind of units, selector
    and k. Own and unrelated text have columns next to each other, such as `loss_set_own`, in which
    draws are averaged. The columns of `SUMMED` are added, and `whole_document`: the document that
    is resampled, which of a part is the whole."""
    row_keys = [*KEYS, "distant_part", "units", "selector", "k"]
    value_names = ["loss_set", "loss_without", "num_tokens"]
    # `pivot_table` takes the mean of several rows, here of several draws.
    sets = recovery.pivot_table(value_names, row_keys, "control")
    # Without controls the table has no unrelated text, but its columns are expected below.
    sets = sets.reindex(columns=list(product(value_names, ("own", "unrelated"))))
    sets.columns = ["_".join(column) for column in sets.columns]

    losses = distant_part_losses(losses_of_targets(losses, targets))
    sets = sets.reset_index().merge(losses, on=[*KEYS, "distant_part"])
    rows = targets.merge(sets, how="left", on=[*KEYS, "distant_part"])

    has_unrelated = recovery.control.eq("unrelated").any()
    if rows.loss_set_own.isna().any() or (has_unrelated and rows.loss_set_unrelated.isna().any()):
        raise DataError("the table recovery lacks rows of chosen targets; measure again elsewhere")
    # The column `gap`, which is summed as well, comes from `distant_part_losses`.
    return rows.assign(
        own_reduction=rows.loss_short - rows.loss_set_own,
        unrelated_reduction=rows.loss_short - rows.loss_set_unrelated,
        removal_increase=rows.loss_without_own - rows.loss_long,
        weight=1.0,
        whole_document=whole_documents(rows.document, parts),
    )


def summarize_pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the summary of rows that `pair` returned."""
    summary = []
    for group_values, target_rows in _group_targets(rows).items():
        document_rows, placebo_rows = target_rows
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


def _group_targets(rows: pd.DataFrame) -> dict[tuple, TargetRows]:
    """Return the rows of document and of placebo targets by the columns of `GROUPS`, for each group
    that has document targets."""
    document_rows = rows[rows.distant_part == DOCUMENT]
    placebo_rows = rows[rows.distant_part == PLACEBO]
    no_rows = placebo_rows[:0]
    placebo_groups = dict(list(placebo_rows.groupby(GROUPS)))
    return {
        group_values: TargetRows(group, placebo_groups.get(group_values, no_rows))
        for group_values, group in document_rows.groupby(GROUPS)
    }


def _stored_names(numbers: dict[str, float]) -> dict[str, float]:
    """Rename the ends of intervals to those that `summary` stores: `low` for `recovery_low`."""
    names: dict[str, str] = {}
    for column in SUMMARY:
        if column.has_interval:
            names |= {f"{column.name}_low": column.low, f"{column.name}_high": column.high}
    return {names.get(name, name): number for name, number in numbers.items()}


# --- the columns that have intervals --------------------------------------------------------------


def quantities_with_intervals(target_rows: TargetRows) -> dict[str, float]:
    """Compute recovery, excess, net excess and the like. Return each under its name, and the ends
    of its interval under the name with `_low` and `_high`."""
    document_rows, placebo_rows = target_rows
    ratios = ratios_of_sums(_bootstrap_sums(document_rows, _documents_of(document_rows)))
    differences = _placebo_and_net(target_rows, _documents_of(document_rows, placebo_rows))
    placebo_recovery = {"placebo_recovery": _placebo_recovery(placebo_rows)}
    return _with_intervals(ratios | differences | placebo_recovery)


def ratios_of_sums(sums: TargetSums) -> dict[str, Bootstrapped]:
    """Compute the ratios of sums over targets. Other statistics over targets, such as a median,
    belong in `quantities_with_intervals`."""
    gap = known_gap(sums.gap, sums.weight)
    excess_nats = sums.own_reduction - sums.unrelated_reduction
    return {
        "recovery": sums.own_reduction / gap,
        "unrelated": sums.unrelated_reduction / gap,
        "excess": excess_nats / gap,
        "removal": sums.removal_increase / gap,
        "excess_nats": excess_nats / sums.weight,
    }


def known_gap(gap: Bootstrapped, num_targets: Bootstrapped) -> Bootstrapped:
    """Return the sum of gaps, but NaN where it is about 0: there is nothing to recover, and a ratio
    to it would be noise."""

    def gap_or_nan(gap_R: np.ndarray, num_targets_R: np.ndarray) -> np.ndarray:
        return np.where(gap_R >= NO_GAP_NATS * num_targets_R, gap_R, np.nan)

    return elementwise(gap_or_nan, gap, num_targets)


def _placebo_and_net(target_rows: TargetRows, documents: pd.Index) -> dict[str, Bootstrapped]:
    """Compute excess and removal at placebo targets, and net excess, which subtracts this excess.

    `documents`: of both kinds of targets, as one resample must draw the same documents for both."""
    document_rows, placebo_rows = target_rows
    weights_T = weights_of_equal_gaps(document_rows.gap, placebo_rows.gap)
    weighted_rows = document_rows.assign(**document_rows[SUMMED].mul(weights_T, axis=0))
    at_document = ratios_of_sums(_bootstrap_sums(document_rows, documents))
    at_equal_gaps = ratios_of_sums(_bootstrap_sums(weighted_rows, documents))
    at_placebo = ratios_of_sums(_bootstrap_sums(placebo_rows, documents))
    return {
        # The column has had this name from the beginning: it is the excess at placebo targets.
        "placebo": at_placebo["excess"],
        "placebo_removal": at_placebo["removal"],
        "net": at_document["excess"] - at_placebo["excess"],
        "net_equal": at_equal_gaps["excess"] - at_placebo["excess"],
        "net_nats": at_document["excess_nats"] - at_placebo["excess_nats"],
    }


def weights_of_equal_gaps(document_gaps: pd.Series, placebo_gaps: pd.Series) -> np.ndarray:
    """Return a weight for each document target, such that weighted document targets have gaps as
    large as the placebo's. Each placebo target spreads a weight of 1 over the document targets of
    about its gap."""
    order = np.argsort(document_gaps.to_numpy(), kind="stable")
    num_targets = len(document_gaps)
    num_neighbors = min(NUM_NEIGHBORS, num_targets)

    # Ranks of the neighbours of each placebo target: half of them have smaller gaps, where there
    # are as many.
    rank_of_placebo = np.searchsorted(document_gaps.to_numpy()[order], placebo_gaps)
    first_rank = np.clip(rank_of_placebo - num_neighbors // 2, 0, num_targets - num_neighbors)
    ranks = first_rank[:, None] + np.arange(num_neighbors)
    return np.bincount(order[ranks].ravel(), minlength=num_targets) / num_neighbors


def _placebo_recovery(placebo_rows: pd.DataFrame) -> Bootstrapped:
    """Return the recovery at placebo targets by the best units of their unrelated text."""
    if placebo_rows.empty:
        return Bootstrapped(np.nan, np.empty(0))
    return ratios_of_sums(_bootstrap_sums(placebo_rows, _documents_of(placebo_rows)))["recovery"]


def _with_intervals(values: dict[str, Bootstrapped]) -> dict[str, float]:
    """Return each value with the ends of its interval, under the name with `_low` and `_high`."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        numbers |= zip((name, f"{name}_low", f"{name}_high"), value.interval(), strict=True)
    return numbers


# --- sums over documents --------------------------------------------------------------------------


def _documents_of(*row_groups: pd.DataFrame) -> pd.Index:
    """Return the whole documents of all rows, each once, as they are resampled together."""
    return pd.Index(np.unique(np.concatenate([rows.whole_document for rows in row_groups])))


def _bootstrap_sums(rows: pd.DataFrame, documents: pd.Index) -> TargetSums:
    """Sum the columns of `SUMMED` over the targets of all documents, and of each resample of
    `documents`. Documents may have no target in `rows`."""
    return TargetSums(*resample(_sums_by_document(rows, documents)))


def _sums_by_document(rows: pd.DataFrame, documents: pd.Index) -> np.ndarray:
    """Return sums_DV: each column of `SUMMED`, summed over the targets of each document. A sum is
    NaN if no value of the document is known."""
    # `DataFrame.groupby` takes ten times as long.
    document_T = documents.get_indexer(rows.whole_document)
    sums = []
    for name in SUMMED:
        values_T = rows[name].to_numpy(float)
        is_known_T = ~np.isnan(values_T)
        known_values_T = np.where(is_known_T, values_T, 0.0)
        sums_D = np.bincount(document_T, known_values_T, len(documents)).astype(float)
        if not is_known_T.all():
            sums_D[np.setdiff1d(document_T, document_T[is_known_T])] = np.nan
        sums.append(sums_D)
    return np.stack(sums, axis=1)


# --- two measurements -----------------------------------------------------------------------------


def net_differences(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Return net excess of the first measurement minus that of the second, from their rows of
    `pair`. Each document is resampled for both at once, which makes intervals narrower."""
    first_groups = _group_targets(first)
    second_groups = _group_targets(second)
    shared_groups = sorted(first_groups.keys() & second_groups.keys())
    if not shared_groups:
        raise DataError(
            "the two measurements share no target set, units, selector and k; measure both with "
            "the same options"
        )
    differences = []
    for group_values in shared_groups:
        first_rows = first_groups[group_values]
        second_rows = second_groups[group_values]
        documents = _documents_of(*first_rows, *second_rows)
        first_values = _placebo_and_net(first_rows, documents)
        second_values = _placebo_and_net(second_rows, documents)
        nets = {
            column.name: first_values[column.name] - second_values[column.name]
            for column in SUMMARY
            if column.is_net
        }
        # The measurement with fewer documents decides how wide Student's t makes the interval, and
        # the one with fewer targets whether there is an interval.
        counts = {
            "num_targets": _smaller_num_targets(first_rows.document, second_rows.document),
            "num_documents": _smaller_num_documents(first_rows.document, second_rows.document),
            "num_placebo_targets": _smaller_num_targets(first_rows.placebo, second_rows.placebo),
            "num_placebo_documents": _smaller_num_documents(
                first_rows.placebo, second_rows.placebo
            ),
        }
        group = dict(zip(GROUPS, group_values, strict=True))
        differences.append(group | _with_intervals(nets) | counts)
    return pd.DataFrame(differences)


def _smaller_num_targets(first: pd.DataFrame, second: pd.DataFrame) -> int:
    return min(len(first), len(second))


def _smaller_num_documents(first: pd.DataFrame, second: pd.DataFrame) -> int:
    return min(first.document.nunique(), second.document.nunique())


def both_ways(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of two measurements in which each of two models evaluates what the other
    chose, from their rows of `pair`. Each document is resampled for both at once."""
    first_groups = _group_targets(first)
    second_groups = _group_targets(second)
    means = []
    for group_values in sorted(first_groups.keys() & second_groups.keys()):
        # What another model chose needs no placebo.
        first_rows = first_groups[group_values].document
        second_rows = second_groups[group_values].document
        documents = _documents_of(first_rows, second_rows)
        first_ratios = ratios_of_sums(_bootstrap_sums(first_rows, documents))
        second_ratios = ratios_of_sums(_bootstrap_sums(second_rows, documents))
        mean_ratios = {
            name: (first_ratios[name] + second_ratios[name]) / 2 for name in first_ratios
        }
        counts = {
            "gap": (first_rows.gap.mean() + second_rows.gap.mean()) / 2,
            "num_targets": len(first_rows) + len(second_rows),
            "num_documents": len(documents),
        }
        group = dict(zip(GROUPS, group_values, strict=True))
        means.append(group | _with_intervals(mean_ratios) | counts)
    return pd.DataFrame(means)


# --- the table lds --------------------------------------------------------------------------------


def mean_lds(targets: pd.DataFrame, lds: pd.DataFrame, parts: Parts | None = None) -> pd.DataFrame:
    """Return the mean `lds` over targets with its interval, for each target set, kind of units and
    selector. `parts`: of documents that were split, which are resampled whole."""
    rows = []
    document_targets = targets[targets.distant_part == DOCUMENT].merge(lds, on=KEYS)
    for group_values, group in document_targets.groupby(["target_set", "units", "selector"]):
        whole_document = whole_documents(group.document, parts).to_numpy()
        sums_by_document = group.groupby(whole_document).lds.agg(["sum", "count"])
        lds_sum, num_targets = resample(sums_by_document)
        rows.append((*group_values, *(lds_sum / num_targets).interval()))
    columns = ["target_set", "units", "selector", "lds", "lds_low", "lds_high"]
    return pd.DataFrame(rows, columns=columns)
