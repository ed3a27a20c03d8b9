"""Token by token: does a prediction that needs few distant tokens survive longer inputs?

`python -m study.longer RESULTS --tokens data/prose` reads one measurement a model: choosers
`reference_101` to `103`, judges `reference_104` to `106` of what these chose, and the losses of
`rope_201` … and `pose_211` …, and stores the targets and slopes in study/results. Without RESULTS
it judges the stored targets again, by the rules registered in study/records/thresholds.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from olmo_sparsity.base.files import writing
from olmo_sparsity.data.shard_manifest import Manifest
from study.command import run_command
from study.pages.keep_results import keep_other
from study.pages.stored import RESULTS

KEY = ["document", "target"]
CHOOSERS, JUDGES = ([f"reference_10{n}" for n in numbers] for numbers in ("123", "456"))
TRAINED = {"rope": [f"rope_20{n}" for n in "123"], "pose": [f"pose_21{n}" for n in "123"]}
MODELS = (*TRAINED["rope"], *TRAINED["pose"])
DEPTHS = (200, 999)
LEAST_GAP, ENOUGH, NEVER = 0.25, 0.9, 64
LEAST = (1500, 300, 300)  # targets, documents, targets with a k
CONTROLS = ("gap", "log_distance", "log_depth", "log_count", "part", "bigram")
DRAWS, PERMUTATIONS = 2000, 200
STORED = RESULTS / "longer.parquet"


def losses_of(folder: Path) -> pd.DataFrame:
    """L_long and L_short of all tokens, by document and target."""
    losses = pd.read_parquet(folder / "losses.parquet")
    return losses.set_index(KEY)[["loss_short", "loss_long", "token_id"]]


def targets_of(results: Path, tokens: Path) -> pd.DataFrame:
    """The targets, drawn by the text alone, with everything that the slope controls for."""
    first = results / CHOOSERS[0]
    targets = pd.read_parquet(first / "targets.parquet")
    targets = targets[(targets.distant_part == "document") & targets.target.between(*DEPTHS)]
    targets = targets.drop_duplicates([*KEY, "target_set"]).reset_index(drop=True)
    text = pd.read_parquet(first / "tokens.parquet").rename(columns={"place": "target"})
    targets = targets.merge(text[[*KEY, "token_id", "text"]], on=KEY, validate="many_to_one")
    counts = token_counts(tokens)
    targets["log_count"] = np.log(np.maximum(counts[targets.token_id], 1))
    targets["part"] = ~targets.text.str.startswith((" ", "Ġ", "\n"))
    targets["log_depth"] = np.log2(targets.target)
    targets["bigram"] = targets.target_set == "bigram"
    gaps, reductions, distances = [], [], []
    for chooser, judge in zip(CHOOSERS, JUDGES, strict=True):
        losses = losses_of(results / judge).loc[pd.MultiIndex.from_frame(targets[KEY])]
        short = losses.loss_short.to_numpy()
        gaps.append(short - losses.loss_long.to_numpy())
        rows = pd.read_parquet(results / judge / "recovery.parquet")
        rows = rows[(rows.control == "own") & (rows.distant_part == "document")]
        rows = rows.drop_duplicates([*KEY, "k"]).pivot(index=KEY, columns="k", values="loss_set")
        reductions.append(short[:, None] - rows.loc[pd.MultiIndex.from_frame(targets[KEY])])
        ranked = pd.read_parquet(results / chooser / "influence.parquet")
        ranked = ranked[(ranked.control == "own") & (ranked.distant_part == "document")]
        ranked = ranked[ranked["rank"] == 1].drop_duplicates(KEY).set_index(KEY)
        best = ranked.loc[pd.MultiIndex.from_frame(targets[KEY]), "distant_first"].to_numpy()
        distances.append(targets.target.to_numpy() - best)
    targets["gap"] = np.mean(gaps, axis=0)
    targets["log_distance"] = np.log2(np.mean(distances, axis=0))
    ks = reductions[0].columns
    targets["k"] = smallest_k(np.sum(reductions, axis=0), ks, np.sum(gaps, axis=0))
    for name, gap, reduction in zip(CHOOSERS, gaps, reductions, strict=True):
        targets[f"k_{name}"] = smallest_k(reduction.to_numpy(), ks, gap)
    targets.loc[targets.gap < LEAST_GAP, ["k", *(f"k_{name}" for name in CHOOSERS)]] = np.nan
    return with_penalties(targets, results)


def with_penalties(targets: pd.DataFrame, results: Path) -> pd.DataFrame:
    """Add each model's penalty and loss of gain, and each chooser's penalty among the others."""
    at = pd.MultiIndex.from_frame(targets[KEY])
    long = {name: losses_of(results / name).loc[at, "loss_long"].to_numpy() for name in CHOOSERS}
    for name, loss in long.items():
        others = [value for other, value in long.items() if other != name]
        targets[f"null_{name}"] = loss - np.mean(others, axis=0)
    for name in MODELS:
        losses = losses_of(results / name).loc[at]
        targets[name] = losses.loss_long.to_numpy() - np.mean([*long.values()], axis=0)
        gain = losses.loss_short - losses.loss_long
        targets[f"gain_{name}"] = targets.gap - gain.to_numpy()
    return targets


def token_counts(tokens: Path) -> np.ndarray:
    manifest = Manifest.load(tokens)
    total = np.zeros(manifest.vocab_size, dtype=np.int64)
    for path in sorted(tokens.glob(f"train-*.tokens.{manifest.dtype}")):
        ids = np.memmap(path, dtype=manifest.dtype, mode="r")
        total += np.bincount(ids, minlength=len(total))
    return total


def smallest_k(reductions: np.ndarray, ks: pd.Index, gap: np.ndarray) -> np.ndarray:
    """The smallest k that gives back enough of the gap; `NEVER` if none does."""
    enough = reductions >= ENOUGH * gap[:, None]
    return np.where(enough.any(1), np.asarray(ks)[enough.argmax(1)], NEVER).astype(float)


def design_of(rows: pd.DataFrame, k: str, controls: Sequence[str] = CONTROLS) -> np.ndarray:
    """A constant, log2 k, and what the slope controls for and varies."""
    varying = [name for name in controls if rows[name].nunique() > 1]
    columns = [rows[name].astype(float) for name in varying]
    return np.column_stack([np.ones(len(rows)), np.log2(rows[k]), *columns])


def slope_of(
    targets: pd.DataFrame, penalty: str, k: str = "k", controls: Sequence[str] = CONTROLS
) -> dict[str, float]:
    """Least squares of a penalty on log2 k, with an interval over documents."""
    rows = targets.dropna(subset=[k])
    design, value = design_of(rows, k, controls), rows[penalty].to_numpy()
    slope = np.linalg.lstsq(design, value, rcond=None)[0][1]
    documents, of = np.unique(rows.document, return_inverse=True)
    squares = np.zeros((len(documents), *[design.shape[1]] * 2))
    products = np.zeros((len(documents), design.shape[1]))
    np.add.at(squares, of, design[:, :, None] * design[:, None])
    np.add.at(products, of, design * value[:, None])
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(len(documents), np.full(len(documents), 1 / len(documents)), size=DRAWS)
    inverse = np.linalg.pinv(np.tensordot(drawn, squares, 1), hermitian=True)
    slopes = np.einsum("bj,bj->b", inverse[:, 1], drawn @ products)
    low, high = np.quantile(slopes, [0.025, 0.975])
    return {"slope": slope, "slope_low": low, "slope_high": high, "targets": len(rows)}


def permuted_slope(targets: pd.DataFrame, penalty: str) -> float:
    """The mean slope if k is permuted among targets of the same fifth of the gap."""
    rows = targets.dropna(subset=["k"]).reset_index(drop=True)
    fifths = pd.qcut(rows.gap, 5, labels=False)
    rng = np.random.default_rng(0)
    slopes = []
    for _ in range(PERMUTATIONS):
        rows["permuted"] = rows.groupby(fifths).k.transform(rng.permutation)
        slopes.append(np.linalg.lstsq(design_of(rows, "permuted"), rows[penalty], rcond=None)[0][1])
    return float(np.mean(slopes))


def summary_of(targets: pd.DataFrame) -> pd.DataFrame:
    """One row a model: slopes, mean penalties at few and many tokens, and the nulls."""
    deep = targets[targets.target >= 256]
    parts = {
        "bigram": targets[targets.bigram],
        "every": targets[~targets.bigram],
        "to_256": targets[targets.target < 256],
        "beyond_256": deep,
    }
    rows = []
    for name in (*MODELS, *(f"null_{name}" for name in CHOOSERS)):
        row: dict[str, float | str] = {"model": name, **slope_of(targets, name)}
        row["permuted"] = permuted_slope(targets, name)
        row["few"] = deep[deep.k <= 2][name].mean()
        row["few_within"] = parts["to_256"][parts["to_256"].k <= 2][name].mean()
        row["many"] = deep[deep.k >= 16][name].mean()
        row["without_k"] = targets[targets.k.isna()][name].mean()
        for part, of_part in parts.items():
            row |= {f"{key}_{part}": value for key, value in slope_of(of_part, name).items()}
        for chooser in CHOOSERS:
            row[f"slope_k_of_{chooser}"] = slope_of(targets, name, f"k_{chooser}")["slope"]
        if not name.startswith("null"):
            row["slope_gain"] = slope_of(targets, f"gain_{name}")["slope"]
        rows.append(row)
    table = pd.DataFrame(rows).set_index("model")
    for at in ("few", "many"):
        table[f"{at}_to_rope"] = table[at][TRAINED["pose"]] / table[at][TRAINED["rope"]].to_numpy()
    return table.reset_index()


def verdicts_of(summary: pd.DataFrame, targets: pd.DataFrame) -> dict[str, str]:
    """The registered conditions of E1, E1r and E1n; "void" if there are too few targets."""
    numbers = len(targets), targets.document.nunique(), targets.k.notna().sum()
    if any(number < least for number, least in zip(numbers, LEAST, strict=True)):
        return dict.fromkeys(("E1", "E1r", "E1n"), "void")
    by = summary.set_index("model")
    pose, rope, both = (by.loc[[*of]] for of in (TRAINED["pose"], TRAINED["rope"], MODELS))
    null = by.loc[[f"null_{name}" for name in CHOOSERS]]
    confirmed = ((pose.slope >= 0.05) & (pose.slope_low > 0)).all()
    refuted = (pose.slope_high < 0.02).all()
    large = (rope[["few", "many"]] >= 0.5).all(axis=None)
    large &= (pose[["few_to_rope", "many_to_rope"]] <= 0.5).all(axis=None)
    covered = ((null.slope_low <= 0) & (null.slope_high >= 0)).sum() >= 2
    harmless = covered and (null.slope <= 0.02).all() and (both.permuted.abs() < 0.02).all()
    return {
        "E1": "yes" if confirmed else "no" if refuted else "open",
        "E1r": "yes" if large else "no",
        "E1n": "yes" if harmless else "no",
    }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("study.longer", description=__doc__)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--tokens", type=Path, help="the prepared training text")

    def run(options: argparse.Namespace, _: list[str]) -> None:
        if options.results:
            found = targets_of(options.results, options.tokens).drop(columns="text").round(4)
            with writing(STORED) as partial:
                found.to_parquet(partial, compression="zstd")
        targets = pd.read_parquet(STORED)
        summary = summary_of(targets)
        keep_other("longer", summary.round(4).replace({np.nan: None}).to_dict("list"))
        by_k = targets.groupby("k")[["gap", *MODELS]].mean().assign(num=targets.k.value_counts())
        by_k = by_k.assign(**{name: by_k[[*of]].mean(axis=1) for name, of in TRAINED.items()})
        keep_other("longer_by_k", by_k.astype(float).round(4).reset_index().to_dict("list"))
        print(summary[["model", "slope", "slope_low", "slope_high", "few", "many"]].round(3))
        print(len(targets), targets.k.notna().sum(), verdicts_of(summary, targets))

    return run_command(parser, run, words)


if __name__ == "__main__":
    raise SystemExit(main())
