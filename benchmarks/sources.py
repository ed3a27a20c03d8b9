"""How often verdicts on sources are right, where what a statement rests on is known; and rivals.

    python benchmarks/sources.py runs/sources [--num 400] [--seed 1] [--draws 8] [--rivals]

Exercises of the laboratory (laboratory.py), held out from training. Counted are statements that the
model itself writes: each of their tokens is its most likely one. Decoys are sources of other
exercises.

Rivals only rank sources: shown alone, left out alone, a linear fit to 64 random subsets (the method
of context-cite, by least squares on nats), and mean attention; the text closes up where sources are
missing. Of each: the share of statements on one source whose best source is that one, and whether
the best score tells statements that rest on a source from those on none (AUROC).
"""

from __future__ import annotations

import argparse
import json
from contextlib import redirect_stderr
from io import StringIO

import numpy as np
import pandas as pd
import torch
from laboratory import NONE, ONE, exercises

from olmo_sparsity import Scorer, explain, load_model
from olmo_sparsity.analysis.saliency import head_attention
from olmo_sparsity.analysis.statements import Attribution
from olmo_sparsity.model.load import LoadedModel

SUBSETS = 64


@torch.no_grad()
def writes(model: LoadedModel, found: Attribution) -> list[bool]:
    """Whether each statement is what the model writes, given what stands before it."""
    block = found.layout.block
    tokens_1L = torch.from_numpy(block.tokens[None]).to(model.device)
    positions_1L = torch.arange(tokens_1L.shape[1], device=model.device)[None]
    hidden_1LD = model.model.hidden(tokens_1L, positions_1L)
    best = model.model.unembed(hidden_1LD)[0].argmax(-1)[block.num_before - 1 : -1].cpu().numpy()
    right_W = best == block.targets_W
    return [bool(right_W[first:end].all()) for first, end in found.layout.statements]


# --- rivals: score_TS and token-forwards ----------------------------------------------------------

Scores = tuple[np.ndarray, int]


@torch.no_grad()
def removed(model: LoadedModel, found: Attribution, shown_AS: np.ndarray) -> Scores:
    """losses_AT with only some sources in the text, which closes up: no gaps in position IDs."""
    layout, losses, cost = found.layout, [], 0
    block = layout.block
    near = np.arange(block.num_prefix + block.num_far, len(block.tokens))
    for shown_S in shown_AS:
        far = layout.shown(*np.flatnonzero(shown_S).tolist())
        tokens_L = torch.from_numpy(block.tokens[np.concatenate([block.earlier(far), near])])
        positions_1L = torch.arange(len(tokens_L) - 1)[None]
        hidden_1LD = model.model.hidden(tokens_L[None, :-1], positions_1L)[:, -block.num_targets :]
        log_p_WV = model.model.unembed(hidden_1LD)[0].float().log_softmax(-1)
        nll_W = -log_p_WV[range(block.num_targets), block.targets_W].numpy()
        losses.append([nll_W[a:b].sum() for a, b in layout.statements])
        cost += len(tokens_L) - 1
    return np.array(losses), cost


def linear_fit(model: LoadedModel, found: Attribution) -> Scores:
    """Coefficients of a linear model of −loss in which sources are shown."""
    shown_AS = np.random.default_rng(0).random((SUBSETS, len(found.names))) < 0.5
    losses_AT, cost = removed(model, found, shown_AS)
    inputs = np.column_stack([np.ones(SUBSETS), shown_AS])
    fit, *_ = np.linalg.lstsq(inputs, -losses_AT, rcond=None)
    return fit[1:].T, cost


def one_by_one(model: LoadedModel, found: Attribution) -> dict[str, Scores]:
    every = np.eye(len(found.names), dtype=bool)
    (none_T, *alone), of_alone = removed(model, found, np.vstack([every[:1] & False, every]))
    (all_T, *left_out), of_left_out = removed(model, found, np.vstack([every[:1] | True, ~every]))
    return {
        "left out": (np.array(left_out).T - all_T[:, None], of_left_out),
        "alone": (none_T[:, None] - np.array(alone).T, of_alone),
    }


