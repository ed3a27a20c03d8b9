"""One table of many measurements: python docs/collect_summaries.py OUT.csv FOLDER …

Their summaries, with the name, the induction check and the commit of each measurement.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from olmo_sparsity import read_results

COLUMNS = [
    "target_set",
    "units",
    "selector",
    "k",
    "recovery",
    "low",
    "high",
    "foreign",
    "foreign_low",
    "foreign_high",
    "excess_nats",
    "excess_nats_low",
    "excess_nats_high",
    "removal",
    "removal_low",
    "removal_high",
    "gap",
    "num_targets",
    "num_documents",
]


def collect(folders: list[Path]) -> pd.DataFrame:
    tables = []
    for folder in sorted(folders):
        results = read_results(folder)
        table = results.summary.reset_index()[COLUMNS]
        table.insert(0, "measurement", folder.name)
        check = results.meta.induction
        table["induction_share"] = check["drop"] / check["loss_first"]
        table["commit"] = results.meta.commit
        tables.append(table)
    return pd.concat(tables).round(4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    asked = parser.parse_args()
    collect(asked.folders).to_csv(asked.out, index=False)
