"""Does `add_one_nested` find what `add_one` finds? Overlap of the first four, on real targets.

python -m study.benchmarks.nested --model RUN --long 992 --short 32 [--text TEXT] [--targets 40]
    [--far-states isolated]

The targets are the ones of largest gap among the first that have a full long window, at most three
of a document, in documents of the half that a measurement reports. Intervals are over documents.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import get_args

import numpy as np
import pandas as pd

from olmo_sparsity import Scorer, Windows, context_losses, load_model, open_documents, recover
from olmo_sparsity.analysis.results.statistics import half_of, interval, resample
from olmo_sparsity.analysis.scoring.scorer import Reading

K, OF_DOCUMENT, MIN_GAP = 4, 3, 0.5
NESTED = ("add_one_nested", "add_one_screened")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", help="in any form that `measure` reads (the run's held-out text)")
    parser.add_argument("--long", type=int, required=True)
    parser.add_argument("--short", type=int, required=True)
    parser.add_argument("--targets", type=int, default=40)
    parser.add_argument("--far-states", choices=get_args(Reading), default="contextual")
    options = parser.parse_args()
    model = load_model(options.model)
    windows = Windows(options.long, options.short, stride=16)
    scorer = Scorer(model.model, far_states=options.far_states)
    rows, costs, num_targets = [], [], 0
    for document in open_documents(options.text, model):
        if half_of(document.number) != "report" or len(document.tokens) <= windows.long:
            continue
        document = replace(document, tokens=document.tokens[: windows.long + 8 * windows.stride])
        losses = context_losses(scorer, document, windows)
        losses["gap"] = losses.loss_short - losses.loss_long
        large = losses[losses.gap > MIN_GAP].nlargest(OF_DOCUMENT, "gap")
        targets = large.target.to_numpy()[: options.targets - num_targets]
        if not len(targets):
            continue
        found = recover(scorer, document, windows, targets, selectors=("add_one", *NESTED), ks=(K,))
        costs.append(found["costs"])
        chosen = found["influence"].groupby(["target", "selector"])
        places, nats = chosen.far_first.agg(set).unstack(), chosen.influence.sum().unstack()
        for name in NESTED:
            same = [len(a & b) for a, b in zip(places.add_one, places[name], strict=True)]
            rows.append(
                (
                    document.number,
                    name,
                    len(targets),
                    sum(same),
                    nats[name].sum(),
                    nats.add_one.sum(),
                )
            )
        num_targets += len(targets)
        print(f"{num_targets} targets", flush=True)
        if num_targets == options.targets:
            break
    columns = ["document", "selector", "targets", "same", "nats", "of_add_one"]
    forwards = pd.concat(costs).groupby("selector").token_forwards.sum() / num_targets
    print(f"{num_targets} targets in {len(costs)} documents, first {K} of {windows.num_far} places")
    for name, group in pd.DataFrame(rows, columns=columns).groupby("selector", sort=False):
        sums_R = resample(group[columns[2:]]).T
        overlap = interval(*_ratio(sums_R[1], K * sums_R[0]))
        kept = interval(*_ratio(sums_R[2], sums_R[3]))
        print(
            f"{name:<18} overlap {overlap[0]:.3f} [{overlap[1]:.3f}, {overlap[2]:.3f}], "
            f"nats kept {kept[0]:.3f} [{kept[1]:.3f}, {kept[2]:.3f}], token-forwards "
            f"{forwards[name]:,.0f}, add_one {forwards['add_one']:,.0f}"
        )


def _ratio(of_R: np.ndarray, to_R: np.ndarray) -> tuple[np.ndarray, float]:
    ratio_R = of_R / to_R
    return ratio_R[1:], ratio_R[0]


if __name__ == "__main__":
    main()
