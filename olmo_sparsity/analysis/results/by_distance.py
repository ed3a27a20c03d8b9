"""Split recovery and excess of one row of the summary by how far back the chosen units are.

    row of the summary → ranked units with their distances → bins of powers of two → a table

Where the chosen units are says little: most places are far back, so random units are there, too.
What depends on a distance is the excess. The loss reduction by the k own units of a target is
divided among these in proportion to their influence; the loss reduction by the units of an
unrelated text is divided among those, at the distances where they are:

    L_short − L_k = 4 nats, k=2    unit 5 tokens back, influence 3    → 3 nats to the bin 4 to 7
                                   unit 20 tokens back, influence 1   → 1 nat to the bin 16 to 31

Both are summed by distance, and divided by the gap of all targets. So the bins of recovery,
unrelated, excess, placebo excess and net excess add up to the values of the row. Never imports
torch.

Dimension key: B bins of distance, D documents, N ranked units of all targets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.intervals import Bootstrapped, resample
from olmo_sparsity.analysis.results.pairing import pair
from olmo_sparsity.analysis.results.reported import with_t_intervals
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.statistics import known_gap
from olmo_sparsity.analysis.results.target_rows import DOCUMENT, KEYS, PLACEBO
from olmo_sparsity.analysis.results.view import format_number, spell, with_interval

RANDOM = "random"
"""The selector whose units show where there are units to choose."""


class _BinShares(NamedTuple):
    """The fraction of the gap of all targets that the units of each bin recover."""

    own_B: list[Bootstrapped]
    """Units of the text that the targets were chosen by."""

    unrelated_B: list[Bootstrapped]
    """Units of another text, as a control."""


def split_by_distance(results: Results, row: Any) -> pd.DataFrame:
    """Return a row of a table for each power of two of the distance, from the nearest; an empty
    table if no units were ranked. `row`: a row of the summary. The columns:

        first, last                 the distances of the bin, in tokens from a unit's first token to
                                    the target
        share_units, share_random   the fraction of the chosen and of random units that are there
        recovery, unrelated         the fraction of the whole gap that they recover
        excess, placebo, net, …     as in the summary, of this bin
    """
    units = _ranked_units(results, row, units=row["units"], selector=row["selector"])
    recovery = results.recovery
    is_row = (recovery.units == row["units"]) & (recovery.selector == row["selector"])
    recovery = recovery[is_row & (recovery.k == row["k"])]
    if units.empty or recovery.empty:
        return pd.DataFrame()
    targets = results.targets[results.targets.target_set == row["target_set"]]
    rows = pair(results.losses, targets, recovery, results.parts)
    random_units = _ranked_units(results, row, units=row["units"], selector=RANDOM)

    # Bins from the nearest to the farthest unit, of both selectors, so that both fit into one
    # table.
    power_N = pd.concat([units.power, random_units.power])
    powers = range(int(power_N.min()), int(power_N.max()) + 1)
    # Document and placebo targets are resampled together, as their difference is computed.
    documents = pd.Index(np.unique(rows.whole_document))
    document_rows = rows[rows.distant_part == DOCUMENT]
    placebo_rows = rows[rows.distant_part == PLACEBO]
    at_document = _shares_of_gap(document_rows, units, powers, documents)
    at_placebo = _shares_of_gap(placebo_rows, units, powers, documents)

    share_units_B = _shares_of_units(units, powers)
    share_random_B = _shares_of_units(random_units, powers)
    lines = []
    for index, power in enumerate(powers):
        excess = at_document.own_B[index] - at_document.unrelated_B[index]
        placebo_excess = at_placebo.own_B[index] - at_placebo.unrelated_B[index]
        net = excess - placebo_excess
        net_interval = net.interval()
        lines.append(
            {
                "first": 2**power,
                "last": 2 ** (power + 1) - 1,
                "share_units": share_units_B[index],
                "share_random": share_random_B[index],
                "recovery": at_document.own_B[index].estimate,
                "unrelated": at_document.unrelated_B[index].estimate,
                "excess": excess.estimate,
                "placebo": placebo_excess.estimate,
                "net": net.estimate,
                "net_low": net_interval.low,
                "net_high": net_interval.high,
            }
        )
    table = pd.DataFrame(lines)
    counts = {name: row[name] for name in ("num_documents", "num_placebo_documents")}
    table = with_t_intervals(table.assign(**counts)).drop(columns=list(counts))
    if pd.isna(row.get("net_low")):
        # The row has too few targets for an interval, and so has each bin.
        table[["net_low", "net_high"]] = np.nan
    return table


def _ranked_units(results: Results, row: Any, units: str, selector: str) -> pd.DataFrame:
    """Return the first k units of each target of a row of the summary, own and unrelated.

    The column `power` says in which bin a unit is: the distance, rounded down to a power of two.
    `weight` is the fraction of the loss reduction by the k units that is assigned to it.
    """
    targets = results.targets[results.targets.target_set == row["target_set"]]
    ranked = results.influence
    ranked = ranked[(ranked.units == units) & (ranked.selector == selector)]
    ranked = ranked[ranked["rank"] <= row["k"]]
    ranked = ranked.merge(targets[[*KEYS, "distant_part"]], on=[*KEYS, "distant_part"])

    # A unit that raises the loss takes no part in the loss reduction by the k.
    influence = ranked.influence.clip(lower=0)
    by_target = [*KEYS, "distant_part", "control"]
    grouped = ranked.assign(influence=influence).groupby(by_target).influence
    total = grouped.transform("sum")
    # Where no unit helps by itself, all count alike.
    weight = (influence / total.where(total > 0)).fillna(1 / grouped.transform("size"))
    distance = np.maximum(ranked.target - ranked.distant_first, 1)
    return ranked.assign(power=np.floor(np.log2(distance)).astype(int), weight=weight)


def _shares_of_units(units: pd.DataFrame, powers: range) -> np.ndarray:
    """Return the fraction of the documents' own units that is in each bin; NaN if there are
    none."""
    is_own = (units.control == "own") & (units.distant_part == DOCUMENT)
    power_N = units.power[is_own].to_numpy()
    if not len(power_N):
        return np.full(len(powers), np.nan)
    return np.array([(power_N == power).mean() for power in powers])


def _shares_of_gap(
    rows: pd.DataFrame, units: pd.DataFrame, powers: range, documents: pd.Index
) -> _BinShares:
    """Divide the loss reduction by the units of each bin by the gap of all targets.

    Args:
        rows: Rows of `pair` with one kind of distant context.
        units: The units of `_ranked_units`.
        powers: The bins.
        documents: The documents that are resampled.
    """
    document_T = documents.get_indexer(rows.whole_document)
    own_DB = _reductions_by_bin(rows, "own", units, powers, documents)
    unrelated_DB = _reductions_by_bin(rows, "unrelated", units, powers, documents)
    gap_D = np.bincount(document_T, rows.gap, len(documents))
    num_targets_D = np.bincount(document_T, minlength=len(documents))

    columns = np.column_stack([own_DB, unrelated_DB, gap_D, num_targets_D])
    *reductions, gap, num_targets = resample(columns)
    gap = known_gap(gap, num_targets)
    shares = [reduction / gap for reduction in reductions]
    num_bins = len(powers)
    return _BinShares(own_B=shares[:num_bins], unrelated_B=shares[num_bins:])


def _reductions_by_bin(
    rows: pd.DataFrame, control: str, units: pd.DataFrame, powers: range, documents: pd.Index
) -> np.ndarray:
    """Return reduction_DB, the loss reduction by the units of each bin in each document, in nats.
    All are NaN if it is not known for all targets. `control`: `own` or `unrelated` units."""
    name = f"{control}_reduction"
    keys = [*KEYS, "distant_part"]
    placed = units[units.control == control].merge(rows[[*keys, "whole_document", name]], on=keys)
    reduction_DB = np.zeros((len(documents), len(powers)))
    document_N = documents.get_indexer(placed.whole_document)
    bin_N = placed.power - powers.start
    np.add.at(reduction_DB, (document_N, bin_N), placed.weight * placed[name])
    is_known = len(placed) > 0 and rows[name].notna().all()
    if not is_known:
        reduction_DB[:] = np.nan
    return reduction_DB


# --- as a table for readers -----------------------------------------------------------------------

SPLIT = ("recovery", "unrelated", "excess", "placebo", "net")
"""Columns of the summary that are split by distance."""


def describe_distances(row: Any) -> str:
    """Return the title of the table that splits a row by distance."""
    what = f"k = {row['k']} of {row['units']} by {spell(row['selector'])}"
    return f"how far back, {what}; the lines add up to the row"


def cells_of_distances(bins: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return the table of `split_by_distance` as texts, a tuple for each line."""
    lines = []
    for part in bins.to_dict("records"):
        shares = [
            "–" if pd.isna(part[name]) else f"{part[name]:.0%}"
            for name in ("share_units", "share_random")
        ]
        values = [format_number(part[name], minus="-") for name in ("recovery", "unrelated")]
        values += [format_number(part[name], sign="+", minus="-") for name in ("excess", "placebo")]
        net = with_interval(part["net"], part["net_low"], part["net_high"])
        place = f"{part['first']:,} to {part['last']:,}"
        lines.append((place, *shares, *values, net))
    return lines
