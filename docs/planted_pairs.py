"""How the tokens that a rule finds compare with planted ones:

    python docs/planted_pairs.py results/planted_8k runs/planted_8k OUT.csv [--text TEXT]

RESULTS: of `measure --planted`. Of thousands of far tokens, some that nobody planted may lower a
loss more than the planted ones do. So the planted ones are evaluated too, as if a rule had chosen
them: `as_good` is the share of targets where as many tokens of the rule lower the loss as much.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd

from olmo_sparsity import measure, read_results
from olmo_sparsity.analysis.results.results import Results

KEYS = ["document", "target", "selector"]


def choosing_the_planted(found: Results) -> Results:
    """The same measurement as if each rule had ranked the planted tokens first. Each rule ranks as
    many tokens at least, as their number is a k."""
    planted = found.planted.sort_values(["document", "place"])
    planted["rank"] = planted.groupby("document").cumcount() + 1
    rows = found.influence.merge(planted, on=["document", "rank"], how="left")
    own = (rows.control == "own") & rows.place.notna()
    rows["far_first"] = rows.far_first.mask(own, rows.place).astype(int)
    rows["far_end"] = rows.far_end.mask(own, rows.place + 1).astype(int)
    return replace(found, influence=rows.drop(columns="place"))


def own_losses(results: Results, k: int) -> pd.DataFrame:
    rows = results.recovery.query("control == 'own' and far_part == 'document' and k == @k")
    return rows.set_index(KEYS).loss_set.to_frame()


def compare(
    found: Results, model: str, max_documents: int, text: str | None = None
) -> pd.DataFrame:
    (k,) = found.planted.groupby("document").size().unique()
    if found.meta.units != ["tokens"] or k not in found.meta.ks:
        raise SystemExit(f"measure tokens alone (--units tokens), with k = {k} among --ks")
    evaluated = measure(
        model,
        text,
        choices=choosing_the_planted(found),
        planted=True,
        ks=[int(k)],
        max_documents=max_documents,
    )
    assert evaluated is not None
    assert evaluated.meta.windows == found.meta.windows
    both = own_losses(found, k).join(own_losses(evaluated, k), rsuffix="_of_planted", how="inner")
    both = both[both.index.get_level_values("document").isin(found.planted.document)]
    ranked = found.influence.query("control == 'own' and rank <= @k")
    hits = ranked.merge(
        found.planted, left_on=["document", "far_first"], right_on=["document", "place"]
    )
    both["found"] = (hits.groupby(KEYS).size() / k).reindex(both.index, fill_value=0.0)
    # Of the planted tokens themselves, two evaluations differ in their last bits.
    both["as_good"] = (both.loss_set <= both.loss_set_of_planted) | (both.found == 1)
    summary = both.groupby("selector").mean()
    cost = found.costs.groupby("selector")[["token_forwards", "num_targets"]].sum()
    summary["token_forwards_per_target"] = (cost.token_forwards / cost.num_targets).round()
    summary["num_targets"] = both.groupby("selector").size()
    return summary.round(4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", help="as `measure` was given")
    parser.add_argument("--max-documents", type=int, default=150)
    asked = parser.parse_args()
    found = read_results(asked.results)
    compare(found, asked.model, asked.max_documents, asked.text).to_csv(asked.out)
