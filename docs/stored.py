"""What docs/results and docs/figures hold, read for the tables and figures of the pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from olmo_sparsity.analysis.results.statistics import (
    both_ways,
    interval,
    pair,
    resample,
    summarize,
)

ROOT = Path(__file__).parents[1]
RESULTS, FIGURES, PAGES = (ROOT / "docs" / name for name in ("results", "figures", "tables"))
SHOWN = yaml.safe_load((ROOT / "docs/tables.yaml").read_text(encoding="utf-8"))
"""What the pages show of it."""


@cache
def read_all(name: str) -> pd.DataFrame:
    """The summary of a measurement; of `first + second`, each of two models with what the other
    chose, the mean of both."""
    first, _, second = name.partition(" + ")
    if second:
        return both_ways(*map(stored_rows, (first, second)))
    return _named(pd.read_csv(RESULTS / f"measurements/{name}/summary.csv"))


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.rename(columns={"low": "recovery_low", "high": "recovery_high"})


@cache
def read_by_part(name: str, target_set: str, k: int = 1) -> pd.DataFrame:
    """`read_all` of a set of targets, told apart by what part of a word they are; also of `whole`
    words, function words or not, and of those that are whole or `begun`."""
    parts = []
    for one in name.split(" + "):
        losses, targets, recovery = stored_tables(one)
        targets = targets[targets.target_set == target_set]
        whole = targets.part.isin(["word", "function_word"])
        begun = whole | (targets.part == "first_piece")
        told = [(targets, targets.part), (targets[whole], "whole"), (targets[begun], "begun")]
        told_apart = pd.concat([some.assign(target_set=part) for some, part in told])
        asked = (recovery.k == k) & (recovery.selector == "add_one") & (recovery.units == "tokens")
        parts.append((losses, told_apart, recovery[asked]))
    both = len(parts) > 1
    rows = both_ways(*(pair(*part) for part in parts)) if both else _named(summarize(*parts[0]))
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
    name = name.partition(" + ")[0]
    return json.loads((RESULTS / f"measurements/{name}/meta.json").read_text())


@cache
def stored_rows(name: str) -> pd.DataFrame:
    return pair(*stored_tables(name))


def stored_tables(name: str) -> list[pd.DataFrame]:
    folder = RESULTS / "measurements" / name
    return [pd.read_parquet(folder / f"{t}.parquet") for t in ("losses", "targets", "recovery")]


def mean_loss(name: str, target_set: str) -> float:
    """With the long window, over a set of targets."""
    folder = RESULTS / "measurements" / name
    targets = pd.read_parquet(folder / "targets.parquet")
    targets = targets[(targets.target_set == target_set) & (targets.far_part == "document")]
    losses = pd.read_parquet(folder / "losses.parquet")
    return float(losses.merge(targets, on=["document", "target"]).loss_long.mean())


TOKENS_OF_STEP = 16 * 256
"""Of configs/python.yaml, figure2_code.yaml and prose.yaml."""


def read_evaluations(name: str) -> Iterator[dict[str, Any]]:
    """Rows of the metrics of a training run, with the tokens trained, in millions. `run on corpus`:
    of a mixture, with the check of that corpus."""
    run, _, corpus = name.partition(" on ")
    for line in (RESULTS / f"{run}_evaluations.jsonl").read_text().splitlines():
        row = json.loads(line)
        if corpus:
            row["induction_drop"] = row["induction_drops"][corpus]
        yield row | {"millions": row["step"] * TOKENS_OF_STEP / 1e6}


def read_course(of: dict[str, Any]) -> pd.DataFrame:
    """While a run is trained, a row for each evaluated checkpoint: millions of tokens, the
    induction check, and what the far token that another model chose gives."""
    checks = {row["step"]: row["induction_drop"] for row in read_evaluations(of["run"])}
    steps = range(of["every"], of["steps"] + 1, of["every"])
    rows = [read_summary(f"{of['of']}_{step:06}", "bigram").loc["add_one", 1] for step in steps]
    millions = [step * TOKENS_OF_STEP / 1e6 for step in steps]
    return pd.DataFrame(rows).assign(millions=millions, check=[checks[step] for step in steps])


def scheme_losses(prefix: str, seeds: list[int]) -> pd.DataFrame:
    """Mean loss of documents between two positions, a row for each model and seed."""
    tables = {seed: pd.read_csv(RESULTS / f"{prefix}s_losses_seed{seed}.csv") for seed in seeds}
    rows = pd.concat(tables, names=["seed"]).drop(columns="document")
    rows["model"] = rows.model.str.removeprefix(f"{prefix}_").str.replace(
        r"_seed\d+$", "", regex=True
    )
    return rows.groupby(["model", "seed"]).mean()


def read_kinds(name: str, k: int) -> pd.DataFrame:
    """What kind of token add_one chooses, by kind."""
    rows = pd.read_csv(RESULTS / f"measurements/{name}/dependencies.csv")
    rows = rows[(rows.target_set == "gap") & (rows.selector == "add_one") & (rows.k == k)]
    return rows.set_index("kind")


def read_ladder(name: str, k: int) -> pd.DataFrame:
    rows = pd.read_csv(FIGURES / f"{name}.csv")
    return rows[(rows.selector == "add_one") & (rows.k == k)]


def by_distance(name: str, edges: list[int]) -> pd.DataFrame:
    """What the token that add_one puts first gives more than one of an unrelated text, in nats, by
    how far back it stands: a row for each range with targets."""
    folder = RESULTS / "measurements" / name
    key = ["document", "target"]

    def own(table: str) -> pd.DataFrame:
        rows = pd.read_parquet(folder / f"{table}.parquet")
        return rows[(rows.far_part == "document") & (rows.units == "tokens")]

    first = own("influence").query("rank == 1").set_index(key)
    losses = own("recovery").query("k == 1").groupby([*key, "control"]).loss_set.mean()
    lost = losses.unstack("control").reindex(first.index)
    rows = pd.DataFrame(
        {
            "back": first.index.get_level_values("target") - first.far_first,
            "nats": lost.foreign - lost.own,
            "targets": 1,
        }
    ).reset_index()
    found = []
    for low, high in pairwise(edges):
        some = rows[(rows.back >= low) & (rows.back < high)]
        if len(some):
            sums = some.groupby("document")[["nats", "targets"]].sum()
            resampled = resample(sums)
            mean, least, most = interval(resampled[:, 0] / resampled[:, 1], some.nats.mean())
            found.append(
                {
                    "from": low,
                    "to": high,
                    "nats": mean,
                    "nats_low": least,
                    "nats_high": most,
                    "targets": len(some),
                }
            )
    return pd.DataFrame(found)
