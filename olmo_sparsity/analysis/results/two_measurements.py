"""Compute differences and means of two measurements of the same text.

    net_differences   net excess of the first minus that of the second, such as of two models
    both_ways         the mean of two measurements in which two models evaluate each other's choices

A document that is easy for one model is mostly easy for the other. So a resample draws the same
documents for both measurements, which makes the interval of a difference narrower. Never imports
torch.
"""

from __future__ import annotations

import pandas as pd

from olmo_sparsity.analysis.results.columns import SUMMARY
from olmo_sparsity.analysis.results.statistics import (
    GROUPS,
    group_targets,
    placebo_and_net,
    with_intervals,
)
from olmo_sparsity.analysis.results.target_sums import bootstrap_sums, documents_of, ratios_of_sums
from olmo_sparsity.base.errors import DataError


def net_differences(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Return net excess of the first measurement minus that of the second: a row for each target
    set, units, selector and k that both have. Both arguments are rows of `join_by_target`."""
    first_groups = group_targets(first)
    second_groups = group_targets(second)
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
        documents = documents_of(*first_rows, *second_rows)
        first_values = placebo_and_net(first_rows, documents)
        second_values = placebo_and_net(second_rows, documents)
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
        differences.append(group | with_intervals(nets) | counts)
    return pd.DataFrame(differences)


def _smaller_num_targets(first: pd.DataFrame, second: pd.DataFrame) -> int:
    """Return the number of targets of the measurement that has fewer."""
    return min(len(first), len(second))


def _smaller_num_documents(first: pd.DataFrame, second: pd.DataFrame) -> int:
    """Return the number of documents with targets of the measurement that has fewer."""
    return min(first.document.nunique(), second.document.nunique())


def both_ways(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of two measurements in which each of two models evaluates what the other
    chose: a row for each target set, units, selector and k that both have. Both arguments are rows
    of `join_by_target`."""
    first_groups = group_targets(first)
    second_groups = group_targets(second)
    means = []
    for group_values in sorted(first_groups.keys() & second_groups.keys()):
        # Units that another model chose need no placebo: luck with the loss of one model is no luck
        # with that of another.
        first_rows = first_groups[group_values].document
        second_rows = second_groups[group_values].document
        documents = documents_of(first_rows, second_rows)
        first_ratios = ratios_of_sums(bootstrap_sums(first_rows, documents))
        second_ratios = ratios_of_sums(bootstrap_sums(second_rows, documents))
        mean_ratios = {
            name: (first_ratios[name] + second_ratios[name]) / 2 for name in first_ratios
        }
        counts = {
            "gap": (first_rows.gap.mean() + second_rows.gap.mean()) / 2,
            "num_targets": len(first_rows) + len(second_rows),
            "num_documents": len(documents),
        }
        group = dict(zip(GROUPS, group_values, strict=True))
        means.append(group | with_intervals(mean_ratios) | counts)
    return pd.DataFrame(means)
