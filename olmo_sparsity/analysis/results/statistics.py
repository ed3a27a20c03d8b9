"""Compute recovery, excess, net excess and removal from the tables, with bootstrap intervals.

    losses, targets, recovery → `pair` → rows of targets → `summarize_pairs` → summary

`summarize` does both steps; `as_reported` then gives the intervals their final form. Sums are over
the targets t of one target set; L_k is the loss with the local window and k distant units:

    R_k = Σ_t (L_short − L_k) / Σ_t (L_short − L_long)    recovery, a ratio of sums
    E_k = R_k − R_k(unrelated)                            excess
    net = E_k − E_k(placebo)                              a test: above 0 beyond chance
    net_equal = the same at equal gaps                    own targets weighted to the placebo's gaps
    removal_k = Σ_t (L_without − L_long) / Σ_t gap        the loss without the k

The placebo is the same procedure with an unrelated text in place of the distant tokens: its excess
is the effect of choosing targets by their outcome. Recovery is a ratio of sums, not a mean of
ratios, because single targets may have gaps near 0. Intervals are 95% percentile bootstraps over
documents, whose targets are not independent of each other. Differences are resampled in pairs.
Intervals of net excess over few documents are by Student's t. Never imports torch.

Dimension key: D documents, T targets, V values, R all documents, then bootstrap resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.columns import SUMMARY
from olmo_sparsity.analysis.results.intervals import (
    Interval,
    percentile_interval,
    resample,
    width_ratio,
)
from olmo_sparsity.analysis.results.target_rows import KEYS, distant_part_losses, losses_of_targets
from olmo_sparsity.base.errors import DataError, check_type
from olmo_sparsity.text.windows import Windows

INDUCTION_SHARE = 0.15
"""A model copies from its context if a passage, when it is repeated, costs it less by at least this
share. A share has the same meaning for any text and vocabulary; nats have not. Of the stored models
those that do not copy have 0.10 at most, those that do 0.17 or more."""

LSD_NATS = 2.0
LCL_NATS = 2.0
"""LongPPL (Fang et al. 2024): a token is key if the long context lowers its loss by more than
`LSD_NATS`, to below `LCL_NATS`."""

MIN_TARGETS = 10
MIN_DOCUMENTS = 5
"""With fewer targets, or targets in fewer documents, no interval and no verdict is reported: the
bootstrap of one target has no width, and that of four documents covers far less than 95%."""

STUDENT = "student"
"""The key `intervals` of a `meta.json` whose summary has the intervals that `as_reported`
returned."""

ENOUGH = 0.9
"""Recovery from which k units are said to be enough."""

NUM_NEIGHBORS = 5
"""Each target of the placebo is compared with so many own targets of about its gap."""

NO_GAP_NATS = 1e-4
"""Below this mean gap, ratios to it consist of rounding errors."""

RELIABILITY = "unrelated texts"
"""Rows of the table lds with this selector say how well halves of the unrelated texts agree."""

GROUPS = ["target_set", "units", "selector", "k"]
"""The columns that tell a row of the summary from others."""

SUMMED = ["own", "unrelated", "removed", "gap", "targets"]
"""Columns of `pair` that are summed over targets: the loss reduction by units of the own text and
of an unrelated one, the loss increase without the own units, the gap, and 1 for each target."""


def summarize(losses: pd.DataFrame, targets: pd.DataFrame, recovery: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each target set, kind of units, selector and k."""
    tables = {"losses": losses, "targets": targets, "recovery": recovery}
    for name, table in tables.items():
        check_type(name, table, pd.DataFrame, f"the table {name} of results, a DataFrame")
    return summarize_pairs(pair(losses, targets, recovery))


