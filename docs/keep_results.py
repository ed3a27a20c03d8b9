"""The part of a result that is stored: python docs/keep_results.py FOUND KEPT [--rows]

Of a measurement: summary, mean losses, kinds of dependency and provenance, in text that a reader
can diff; with --rows also the rows of its targets, from which all of it can be made again. Of a
task: its table and provenance. Of a training run: the evaluations (KEPT is a .jsonl file).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pandas as pd

from olmo_sparsity.analysis.results.dependencies import parts_of_targets
from olmo_sparsity.training.run_folder import read_metrics


def keep(found: Path, kept: Path, with_rows: bool) -> None:
    if (found / "metrics.jsonl").is_file():
        rows = [row for row in read_metrics(found / "metrics.jsonl") if "heldout" in row]
        kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(found / "meta.json", kept)
    if (found / "accuracy.parquet").is_file():
        for name in ("accuracy.parquet", "manifest.json"):
            shutil.copy(found / name, kept)
        return
    for name in ("summary", "dependencies"):
        table = pd.read_parquet(found / f"{name}.parquet").round(4)
        table.to_csv(kept / f"{name}.csv", index=False)
    losses = pd.read_parquet(found / "losses.parquet")[["loss_short", "loss_long"]]
    losses.agg(["mean", "count"]).round(4).to_csv(kept / "losses.csv")
    for name in ("losses", "targets", "recovery", "influence") if with_rows else ():
        table = pd.read_parquet(found / f"{name}.parquet")
        if name == "losses":
            targets = pd.read_parquet(found / "targets.parquet")[["document", "target"]]
            table = table.merge(targets.drop_duplicates())
        if name == "targets":  # The text is not stored.
            tokens = pd.read_parquet(found / "tokens.parquet")
            table = table.assign(part=parts_of_targets(table, tokens))
        if "selector" in table:
            table = table[table.selector == "add_one"]
        if name == "influence":
            table = table[(table.control == "own") & (table["rank"] <= 4)]
        table.to_parquet(kept / f"{name}.parquet", compression="zstd", index=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("found", type=Path)
    parser.add_argument("kept", type=Path)
    parser.add_argument("--rows", action="store_true")
    options = parser.parse_args()
    keep(options.found, options.kept, options.rows)
