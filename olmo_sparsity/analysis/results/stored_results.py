"""Read a finished measurement from its folder.

    results/mine/   manifest, meta.json, summary.parquet, targets.parquet, …  (`FILES`)
        → `read_results`: is it a measurement, finished and undamaged?
        → tables and meta.json
        → `complete_summary`: the columns that an earlier version did not store
        → Results

`summing_up.py` of measurement completes a new summary by the same function. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import pandas as pd

from olmo_sparsity.analysis.results.chosen_units import median_distances, shares_with_all_distant
from olmo_sparsity.analysis.results.columns import later_columns
from olmo_sparsity.analysis.results.meta import Meta
from olmo_sparsity.analysis.results.reported import STUDENT, as_reported, without_few_intervals
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.results.schemas import SCHEMAS
from olmo_sparsity.analysis.results.statistics import GROUPS, summarize
from olmo_sparsity.analysis.results.tables import absent_columns, read_table
from olmo_sparsity.base.errors import DataError, check_type
from olmo_sparsity.base.files import read_json
from olmo_sparsity.base.manifest import MANIFEST, find_damage, read_entries
from olmo_sparsity.base.path_options import path_of
from olmo_sparsity.base.renamed import with_current_names

FILES = ("meta.json", *(f"{name}.parquet" for name in SCHEMAS))
"""The files of a finished measurement, which its manifest lists."""

REMEDY = "the same `olmo-sparsity measure` command makes it again; or copy the complete folder"
"""What an error advises to do about a damaged measurement."""


def read_results(folder: str | Path) -> Results:
    """Read the folder of a finished measurement. Raise DataError, which says what is wrong, if it
    is something else, or not finished, or damaged."""
    check_type("folder", folder, (str, PathLike), "the name of a folder of `measure`")
    folder = path_of("folder", folder)
    _check_holds_measurement(folder)
    _check_intact(folder)

    meta = read_json(folder / "meta.json", Meta, REMEDY)
    meta.windows = with_current_names(meta.windows)
    missing = sorted({"long", "short", "stride", "distant_states"} - meta.windows.keys())
    if missing:
        raise DataError(f"{folder}/meta.json: windows has no {', '.join(missing)}; {REMEDY}")
    # A summary without final intervals is of an earlier version. All columns that came later are
    # then computed again, also those that it stores, as their intervals are not final either.
    has_final_intervals = meta.intervals == STUDENT
    recomputed = later_columns()
    if has_final_intervals:
        recomputed = absent_columns(folder / "summary.parquet", recomputed)
    tables = {}
    for name in SCHEMAS:
        omitted = recomputed if name == "summary" else ()
        tables[name] = read_table(folder / f"{name}.parquet", name, omitted).to_pandas()
    if recomputed:
        tables["summary"] = complete_summary(tables["summary"], tables, meta, has_final_intervals)
    return Results(**tables, meta=meta)


def _check_holds_measurement(folder: Path) -> None:
    """Raise DataError if a folder holds something else than a measurement, and say what."""
    if (folder / "statements.parquet").exists():
        raise DataError(f"{folder} holds answers to questions; pandas reads statements.parquet")
    if (folder / "accuracy.parquet").exists():
        raise DataError(f"{folder} holds results of a task; only `figure` draws them")
    if not (folder / "identity.json").exists() and not (folder / MANIFEST).exists():
        if (folder / "metrics.jsonl").exists():
            raise DataError(
                f"{folder} is a training run, not a measurement; pass the folder of `measure`, or "
                "runs alone to `figure`"
            )
        raise DataError(f"{folder} holds no measurement, and no run that made a step")


def _check_intact(folder: Path) -> None:
    """Raise DataError if a measurement is not finished, or a file differs from the manifest."""
    if not (folder / MANIFEST).exists():
        remedy = "run the same `measure` command again, or with --partial"
        raise DataError(f"{folder}: not finished ({MANIFEST} is missing); {remedy}")
    # Each version lists all files that it writes. So a folder whose list lacks one is of another
    # version, and not damaged.
    listed = read_entries(folder)
    unlisted = sorted(set(FILES) - listed.files.keys())
    if listed.problem is None and unlisted:
        raise DataError(
            f"{folder} is of another version: {MANIFEST} does not list {unlisted[0]}; use another "
            "folder"
        )
    problem = find_damage(folder, FILES)
    if problem is not None:
        raise DataError(f"{folder} is damaged: {problem}; {REMEDY}")


def complete_summary(
    summary: pd.DataFrame,
    tables: Mapping[str, pd.DataFrame],
    meta: Meta,
    has_final_intervals: bool = False,
) -> pd.DataFrame:
    """Return a summary as it is stored and shown: with the columns that its tables determine, in
    the order of the schema, and with final intervals.

    Args:
        summary: A summary that may lack columns.
        tables: The tables of the measurement, by their names. Its own summary is not read.
        meta: Its meta.json.
        has_final_intervals: Whether the intervals that the summary has are final already.
    """
    names = SCHEMAS["summary"].names
    if summary.empty:
        return summary.reindex(columns=names)
    summary = _with_later_columns(summary, tables, meta)
    # `as_reported` would stretch a final interval a second time.
    summary = without_few_intervals(summary) if has_final_intervals else as_reported(summary)
    return summary[[name for name in names if name in summary]]


def _with_later_columns(
    summary: pd.DataFrame, tables: Mapping[str, pd.DataFrame], meta: Meta
) -> pd.DataFrame:
    """Add the columns that a summary lacks and the other tables determine."""
    targets = tables["targets"]
    recovery = tables["recovery"]
    if "distance" not in summary:
        ks = sorted(summary.k.unique().tolist())
        distance = median_distances(targets, tables["influence"], ks)
        summary = summary.merge(distance, how="left", on=GROUPS)
    if "share_all" not in summary:
        shares = shares_with_all_distant(targets, recovery, meta.windows)
        summary = summary.merge(shares, how="left", on=GROUPS)
    absent = [name for name in later_columns() if name not in summary]
    if absent:
        computed = summarize(tables["losses"], targets, recovery, meta.data.get("parts"))
        summary = summary.merge(computed[[*GROUPS, *absent]], how="left", on=GROUPS)
    return summary
