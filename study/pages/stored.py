"""Read study/results for the tables of the pages.

study/results holds, written by keep_results.py:

    losses, targets, recovery, influence .parquet    rows of the measured targets
    summary.parquet                                  the final tables, rounded to four digits
    meta.jsonl                                       provenance and mean losses of measurements
    tasks.parquet, tasks.jsonl                       accuracy and provenance of task results
    evaluations.jsonl                                evaluations of training runs
    others.json                                      tables and records of benchmarks, by name
    models/                                          trained models

The first column of a Parquet file names the measurement, or the task result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from olmo_sparsity.analysis.results.pairing import join_by_target
from olmo_sparsity.analysis.results.statistics import ENOUGH, summarize
from olmo_sparsity.analysis.results.two_measurements import both_ways
from study.tasks.results import Row

ROOT = Path(__file__).parents[2]
RESULTS, PAGES = ROOT / "study/results", ROOT / "study/tables"
SHOWN = yaml.load((ROOT / "study/tables.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
"""What the pages show of it."""

ROWS = ("losses", "targets", "recovery", "influence")


# --- the files ------------------------------------------------------------------------------------


@cache
def _whole(path: Path) -> tuple[pa.Table, dict[str, tuple[int, int]]]:
    """Return a Parquet file, and for each name in its first column the first of its rows, which
    follow each other, and their number."""
    table = pq.read_table(path)
    names, counts = table.column(0).value_counts().flatten()
    ends = np.cumsum(counts)
    return table, dict(zip(names.to_pylist(), zip(ends - counts, counts, strict=True), strict=True))


def read_rows(path: Path, name: str) -> pa.Table:
    """Return the rows of a stored Parquet file with `name` in the first column, without that
    column."""
    table, rows = _whole(path)
    return table.slice(*map(int, rows.get(name, (0, 0)))).drop_columns(table.column_names[:1])


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@cache
def measurements() -> dict[str, dict[str, Any]]:
    """Each stored measurement: its `meta`, its `mean_losses`, and `columns`, the types that a
    Parquet file of all measurements does not hold (see `read_table`)."""
    lines = read_lines(RESULTS / "meta.jsonl")
    return {line.pop("measurement"): line for line in lines}


def read_table(table: str, name: str) -> pd.DataFrame:
    """A table of one measurement, with the columns and types that it had when it was stored.

    A column that is empty in these rows belongs to other measurements, unless `columns` names it.
    """
    found = read_rows(RESULTS / f"{table}.parquet", name)
    types = measurements()[name]["columns"].get(table, {})
    if not len(found) and not types:  # of an empty table, the types of all columns are stored
        raise FileNotFoundError(f"no {table} are stored of measurement {name}")
    here = [c for c in found.schema.names if c in types or found[c].null_count < len(found)]
    return found.select(here).to_pandas().astype(types)


@cache
def evaluations() -> dict[str, list[dict[str, Any]]]:
    """The evaluations of each stored training run, in order of steps."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines(RESULTS / "evaluations.jsonl"):
        found.setdefault(line.pop("run"), []).append(line)
    return found


@cache
def tasks() -> dict[str, dict[str, Any]]:
    """The `meta` and `manifest` of each stored task result."""
    return {line.pop("result"): line for line in read_lines(RESULTS / "tasks.jsonl")}


def task_rows(name: str) -> list[Row]:
    return [Row(**row) for row in read_rows(RESULTS / "tasks.parquet", name).to_pylist()]


@cache
def others() -> dict[str, Any]:
    """Records of benchmarks by name; of a table, a list for each column."""
    path = RESULTS / "others.json"
    if not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def other_table(name: str) -> pd.DataFrame:
    return pd.DataFrame(others()[name])


def forget() -> None:
    """Read the files anew, as they have changed."""
    for read in (_whole, measurements, evaluations, tasks, others):
        read.cache_clear()


# --- measurements ---------------------------------------------------------------------------------


@cache
def read_all(name: str) -> pd.DataFrame:
    """The summary of a measurement; of `first + second`, each of two models with what the other
    chose, the mean of both."""
    first, _, second = name.partition(" + ")
    if second:
        return both_ways(*map(stored_rows, (first, second)))
    return _named(read_table("summary", name))


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.rename(columns={"low": "recovery_low", "high": "recovery_high"})


