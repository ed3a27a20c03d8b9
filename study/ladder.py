"""Collect measurements of several models in one table: a row per model, units, selector and k.

Models must be measured with the same documents, windows and far states. Never imports torch.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_sparsity.analysis.results.results import Results, main_set, read_results
from olmo_sparsity.errors import DataError
from olmo_sparsity.io import write_atomically
from study.command import enter, run_command

# Entries of meta.json that all models must share.
_EQUAL = r"^(data\.fingerprint|windows\.|controls\.|dtype|targets\.(share|min_gap|given))"
_BY = ["units", "selector", "k"]
_VALUES = [
    *("recovery", "low", "high", "foreign", "excess", "excess_low", "excess_high", "excess_nats"),
    *("excess_nats_low", "excess_nats_high", "placebo", "net", "net_low", "net_high"),
    *("gap", "num_targets", "num_documents"),
]


def ladder_table(results: list[Results]) -> pd.DataFrame:
    """A row per model, kind of units, selector and k."""
    _refuse_different(results)
    return pd.concat([_rows(result) for result in results], ignore_index=True).sort_values(
        ["num_parameters", "positions", "seed", "model", *_BY], ignore_index=True
    )


def _refuse_different(results: list[Results]) -> None:
    names = [result.meta.model["name"] for result in results]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"duplicate measurement: {twice}; name each model once")
    for result, name in zip(results, names, strict=True):
        if result.missing:
            raise DataError(f"{name}: {result.missing}; finish the measurement first")
    meta = pd.json_normalize([asdict(result.meta) for result in results], max_level=1)
    for key in meta.filter(regex=_EQUAL):
        values = meta[key].map(str)
        if key.startswith("targets."):  # given targets have no share, and others no `given`
            values = values[meta[key].notna()]
        values = values.drop_duplicates()
        if len(values) > 1:
            one, other = values.index[:2]
            raise DataError(
                f"{names[one]} and {names[other]} were not measured alike: {key} is {values[one]} "
                f"and {values[other]}; measure both with the same settings"
            )


def _rows(result: Results) -> pd.DataFrame:
    meta, summary = result.meta, result.summary
    about = {
        "model": meta.model["name"],
        "num_parameters": meta.model["num_parameters"],
        "positions": meta.model["trained"].get("positions", "unknown"),
        "seed": meta.model["trained"].get("seed", 0),
        "drop": meta.induction["drop"],
        "loss_long": result.losses.loss_long.mean(),
    }
    rows = summary[summary.target_set == main_set(summary.target_set)]
    return rows.assign(**about)[[*about, *_BY, *_VALUES]]


def made_by(results: list[Results]) -> dict[str, Any]:
    """For each model: command, commit, versions, machine, counts."""
    keys = ("command", "commit", "versions", "machine", "counts")
    return {
        result.meta.model["name"]: {key: getattr(result.meta, key) for key in keys}
        for result in results
    }


def _run(options: argparse.Namespace, _: list[str]) -> None:
    results = [read_results(folder) for folder in options.results]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    table = ladder_table(results).round(4)
    # A spreadsheet runs a text that begins like a formula; model names come from outside.
    table["model"] = table.model.str.replace(r"^(?=[=+\-@\t\r])", "'", regex=True)
    write_atomically(options.out, table.to_csv(index=False))
    about = json.dumps(made_by(results), indent=1)
    write_atomically(options.out.with_suffix(".meta.json"), about)
    print(options.out)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m study.ladder", description=__doc__)
    parser.add_argument("results", metavar="RESULTS", nargs="+")
    kinds = "a .csv file; provenance is written next to it"
    parser.add_argument("--out", required=True, type=Path, help=kinds)
    return run_command(parser, _run, words)


if __name__ == "__main__":
    enter(main)
