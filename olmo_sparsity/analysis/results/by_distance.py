"""Split recovery and excess of one row of the summary by how far back the chosen units are.

    row of the summary → ranked units with their distances → bins of powers of two → a table

Where the chosen units are says little: most places are far back, so random units are there, too.
What depends on a distance is the excess. The loss reduction by the k own units of a target is
divided among these in proportion to their influence; the loss reduction by the units of an
unrelated text is divided among those, at the distances where they are:

    L_short − L_k = 4 nats, k=2    unit 5 tokens back, influence 3    → 3 nats to the bin 4 to 7
                                   unit 20 tokens back, influence 1   → 1 nat to the bin 16 to 31

Both are summed by distance, and divided by the gap of all targets. For a bin b

    recovery_b = Σ_targets Σ_(units of the target in b) weight · (L_short − L_k)
                 / Σ_targets (L_short − L_long)

and the weights of a target's units add up to 1. So the bins of recovery, unrelated, excess, placebo
excess and net excess add up to the values of the row. Never imports torch.

Dimension key: P bins of distance, M documents, T targets, N items of a list (ranked units of all
targets). A bin has the distances from 2^power to 2^(power + 1) − 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.intervals import Bootstrapped, resample
from olmo_sparsity.analysis.results.pairing import join_by_target
from olmo_sparsity.analysis.results.reported import with_t_intervals
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.shown_columns import HEADINGS
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, KEYS, PLACEBO
from olmo_sparsity.analysis.results.target_sums import known_gap
from olmo_sparsity.analysis.results.view import format_number, spell, with_interval

RANDOM = "random"
"""The selector whose units show where there are units to choose."""


@dataclass(frozen=True)
class _BinRecovery:
    """The fraction of the gap of all targets that the units of one bin recover."""

    own: Bootstrapped
    """Recovery by units of the text that the targets were chosen by."""

    unrelated: Bootstrapped
    """Recovery by units of another text, as a control."""

    @property
    def excess(self) -> Bootstrapped:
        return self.own - self.unrelated


def split_by_distance(results: Results, row: Any) -> pd.DataFrame:
    """Return a line of a table for each power of two of the distance, from the nearest; an empty
    table if no units were ranked. `row` is a row of the summary. The columns are

        first, last                 the distances of the bin, in tokens from a unit's first token to
                                    the target
        share_units, share_random   the fraction of the chosen and of random units that are there
        recovery, unrelated         the fraction of the whole gap that they recover
        excess, placebo, net, …     as in the summary, of this bin
    """
    units = _first_k_units(results, row, selector=row["selector"])
    is_of_row = results.recovery.units == row["units"]
    is_of_row &= results.recovery.selector == row["selector"]
    is_of_row &= results.recovery.k == row["k"]
    recovery = results.recovery[is_of_row]
    if units.empty or recovery.empty:
        return pd.DataFrame()
    targets = results.targets[results.targets.target_set == row["target_set"]]
    target_rows = join_by_target(results.losses, targets, recovery, results.parts)
    random_units = _first_k_units(results, row, selector=RANDOM)

    # Bins from the nearest to the farthest unit of both selectors, which share a table.
    power_N = pd.concat([units.power, random_units.power])
    powers = range(int(power_N.min()), int(power_N.max()) + 1)

    lines = _lines_of_bins(target_rows, units, random_units, powers)
    return _with_intervals_as_reported(pd.DataFrame(lines), row)


def _lines_of_bins(
    target_rows: pd.DataFrame, units: pd.DataFrame, random_units: pd.DataFrame, powers: range
) -> list[dict[str, float]]:
    """Return the lines of the table, with bootstrap intervals of net excess.

    Args:
        target_rows: Rows of `join_by_target`.
        units: The units of `_first_k_units` that the selector chose.
        random_units: Those that were drawn at random.
        powers: The bins.
    """
    # Document and placebo targets are resampled together, as their difference is computed.
    documents = pd.Index(np.unique(target_rows.whole_document))
    document_rows = target_rows[target_rows.distant_part == DOCUMENT]
    placebo_rows = target_rows[target_rows.distant_part == PLACEBO]
    at_document_P = _recovery_by_bin(document_rows, units, powers, documents)
    at_placebo_P = _recovery_by_bin(placebo_rows, units, powers, documents)

    share_units_P = _fractions_of_units(units, powers)
    share_random_P = _fractions_of_units(random_units, powers)
    lines = []
    for index, power in enumerate(powers):
        at_document = at_document_P[index]
        at_placebo = at_placebo_P[index]
        net = at_document.excess - at_placebo.excess
        net_interval = net.interval()
        lines.append(
            {
                "first": 2**power,
                "last": 2 ** (power + 1) - 1,
                "share_units": share_units_P[index],
                "share_random": share_random_P[index],
                "recovery": at_document.own.value,
                "unrelated": at_document.unrelated.value,
                "excess": at_document.excess.value,
                "placebo": at_placebo.excess.value,
                "net": net.value,
                "net_low": net_interval.low,
                "net_high": net_interval.high,
            }
        )
    return lines


def _with_intervals_as_reported(bins: pd.DataFrame, row: Any) -> pd.DataFrame:
    """Return the bins with intervals of net excess as the row of the summary has them: stretched if
    its documents are few, and none if its targets are few."""
    # All bins have the documents of the row, by whose number intervals are stretched.
    counts = {name: row[name] for name in ("num_documents", "num_placebo_documents")}
    stretched = with_t_intervals(bins.assign(**counts)).drop(columns=list(counts))
    if pd.isna(row.get("net_low")):
        return stretched.assign(net_low=np.nan, net_high=np.nan)
    return stretched


def _first_k_units(results: Results, row: Any, selector: str) -> pd.DataFrame:
    """Return the first k units that a selector ranked for each target of a row of the summary, own
    and unrelated, with two more columns:

        power     the bin of the unit: the binary logarithm of its distance, rounded down
        weight    the fraction of the loss reduction by the k units that is assigned to it

    For a target with k = 3:

        distance   influence   power   weight
               5         3.0       2     0.75
              20         1.0       4     0.25
              40        −0.5       5     0.00     it raises the loss
    """
    targets = results.targets[results.targets.target_set == row["target_set"]]
    ranked = results.influence
    ranked = ranked[(ranked.units == row["units"]) & (ranked.selector == selector)]
    ranked = ranked[ranked["rank"] <= row["k"]]
    ranked = ranked.merge(targets[[*KEYS, "distant_part"]], on=[*KEYS, "distant_part"])

    # A unit that raises the loss takes no part in the loss reduction by the k.
    influence = ranked.influence.clip(lower=0)
    by_target = [*KEYS, "distant_part", "control"]
    influence_of_target = ranked.assign(influence=influence).groupby(by_target).influence
    total = influence_of_target.transform("sum")
    equal_weight = 1 / influence_of_target.transform("size")
    # Where no unit helps by itself, all count alike.
    weight = (influence / total.where(total > 0)).fillna(equal_weight)

    # At least 1, as 0 has no logarithm.
    distance = np.maximum(ranked.target - ranked.distant_first, 1)
    return ranked.assign(power=np.floor(np.log2(distance)).astype(int), weight=weight)


def _fractions_of_units(units: pd.DataFrame, powers: range) -> np.ndarray:
    """Return the fraction of the documents' own units that is in each bin; NaN if there are
    none."""
    is_own = (units.control == "own") & (units.distant_part == DOCUMENT)
    power_N = units.power[is_own].to_numpy()
    if not len(power_N):
        return np.full(len(powers), np.nan)
    return np.array([(power_N == power).mean() for power in powers])


def _recovery_by_bin(
    target_rows: pd.DataFrame, units: pd.DataFrame, powers: range, documents: pd.Index
) -> list[_BinRecovery]:
    """Return for each bin the loss reduction by its units, divided by the gap of all targets.

    Args:
        target_rows: Rows of `join_by_target` with one distant part.
        units: The units of `_first_k_units`.
        powers: The bins.
        documents: The documents that are resampled.
    """
    document_T = documents.get_indexer(target_rows.whole_document)
    own_MP = _reductions_by_bin(target_rows, "own", units, powers, documents)
    unrelated_MP = _reductions_by_bin(target_rows, "unrelated", units, powers, documents)
    gap_M = np.bincount(document_T, target_rows.gap, len(documents))
    num_targets_M = np.bincount(document_T, minlength=len(documents))

    # In one call, so that all sums have the same resamples, and in this order of columns.
    columns = np.column_stack([own_MP, unrelated_MP, gap_M, num_targets_M])
    *reductions, gap, num_targets = resample(columns)
    gap = known_gap(gap, num_targets)
    num_bins = len(powers)
    own_P = reductions[:num_bins]
    unrelated_P = reductions[num_bins:]
    return [
        _BinRecovery(own / gap, unrelated / gap)
        for own, unrelated in zip(own_P, unrelated_P, strict=True)
    ]


def _reductions_by_bin(
    target_rows: pd.DataFrame,
    control: Literal["own", "unrelated"],
    units: pd.DataFrame,
    powers: range,
    documents: pd.Index,
) -> np.ndarray:
    """Return reduction_MP, the loss reduction by the units of each bin in each document, in nats.
    All are NaN if it is not known for all targets.

    Args:
        target_rows: Rows of `join_by_target` with one distant part.
        control: Which units count.
        units: The units of `_first_k_units`.
        powers: The bins.
        documents: The documents of the rows of the result.
    """
    reduction = f"{control}_reduction"
    keys = [*KEYS, "distant_part"]
    ranked = units[units.control == control]
    ranked = ranked.merge(target_rows[[*keys, "whole_document", reduction]], on=keys)

    # A sum over the known targets alone would be smaller than that of all.
    is_known = len(ranked) > 0 and target_rows[reduction].notna().all()
    if not is_known:
        return np.full((len(documents), len(powers)), np.nan)
    reduction_MP = np.zeros((len(documents), len(powers)))
    document_N = documents.get_indexer(ranked.whole_document)
    bin_N = ranked.power - powers.start
    # Unlike `reduction_MP[…] += …`, this adds up all units of one document and bin: of 1.0 and 0.5
    # nats in the bin (0, 2) it makes 1.5, where `+=` would keep only one of them.
    np.add.at(reduction_MP, (document_N, bin_N), ranked.weight * ranked[reduction])
    return reduction_MP


# --- as a table for readers -----------------------------------------------------------------------


def describe_distances(row: Any) -> str:
    """Return the title of the table that splits a row by distance."""
    chosen = f"k = {row['k']} of {row['units']} by {spell(row['selector'])}"
    return f"how far back, {chosen}; the lines add up to the row"


def columns_of_distances(bins: pd.DataFrame) -> dict[str, list[str]]:
    """Return the table of `split_by_distance` as texts: heading → cells, a cell for each bin."""
    columns: dict[str, list[str]] = {}
    for line in bins.to_dict("records"):
        cells = {
            "tokens back": f"{line['first']:,} to {line['last']:,}",
            "units here": _percent(line["share_units"]),
            "random units": _percent(line["share_random"]),
            HEADINGS["recovery"]: format_number(line["recovery"], minus="-"),
            HEADINGS["unrelated"]: format_number(line["unrelated"], minus="-"),
            HEADINGS["excess"]: format_number(line["excess"], sign="+", minus="-"),
            HEADINGS["placebo"]: format_number(line["placebo"], sign="+", minus="-"),
            HEADINGS["net"]: with_interval(line["net"], line["net_low"], line["net_high"]),
        }
        for heading, cell in cells.items():
            columns.setdefault(heading, []).append(cell)
    return columns


def _percent(fraction: float) -> str:
    """Return a fraction in percent, or an en dash if there is none."""
    return "–" if pd.isna(fraction) else f"{fraction:.0%}"
