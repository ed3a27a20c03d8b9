"""Split recovery and excess of one row of the summary by how far back the chosen units are.

Where the chosen units are says little: most places are far back, so random units are there, too.
What depends on a distance is the excess: of each target, the loss reduction by its own k units is
divided among these in proportion to their influence, and so is that by the units of an unrelated
text, at the distances where these are. Both are summed by distance, and divided by the gap of all
targets. So the bins of recovery, unrelated, excess, placebo excess and net excess add up to the
values of the row. Never imports torch.

Dimension key: B bins of distance, D documents, R all documents, then bootstrap resamples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.analysis.results.intervals import percentile_interval, resample
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.statistics import NO_GAP_NATS, pair, with_t_intervals
from olmo_sparsity.analysis.results.target_rows import KEYS

CONTROLS = ("own", "unrelated")

RANDOM = "random"
"""The selector whose units show where there are units to choose."""


def split_by_distance(results: Results, row: Any) -> pd.DataFrame:
    """Return a line for each power of two of the distance, from the nearest. `row`: a row of the
    summary. The columns:

    first, last: the distances of the bin, in tokens from a unit's first token to the target
    share_units, share_random: the share of the chosen and of random units that are there
    recovery, unrelated: their share of the whole gap
    excess, placebo, net, net_low, net_high: as in the summary, of this bin
    """
    names = {name: row[name] for name in ("units", "selector")}
    units = _ranked_units(results, row, **names)
    targets = results.targets[results.targets.target_set == row["target_set"]]
    is_row = (results.recovery[list(names)] == pd.Series(names)).all(axis=1)
    recovery = results.recovery[is_row & (results.recovery.k == row["k"])]
    if units.empty or recovery.empty:
        return pd.DataFrame()
    rows = pair(results.losses, targets, recovery)
    random = _ranked_units(results, row, units=row["units"], selector=RANDOM)
    power_N = pd.concat([units.power, random.power])
    powers = range(int(power_N.min()), int(power_N.max()) + 1)
    own, placebo = (rows[rows.distant_part == part] for part in ("document", "placebo"))
    documents = pd.Index(np.unique(rows.document))
    own_RB = _shares_of_gap(own, units, powers, documents)
    placebo_RB = _shares_of_gap(placebo, units, powers, documents)

    share_units = _shares_of_units(units, powers)
    share_random = _shares_of_units(random, powers)
    lines = []
    for index, power in enumerate(powers):
        excess_R = own_RB["own"][:, index] - own_RB["unrelated"][:, index]
        placebo_R = placebo_RB["own"][:, index] - placebo_RB["unrelated"][:, index]
        net_R = excess_R - placebo_R
        _, low, high = percentile_interval(net_R[1:], net_R[0])
        lines.append(
            {
                "first": 2**power,
                "last": 2 ** (power + 1) - 1,
                "share_units": share_units[index],
                "share_random": share_random[index],
                "recovery": own_RB["own"][0, index],
                "unrelated": own_RB["unrelated"][0, index],
                "excess": excess_R[0],
                "placebo": placebo_R[0],
                "net": net_R[0],
                "net_low": low,
                "net_high": high,
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
    """Return the first k units of each target, own and unrelated, with the `power` of two of their
    distance, and the `weight` of each among the k."""
    targets = results.targets[results.targets.target_set == row["target_set"]]
    ranked = results.influence
    ranked = ranked[(ranked.units == units) & (ranked.selector == selector)]
    ranked = ranked[ranked["rank"] <= row["k"]]
    ranked = ranked.merge(targets[[*KEYS, "distant_part"]], on=[*KEYS, "distant_part"])
    distance = np.maximum(ranked.target - ranked.distant_first, 1)
    influence = ranked.influence.clip(lower=0)
    by_target = [*KEYS, "distant_part", "control"]
    grouped = ranked.assign(influence=influence).groupby(by_target).influence
    total = grouped.transform("sum")
    # Where no unit helps by itself, all count alike.
    weight = (influence / total.where(total > 0)).fillna(1 / grouped.transform("size"))
    return ranked.assign(power=np.floor(np.log2(distance)).astype(int), weight=weight)


def _shares_of_units(units: pd.DataFrame, powers: range) -> np.ndarray:
    """Return the share of own units in each bin; NaN if there are none."""
    is_own = (units.control == "own") & (units.distant_part == "document")
    power_N = units.power[is_own].to_numpy()
    if not len(power_N):
        return np.full(len(powers), np.nan)
    return np.array([(power_N == power).mean() for power in powers])


def _shares_of_gap(
    rows: pd.DataFrame, units: pd.DataFrame, powers: range, documents: pd.Index
) -> dict[str, np.ndarray]:
    """Return the loss reduction by the units of each bin, divided by the gap of all targets: for
    own and unrelated units an array of all documents, then of each resample. `rows`: rows of
    `pair` of one kind of distant text."""
    document_T = documents.get_indexer(rows.document)
    shape = (len(documents), len(powers))
    sums = []
    for control in CONTROLS:
        reduction = rows[[*KEYS, "distant_part", control]]
        placed = units[units.control == control].merge(reduction, on=[*KEYS, "distant_part"])
        sums_DB = np.zeros(shape)
        place = (documents.get_indexer(placed.document), placed.power - powers.start)
        np.add.at(sums_DB, place, placed.weight * placed[control])
        if rows[control].isna().any() or not len(placed):
            sums_DB[:] = np.nan
        sums.append(sums_DB)
    gap_D = np.bincount(document_T, rows.gap, len(documents))
    targets_D = np.bincount(document_T, minlength=len(documents))
    sums_R = resample(np.column_stack([*sums, gap_D, targets_D]))
    gap_R = sums_R[:, -2]
    gap_R = np.where(gap_R >= NO_GAP_NATS * np.maximum(sums_R[:, -1], 1), gap_R, np.nan)
    shares = sums_R[:, :-2] / gap_R[:, None]
    return dict(zip(CONTROLS, np.split(shares, len(CONTROLS), axis=1), strict=True))