def attention(model: LoadedModel, found: Attribution) -> Scores:
    """Summed over the places of a source and the tokens of a statement; mean over heads."""
    layout, scorer = found.layout, Scorer(model.model)
    weights_TF = head_attention(scorer, scorer.context(layout.block), layout.statements).mean(1)
    bounds = zip(layout.units.first, layout.units.end, strict=True)
    return np.stack([weights_TF[:, a:b].sum(1) for a, b in bounds], 1), scorer.token_forwards


def rivals(model: LoadedModel, found: Attribution) -> dict[str, Scores]:
    tried = found.matrix[["p_gives", "p_lost"]].min(axis=1).to_numpy()
    return {
        "ours": (-tried.reshape(len(found.texts), -1), found.token_forwards),
        **one_by_one(model, found),
        "linear fit": linear_fit(model, found),
        "attention": attention(model, found),
    }


def auroc(positive: np.ndarray, negative: np.ndarray) -> float:
    above = positive[:, None] > negative[None]
    return float((above + 0.5 * (positive[:, None] == negative[None])).mean())


# --- tables ---------------------------------------------------------------------------------------


def measure(
    model: LoadedModel, num: int, seed: int, draws: int = 8, with_rivals: bool = False
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row for each statement: what it rests on, what the verdict says, whether it is counted; and
    a row for each statement and rival."""
    drawn, rows, ranked = list(exercises(num, seed)), [], []
    for number, one in enumerate(drawn):
        others = [other for other in drawn[:60] if other is not one]
        with redirect_stderr(StringIO()):
            found = explain(
                model, sources=one.sources, question=one.question, answer=one.statements,
                decoys=[text for other in others for text in other.sources.values()], draws=draws,
            )  # fmt: skip
        counted = writes(model, found)
        for t, said in enumerate(found.statements.itertuples()):
            same = sorted(said.sources) == one.needs[t]
            rows.append((number, one.kinds[t], said.kind, same, counted[t], said.nats))
        for name, (score_TS, cost) in (rivals(model, found) if with_rivals else {}).items():
            for t, score_S in enumerate(score_TS):
                best = found.names[int(score_S.argmax())]
                right = best in one.needs[t]
                ranked.append((name, one.kinds[t], counted[t], right, float(score_S.max()), cost))
    columns = ["exercise", "kind", "said", "right", "counted", "nats"]
    of_rivals = ["rival", "kind", "counted", "right", "score", "token_forwards"]
    return pd.DataFrame(rows, columns=columns), pd.DataFrame(ranked, columns=of_rivals)


def summary(rows: pd.DataFrame) -> dict[str, float]:
    counted = rows[rows.counted]
    told = (counted.kind == counted.said).groupby(counted.kind).mean()
    one, none = counted[counted.kind == ONE], counted[counted.kind == NONE]
    several = counted[~counted.kind.isin([ONE, NONE])]
    return {
        "statements": len(rows),
        "counted": float(rows.counted.mean()),
        "right_source": float((one.right & (one.said == ONE)).mean()),
        **{f"told_{kind}": float(told.get(kind, np.nan)) for kind in ("either", "both", "none")},
        "right_sources_of_either_and_both": float(several.right.mean()),
        "false_rests_on": float((none.said != NONE).mean()),
    }


def compare(ranked: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for name, of_rival in ranked[ranked.counted].groupby("rival", sort=False):
        is_none = of_rival.kind == NONE
        rows.append({
            "rival": name, "top-1": of_rival[of_rival.kind == ONE].right.mean(),
            "some or none (AUROC)": auroc(of_rival[~is_none].score.to_numpy(),
                                          of_rival[is_none].score.to_numpy()),
            "token-forwards": of_rival.token_forwards.mean(),
        })  # fmt: skip
    return pd.DataFrame(rows).set_index("rival")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--num", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--rivals", action="store_true")
    options = parser.parse_args()
    model = load_model(options.model, dtype="fp32")
    rows, ranked = measure(model, options.num, options.seed, options.draws, options.rivals)
    print(pd.crosstab(rows.kind[rows.counted], rows.said[rows.counted]))
    print(json.dumps({name: round(value, 4) for name, value in summary(rows).items()}, indent=1))
    if options.rivals:
        print(compare(ranked).round(3).to_string())


if __name__ == "__main__":
    main()
