"""Does an answer that needs fewer tokens lose less at greater lengths? Verdicts E20 to E35.

`python -m study.by_k FOLDER …` reads results of `python -m study.tasks`: sparse parity until each
k is known, or planted pieces, a folder for each number of pieces. The rules are those registered in
study/records/thresholds.md.
"""

from __future__ import annotations

import argparse
from itertools import product
from math import comb
from pathlib import Path

import numpy as np
import pandas as pd

from study.command import run_command
from study.tasks.results import read_results
from study.theory.results import half_width

KNOWN = {"parity": 0.99, "planted": 0.95}
LEAST = {"parity": 3, "planted": 2}  # models
LEARNT, SLOPE, KEPT, FAILS = 0.9, 0.05, 0.05, 0.5


def read(folder: Path) -> pd.DataFrame:
    """A row for each model and k, with a column for each length."""
    rows, meta = read_results(folder)
    table = pd.DataFrame(rows)
    table["k"] = meta["settings"]["task"].get("pieces", table.test_k)
    keys = ["task", "scheme", "seed", "k"] + ["train_k"] * bool(table.train_k.notna().all())
    return table.pivot(index=keys, columns="length", values="exact_match").reset_index()


def slope(changes: pd.Series, k: pd.Series) -> float:
    """The change of accuracy at a doubling of k, by least squares."""
    return float(np.polyfit(np.log2(np.asarray(k, float)), changes, 1)[0])


# --- sparse parity: E30 to E35 --------------------------------------------------------------------


def counted(k: int, limit: int) -> float:
    """The accuracy of a model that counts the marked ones no further than a limit."""
    right = (n for n in range(k + 1) if (n - min(n, limit)) % 2 == 0)
    return sum(comb(k, n) for n in right) / 2**k


def models_of_parity(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each model: whether it knows each k, what it loses, how far it counts ones."""
    found = []
    for (train_k, seed), rows in table.groupby(["train_k", "seed"]):
        own = rows[rows.k <= train_k]
        fails = rows[(rows.k > train_k) & (rows[200] < LEARNT)]
        row = {"train_k": int(train_k), "seed": seed, "known": own[50].min() >= KNOWN["parity"]}
        for length in (200, 500):
            changes = own[length] - own[50]
            row |= {f"least_{length}": changes.min(), f"slope_{length}": slope(changes, own.k)}
        row |= {"fails": len(fails), "fails_at_50": (fails[50] < KNOWN["parity"]).sum()}
        off = {
            n: max(abs(rows[50] - [counted(k, n) for k in rows.k]))
            for n in range(1, 2 * int(train_k) + 1)
        }
        row["counts_to"] = min(off, key=off.__getitem__)
        found.append(row | {"off": off[row["counts_to"]]})
    return pd.DataFrame(found)


def verdicts_of_parity(models: pd.DataFrame) -> dict[str, str]:
    known = models[models.known]
    two, four = (known[known.train_k == k] for k in (2, 4))
    both = known if min(len(two), len(four)) >= LEAST["parity"] else known[:0]
    return {
        "E30": by_interval(four.slope_500),
        "E31": by_interval(four.slope_200),
        "E32": by_share(two.least_200 >= -KEPT),
        "E33": by_share(four.least_200 >= -KEPT),
        "E34": by_share(both.fails_at_50 >= 0.9 * both.fails),
        "E35": by_share(both.off <= KEPT),
    }


def by_share(holds: pd.Series) -> str:
    if len(holds) < LEAST["parity"]:
        return "void"
    return "yes" if holds.mean() >= 0.8 else "no" if holds.mean() <= 0.2 else "open"


def by_interval(slopes: pd.Series) -> str:
    if len(slopes) < LEAST["parity"]:
        return "void"
    mean, half = slopes.mean(), half_width(slopes.to_numpy())
    if mean <= -SLOPE and mean + half < 0:
        return "yes"
    return "no" if abs(mean) + half <= SLOPE else "open"


# --- planted pieces: E20 to E24 -------------------------------------------------------------------


def verdicts_of_planted(table: pd.DataFrame) -> dict[str, str]:
    """A verdict is "yes" or "no" if it holds whichever model of each number of pieces is taken."""
    known = table[table[256] >= KNOWN["planted"]].assign(change=table[1024] - table[256])
    ks = sorted(set(table.k))
    verdicts = {}
    for name, placement in (("E20", "scattered"), ("E21", "local")):
        pose = known[(known.scheme == "pose") & (known.task == placement)]
        taken = list(product(*(pose[pose.k == k].change for k in ks)))
        equal = all(abs(one[-1] - one[0]) <= SLOPE for one in taken)
        grows = all(slope(pd.Series(one), pd.Series(ks)) <= -SLOPE for one in taken)
        yes = grows and (pose[pose.k <= 2][1024] >= LEARNT).all()
        verdicts[name] = "yes" if yes else "no" if equal else "open"
        if min((pose.k == k).sum() for k in ks) < LEAST["planted"]:
            verdicts[name] = "void"
    rope = known[known.scheme == "rope"]
    verdicts["E22"] = "yes" if (rope[1024] < FAILS).all() else "no"
    counts = [((rope.k == k) & (rope.task == of)).sum() for k in ks for of in set(table.task)]
    return verdicts | ({"E22": "void"} if min(counts) < LEAST["planted"] else {})


def verdicts_of_rope(table: pd.DataFrame) -> dict[str, str]:
    """Compare what k = 8 and k = 1 lose at twice the length, for every pair of models."""
    table = table[table[256] >= KNOWN["planted"]].assign(fall=table[256] - table[512])
    one, eight = (table[table.k == k] for k in (1, 8))
    places = product((one.task, eight.task), ("local", "scattered"))
    if min((of == place).sum() for of, place in places) < LEAST["planted"]:
        return {"E23": "void", "E24": "void"}
    pairs = one.merge(eight, on="task")
    more, worse = pairs.fall_y - pairs.fall_x, pairs["512_y"] < pairs["512_x"] ** 8
    grows = "yes" if more.min() >= 3 * SLOPE else "no" if more.abs().max() <= SLOPE else "open"
    return {"E23": grows, "E24": "yes" if worse.all() else "open" if worse.any() else "no"}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("study.by_k", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")

    def run(options: argparse.Namespace, _: list[str]) -> None:
        table = pd.concat([read(folder) for folder in options.folders])
        parity = "train_k" in table
        shown = models_of_parity(table) if parity else table
        of_planted = verdicts_of_planted if "pose" in set(table.scheme) else verdicts_of_rope
        verdicts = (verdicts_of_parity if parity else of_planted)(shown)
        print(shown.round(3).to_string(index=False), verdicts)

    return run_command(parser, run, words)


if __name__ == "__main__":
    raise SystemExit(main())