def summarize_pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the summary of rows that `pair` returned."""
    summary = []
    for names, (own, placebo) in _own_and_placebo(rows).items():
        ratios = own.own / own.gap if own.gap.min() >= NO_GAP_NATS else pd.Series(dtype=float)
        summary.append(
            {
                **dict(zip(GROUPS, names, strict=True)),
                "num_tokens": own.num_tokens_own.mean(),
                **_stored_names(quantities_with_intervals(own, placebo)),
                "mean_ratio": ratios.mean(),
                "share_enough": (ratios >= ENOUGH).mean(),
                "gap": own.gap.mean(),
                "num_targets": len(own),
                "num_documents": own.document.nunique(),
                "num_placebo_targets": len(placebo),
                "num_placebo_documents": placebo.document.nunique(),
            }
        )
    return pd.DataFrame(summary)


def _stored_names(numbers: dict[str, float]) -> dict[str, float]:
    """Rename the ends of intervals to those that `summary` stores: `low` for `recovery_low`."""
    names: dict[str, str] = {}
    for column in SUMMARY:
        if column.has_interval:
            names |= {f"{column.name}_low": column.low, f"{column.name}_high": column.high}
    return {names.get(name, name): number for name, number in numbers.items()}


def pair(losses: pd.DataFrame, targets: pd.DataFrame, recovery: pd.DataFrame) -> pd.DataFrame:
    """Join the tables: return a row for each target in each of its sets, kind of units, selector
    and k. Own and unrelated text have columns next to each other, such as `loss_set_own`, in which
    draws are averaged. The columns of `SUMMED` are added."""
    row_keys = [*KEYS, "distant_part", "units", "selector", "k"]
    value_names = ["loss_set", "loss_without", "num_tokens"]
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
    return rows.assign(
        own=rows.loss_short - rows.loss_set_own,
        unrelated=rows.loss_short - rows.loss_set_unrelated,
        removed=rows.loss_without_own - rows.loss_long,
        targets=1.0,
    )


def quantities_with_intervals(own: pd.DataFrame, placebo: pd.DataFrame) -> dict[str, float]:
    """Compute recovery, excess, net excess and the like of rows of `pair`. Return each under its
    name, and the ends of its interval under the name with `_low` and `_high`."""
    values = _quantities(_sums(own, _documents_of(own)))
    beyond = _beyond_placebo(own, placebo, _documents_of(own, placebo))
    return _with_intervals(values | beyond) | _placebo_recovery(placebo)


def net_differences(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Return net excess of the first measurement minus that of the second, from their rows of
    `pair`. Each document is resampled for both at once, which makes intervals narrower."""
    first_groups = _own_and_placebo(first)
    second_groups = _own_and_placebo(second)
    shared = sorted(first_groups.keys() & second_groups.keys())
    if not shared:
        raise DataError(
            "the two measurements share no target set, units, selector and k; measure both with "
            "the same options"
        )
    differences = []
    for names in shared:
        first_own, first_placebo = first_groups[names]
        second_own, second_placebo = second_groups[names]
        documents = _documents_of(first_own, first_placebo, second_own, second_placebo)
        first_R = _beyond_placebo(first_own, first_placebo, documents)
        second_R = _beyond_placebo(second_own, second_placebo, documents)
        nets = {
            column.name: first_R[column.name] - second_R[column.name]
            for column in SUMMARY
            if column.is_net
        }
        # The measurement with fewer documents decides how wide Student's t makes the interval, and
        # the one with fewer targets whether there is an interval.
        counts = {
            "num_targets": min(len(first_own), len(second_own)),
            "num_documents": min(first_own.document.nunique(), second_own.document.nunique()),
            "num_placebo_targets": min(len(first_placebo), len(second_placebo)),
            "num_placebo_documents": min(
                first_placebo.document.nunique(), second_placebo.document.nunique()
            ),
        }
        group = dict(zip(GROUPS, names, strict=True))
        differences.append(group | _with_intervals(nets) | counts)
    return pd.DataFrame(differences)