@cache
def read_by_part(name: str, target_set: str, k: int = 1) -> pd.DataFrame:
    """`read_all` of a set of targets, by part of a word; also of `whole`
    words, function words or not, and of those that are whole or `begun`."""
    parts = []
    for one in name.split(" + "):
        losses, targets, recovery = stored_tables(one)
        targets = targets[targets.target_set == target_set]
        whole = targets.part.isin(["word", "function_word"])
        begun = whole | (targets.part == "first_piece")
        told = [(targets, targets.part), (targets[whole], "whole"), (targets[begun], "begun")]
        told_apart = pd.concat([some.assign(target_set=part) for some, part in told])
        asked = (
            (recovery.k == k) & (recovery.selector == rule_of(one)) & (recovery.units == "tokens")
        )
        parts.append((losses, told_apart, recovery[asked]))
    both = len(parts) > 1
    rows = (
        both_ways(*(join_by_target(*part) for part in parts))
        if both
        else _named(summarize(*parts[0]))
    )
    rows = rows.set_index("target_set").sort_index()
    total = rows.num_targets.drop(["whole", "begun"], errors="ignore").sum()
    return rows.assign(share=rows.num_targets / total)


@cache
def read_summary(name: str, target_set: str = "gap", units: str = "tokens") -> pd.DataFrame:
    """By selector and k."""
    rows = read_all(name)
    rows = rows[(rows.target_set == target_set) & (rows.units == units)]
    return rows.set_index(["selector", "k"]).sort_index()


def read_meta(name: str) -> dict[str, Any]:
    return measurements()[name.partition(" + ")[0]]["meta"]


def rule_of(name: str) -> str:
    """The form of `add_one` that a measurement used."""
    return next(rule for rule in read_meta(name)["selectors"] if rule.startswith("add_one"))


def shown_part(named: str) -> tuple[str, list[str], str]:
    """Split `name`, `name:units` or `name:selector` into the measurement, the units that are shown
    and the selector. Default: all units, and the form of `add_one` that was used."""
    name, _, part = named.partition(":")
    meta = read_meta(name)
    if part in meta["selectors"]:
        return name, meta["units"], part
    return name, [part] if part else meta["units"], rule_of(name)


@cache
def stored_rows(name: str) -> pd.DataFrame:
    losses, targets, recovery = stored_tables(name)
    if "loss_without" not in recovery:  # measured before removal was
        recovery = recovery.assign(loss_without=np.nan)
    return join_by_target(losses, targets, recovery)


def read_counts(name: str, target_set: str, units: str, selector: str, k: int) -> dict[str, float]:
    """Return what the summary of an older measurement lacks: the mean of ratios, the share of
    targets at `ENOUGH`, and how many targets and documents the placebo has."""
    first, _, second = name.partition(" + ")
    rows = stored_rows(first)
    rows = rows[(rows.target_set == target_set) & (rows.units == units) & (rows.k == k)]
    rows = rows[(rows.selector == selector) & (not second)]  # transfer has no placebo
    own, placebo = (rows[rows.distant_part == part] for part in ("document", "placebo"))
    ratios = own.own_reduction / own.gap if (own.gap > 0).all() else pd.Series(dtype=float)
    return {
        "mean_ratio": ratios.mean(),
        "share_enough": (ratios >= ENOUGH).mean(),
        "placebo_recovery": placebo.own_reduction.sum() / placebo.gap.sum()
        if len(placebo)
        else np.nan,
        "num_placebo_targets": len(placebo),
        "num_placebo_documents": placebo.document.nunique(),
    }


@lru_cache(maxsize=16)
def stored_tables(name: str) -> list[pd.DataFrame]:
    return [read_table(table, name) for table in ("losses", "targets", "recovery")]


TOKENS_OF_STEP = 16 * 256
"""Of configs/python.yaml, figure2_code.yaml and prose.yaml."""


def read_evaluations(name: str) -> Iterator[dict[str, Any]]:
    """Rows of the metrics of a training run, with the tokens trained, in millions. `run on corpus`:
    of a mixture, with the check of that corpus."""
    run, _, corpus = name.partition(" on ")
    for row in evaluations()[run]:
        if corpus:
            row = row | {"induction_drop": row["induction_drops"][corpus]}
        yield row | {"millions": row["step"] * TOKENS_OF_STEP / 1e6}


def scheme_losses(prefix: str, seeds: list[int]) -> pd.DataFrame:
    """Mean loss of documents between two positions, a row for each model and seed."""
    tables = {seed: other_table(f"{prefix}s_losses_seed{seed}") for seed in seeds}
    rows = pd.concat(tables, names=["seed"]).drop(columns="document")
    rows["model"] = rows.model.str.removeprefix(f"{prefix}_").str.replace(
        r"_seed\d+$", "", regex=True
    )
    return rows.groupby(["model", "seed"]).mean()