def both_ways(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of two measurements in which each of two models evaluates what the other
    chose, from their rows of `pair`. Each document is resampled for both at once."""
    first_groups = _own_and_placebo(first)
    second_groups = _own_and_placebo(second)
    means = []
    for names in sorted(first_groups.keys() & second_groups.keys()):
        first_own, _ = first_groups[names]
        second_own, _ = second_groups[names]
        documents = _documents_of(first_own, second_own)
        first_R = _quantities(_sums(first_own, documents))
        second_R = _quantities(_sums(second_own, documents))
        mean = {name: (first_R[name] + second_R[name]) / 2 for name in first_R}
        counts = {
            "gap": (first_own.gap.mean() + second_own.gap.mean()) / 2,
            "num_targets": len(first_own) + len(second_own),
            "num_documents": len(documents),
        }
        group = dict(zip(GROUPS, names, strict=True))
        means.append(group | _with_intervals(mean) | counts)
    return pd.DataFrame(means)


class _Targets(NamedTuple):
    """Rows of `pair` that one row of the summary is computed from."""

    own: pd.DataFrame
    placebo: pd.DataFrame


def _own_and_placebo(rows: pd.DataFrame) -> dict[tuple, _Targets]:
    """Return the rows of own and of placebo targets by the columns of `GROUPS`, for each group that
    has own targets."""
    own = rows[rows.distant_part == "document"]
    placebo = rows[rows.distant_part == "placebo"]
    placebo_groups = dict(list(placebo.groupby(GROUPS)))
    return {
        names: _Targets(group, placebo_groups.get(names, placebo[:0]))
        for names, group in own.groupby(GROUPS)
    }


def _documents_of(*rows: pd.DataFrame) -> pd.Index:
    """Return the documents of all rows, each once, as they are resampled together."""
    return pd.Index(np.unique(np.concatenate([group.document for group in rows])))


def _beyond_placebo(
    own: pd.DataFrame, placebo: pd.DataFrame, documents: pd.Index
) -> dict[str, np.ndarray]:
    """Compute the placebo's excess and removal, and net excess, which subtracts it: each as an
    array with the value over all documents first, then one for each resample."""
    weights_T = weights_of_equal_gaps(own.gap, placebo.gap)
    weighted_own = own.assign(**own[SUMMED].mul(weights_T, axis=0))
    own_R = _quantities(_sums(own, documents))
    equal_R = _quantities(_sums(weighted_own, documents))
    placebo_R = _quantities(_sums(placebo, documents))
    return {
        "placebo": placebo_R["excess"],
        "placebo_removal": placebo_R["removal"],
        "net": own_R["excess"] - placebo_R["excess"],
        "net_equal": equal_R["excess"] - placebo_R["excess"],
        "net_nats": own_R["excess_nats"] - placebo_R["excess_nats"],
    }


def _sums(rows: pd.DataFrame, documents: pd.Index) -> np.ndarray:
    """Return sums_DV: each column of `SUMMED`, summed over the targets of each document. A sum is
    NaN if no value of the document is known."""
    # `DataFrame.groupby` takes ten times as long.
    document_T = documents.get_indexer(rows.document)
    sums = []
    for name in SUMMED:
        values_T = rows[name].to_numpy(float)
        known_T = ~np.isnan(values_T)
        known_values_T = np.where(known_T, values_T, 0.0)
        sums_D = np.bincount(document_T, known_values_T, len(documents)).astype(float)
        if not known_T.all():
            sums_D[np.setdiff1d(document_T, document_T[known_T])] = np.nan
        sums.append(sums_D)
    return np.stack(sums, axis=1)


def _with_intervals(values: dict[str, np.ndarray]) -> dict[str, float]:
    """Return each value with the ends of its interval, under the name with `_low` and `_high`. An
    array holds the value over all documents first, then one for each resample."""
    numbers: dict[str, float] = {}
    for name, values_R in values.items():
        names = (name, f"{name}_low", f"{name}_high")
        numbers |= zip(names, percentile_interval(values_R[1:], values_R[0]), strict=True)
    return numbers


def weights_of_equal_gaps(own: pd.Series, placebo: pd.Series) -> np.ndarray:
    """Return a weight for each own target, such that weighted own targets have gaps as large as the
    placebo's. `own`, `placebo`: the gaps. Each placebo target spreads a weight of 1 over the own
    targets of about its gap."""
    order = np.argsort(own.to_numpy(), kind="stable")
    num_neighbors = min(NUM_NEIGHBORS, len(own))

    # Ranks of the neighbours of each placebo target: half of them have smaller gaps, where there
    # are as many.
    rank_of_placebo = np.searchsorted(own.to_numpy()[order], placebo)
    first_rank = np.clip(rank_of_placebo - num_neighbors // 2, 0, len(own) - num_neighbors)
    ranks = first_rank[:, None] + np.arange(num_neighbors)
    return np.bincount(order[ranks].ravel(), minlength=len(own)) / num_neighbors


def _quantities(sums_DV: np.ndarray) -> dict[str, np.ndarray]:
    """Compute ratios of sums: each as an array with the value over all documents first, then one
    for each resample. `sums_DV`: what `_sums` returns. A statistic over targets, such as a median,
    is no such ratio, and belongs in `quantities_with_intervals`."""
    own_R, unrelated_R, removed_R, gap_R, targets_R = resample(sums_DV).T
    with np.errstate(divide="ignore", invalid="ignore"):
        # Without a gap there is nothing to recover, and a ratio to it would be noise.
        gap_R = np.where(gap_R >= NO_GAP_NATS * targets_R, gap_R, np.nan)
        return {
            "recovery": own_R / gap_R,
            "unrelated": unrelated_R / gap_R,
            "excess": (own_R - unrelated_R) / gap_R,
            "removal": removed_R / gap_R,
            "excess_nats": (own_R - unrelated_R) / targets_R,
        }


def with_t_intervals(summary: pd.DataFrame) -> pd.DataFrame:
    """Return the summary with wider intervals of net excess where few documents have targets:
    stretched from those of a normal distribution to Student's t."""
    if "num_placebo_documents" not in summary:
        return summary.copy()
    stretch = summary[["num_documents", "num_placebo_documents"]].min(axis=1).map(width_ratio)
    ends = {}
    for column in SUMMARY:
        if column.is_net and column.low in summary:
            value = summary[column.name]
            for end in (column.low, column.high):
                ends[end] = value + stretch * (summary[end] - value)
    return summary.assign(**ends)


def as_reported(summary: pd.DataFrame) -> pd.DataFrame:
    """Return the summary with the intervals that are stored and shown: those of net excess by
    Student's t where documents are few, and none for fewer than `MIN_TARGETS` targets in
    `MIN_DOCUMENTS` documents."""
    if summary.empty:
        return summary
    return without_few_intervals(with_t_intervals(summary))


def without_few_intervals(summary: pd.DataFrame) -> pd.DataFrame:
    """Return the summary without intervals in rows of fewer than `MIN_TARGETS` targets or
    `MIN_DOCUMENTS` documents."""
    summary = summary.copy()
    has_few = has_few_targets(summary)
    placebo_has_few = has_few_targets(summary, "placebo_")
    for column in SUMMARY:
        is_few = placebo_has_few if column.is_of_placebo else has_few
        if column.is_net:
            is_few = has_few | placebo_has_few
        # In a table of `both_ways` the ends of recovery are named like those of other columns.
        for end in (column.low, column.high, f"{column.name}_low", f"{column.name}_high"):
            if column.has_interval and end in summary:
                summary[end] = summary[end].mask(is_few)
    # Weights to the gaps of a handful of targets mean nothing, so that the value goes, too.
    if "net_equal" in summary:
        summary["net_equal"] = summary.net_equal.mask(has_few | placebo_has_few)
    return summary


def has_few_targets(summary: pd.DataFrame, of_placebo: str = "") -> pd.Series:
    """Return for each row whether it has too few targets for an interval. `of_placebo`: empty, or
    `placebo_` to count those of the placebo."""
    has_few = pd.Series(False, summary.index)
    # A comparison of two measurements lacks some of these columns.
    for counted, minimum in (("documents", MIN_DOCUMENTS), ("targets", MIN_TARGETS)):
        name = f"num_{of_placebo}{counted}"
        if name in summary:
            has_few |= summary[name] < minimum
    return has_few


def distances(targets: pd.DataFrame, influence: pd.DataFrame) -> pd.DataFrame:
    """Return a row with a `distance` for each ranked unit, in each target set of its target: the
    number of tokens from the unit's first token to the target. The units are those of the
    document's own distant context."""
    is_own = (influence.distant_part == "document") & (influence.control == "own")
    columns = [*KEYS, "units", "selector", "rank", "distant_first"]
    own_targets = targets[targets.distant_part == "document"]
    ranked = own_targets[[*KEYS, "target_set"]].merge(influence.loc[is_own, columns], on=KEYS)
    return ranked.assign(distance=ranked.target - ranked.distant_first)


def median_distances(
    targets: pd.DataFrame, influence: pd.DataFrame, ks: Sequence[int]
) -> pd.DataFrame:
    """Return the median `distance` of the first k units of all targets, for each k and the other
    columns of `GROUPS`."""
    ranked = distances(targets, influence)
    parts = []
    for k in ks:
        first = ranked[ranked["rank"] <= k]
        medians = first.groupby(GROUPS[:3]).distance.median().reset_index()
        parts.append(medians.assign(k=k)[[*GROUPS, "distance"]])
    return pd.concat(parts, ignore_index=True)


def shares_of_all(
    targets: pd.DataFrame, recovery: pd.DataFrame, windows: Mapping[str, Any]
) -> pd.DataFrame:
    """Return the share of targets whose k units hold all distant tokens, by the columns of
    `GROUPS`. There recovery is 1 whatever the units are. `windows`: the section of meta.json."""
    lengths = {name: windows[name] for name in ("long", "short", "stride")}
    cut = Windows(**lengths, most=windows.get("most"), least=windows.get("least", 1))
    is_own = (recovery.distant_part == "document") & (recovery.control == "own")
    columns = [*KEYS, "units", "selector", "k", "num_tokens"]
    own_targets = targets[targets.distant_part == "document"]
    rows = own_targets[[*KEYS, "target_set"]].merge(recovery.loc[is_own, columns], on=KEYS)
    start = cut.start_of(rows.target)
    num_distant = start - cut.first_distant(start) - cut.short
    rows = rows.assign(share_all=(rows.num_tokens >= num_distant).astype(float))
    return rows.groupby(GROUPS).share_all.mean().reset_index()


def mean_lds(targets: pd.DataFrame, lds: pd.DataFrame) -> pd.DataFrame:
    """Return the mean `lds` over targets with its interval, for each target set, kind of units and
    selector."""
    rows = []
    own = targets[targets.distant_part == "document"].merge(lds, on=KEYS)
    for names, group in own.groupby(["target_set", "units", "selector"]):
        sums = group.groupby("document").lds.agg(["sum", "count"])
        sum_R, count_R = resample(sums).T
        mean_R = sum_R / count_R
        rows.append((*names, *percentile_interval(mean_R[1:], mean_R[0])))
    columns = ["target_set", "units", "selector", "lds", "lds_low", "lds_high"]
    return pd.DataFrame(rows, columns=columns)


def longppl(losses: pd.DataFrame) -> dict[str, float | int | None]:
    """Return LongPPL, the perplexity of key tokens, and the perplexity of all targets. Both are
    over all targets together; the authors' package averages within each text."""
    gap = losses.loss_short - losses.loss_long
    key_losses = losses.loss_long[(gap > LSD_NATS) & (losses.loss_long < LCL_NATS)]
    largest_exponent = 700  # the exponential of a larger one overflows a double
    return {
        "key_share": len(key_losses) / len(losses),
        "num_key_tokens": len(key_losses),
        "longppl": float(np.exp(key_losses.mean())) if len(key_losses) else None,
        "ppl": float(np.exp(min(losses.loss_long.mean(), largest_exponent))),
    }


def _placebo_recovery(placebo: pd.DataFrame) -> dict[str, float]:
    """Return the recovery at placebo targets, with the ends of its interval."""
    if placebo.empty:
        return _with_intervals({"placebo_recovery": np.full(1, np.nan)})
    quantities = _quantities(_sums(placebo, _documents_of(placebo)))
    return _with_intervals({"placebo_recovery": quantities["recovery"]})


def mean_gap(losses: pd.DataFrame) -> Interval:
    """Return the mean of L_short − L_long over all tokens, in nats, and its interval over
    documents."""
    gaps = (losses.loss_short - losses.loss_long).astype(float)
    sums = pd.DataFrame({"gap": gaps, "tokens": 1.0}).groupby(losses.document.to_numpy()).sum()
    gap_R, tokens_R = resample(sums).T
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_R = gap_R / tokens_R
    return percentile_interval(mean_R[1:], mean_R[0])
