"""How often verdicts on sources are right, where what a statement rests on is known.

    python -m study.benchmarks.sources runs/sources [--num 400] [--seed 1] [--draws 8]
        [--keep TABLE.json] [--swapped] [--any-decoys]

Exercises of the laboratory (laboratory.py), held out from training. Counted are statements whose
things the model itself writes: each is its most likely token. Names and verbs stand in the
question. Decoys are sources of other exercises without a name of the answer, which a text of one's
own can hardly have by chance; with `--any-decoys` they may have one, of 32, and so contradict the
answer. `--swapped`: the sources of another exercise, likewise without these names, stand in place
of an exercise's own, so that statements rest on none of them; those known by heart are left out.
"""

from __future__ import annotations

import argparse
import json
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from olmo_sparsity import attribute, load_model
from olmo_sparsity.analysis.options import MIN_GAP
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.sources.attribution import Attribution
from study.benchmarks.laboratory import (
    NONE,
    ONE,
    THINGS,
    WORDS,
    Exercise,
    exercises,
    names_in,
)

MOST_DECOYS = 60
"""Sources of the first so many exercises are decoys."""


@torch.no_grad()
def writes(model: LoadedModel, found: Attribution) -> list[tuple[bool, bool]]:
    """Whether all of each statement is what the model writes, given what stands before it, and
    whether its things are."""
    block = found.layout.block
    tokens_1L = torch.from_numpy(block.tokens[None]).to(model.device)
    positions_1L = torch.arange(tokens_1L.shape[1], device=model.device)[None]
    hidden_1LD = model.model.hidden(tokens_1L, positions_1L)
    best = model.model.unembed(hidden_1LD)[0].argmax(-1)[block.num_before - 1 : -1].cpu().numpy()
    right_W = best == block.targets_W
    things = [model.tokenizer.token_to_id(thing) for thing in THINGS]
    things_W = right_W | ~np.isin(block.targets_W, things)
    spans = [slice(*span) for span in found.layout.statements]
    return [(bool(right_W[span].all()), bool(things_W[span].all())) for span in spans]


# --- tables ---------------------------------------------------------------------------------------


def decoys_of(one: Exercise, drawn: list[Exercise], any_names: bool = False) -> list[str]:
    others = [other for other in drawn[:MOST_DECOYS] if other is not one]
    texts = [text for other in others for text in other.sources.values()]
    return [text for text in texts if any_names or not names_in(text) & names_in(one.answer)]


def asked(
    model: LoadedModel, one: Exercise, decoys: list[str], draws: int, seed: int
) -> Attribution:
    with redirect_stderr(StringIO()):
        return attribute(
            model,
            sources=one.sources,
            question=one.question,
            answer=one.statements,
            decoys=decoys,
            draws=draws,
            seed=seed,
        )


def beside_others(one: Exercise, number: int, drawn: list[Exercise]) -> Exercise:
    """The exercise with the sources of another, which are not its decoys."""
    others = drawn[MOST_DECOYS:]
    for other in others[number % len(others) :] + others:
        said = names_in(" ".join(other.sources.values()))
        if other is not one and not said & names_in(one.answer):
            return replace(one, sources=other.sources, needs=[[] for _ in one.needs])
    raise ValueError("all others have a name of the answer")


def measure(
    model: LoadedModel,
    drawn: list[Exercise],
    draws: int = 8,
    swapped: bool = False,
    any_decoys: bool = False,
) -> pd.DataFrame:
    """A row for each statement: what it rests on, what the verdict says, whether it is counted,
    whether the model writes all of it, and how many sources are named and how many wrongly."""
    rows = []
    if unknown := {word for word in WORDS if model.tokenizer.token_to_id(word) is None}:
        raise SystemExit(f"the model is of an earlier laboratory, without {', '.join(unknown)}")
    for number, own in enumerate(drawn):
        one = beside_others(own, number, drawn) if swapped else own
        found = asked(model, one, decoys_of(own, drawn, any_decoys), draws, seed=number)
        written = writes(model, found)
        for t, said in enumerate(found.statements.itertuples()):
            same = sorted(said.sources) == one.needs[t]
            named = len(said.sources), len({*said.sources} - {*one.needs[t]})
            rows.append((number, one.kinds[t], said.kind, same, *written[t], said.nats, *named))
    columns = ["exercise", "kind", "said", "right", "whole", "counted", "nats", "named", "wrong"]
    return pd.DataFrame(rows, columns=columns)


def summary(rows: pd.DataFrame) -> dict[str, float]:
    """Of statements that are counted; `all_…` are of all. `none_below`: nearly nothing to tell, and
    so not tested."""
    counted, is_told = rows[rows.counted], rows.kind == rows.said
    told, of_all = is_told[rows.counted].groupby(counted.kind).mean(), is_told.groupby(rows.kind)
    one, none = counted[counted.kind == ONE], counted[counted.kind == NONE]
    several = counted[~counted.kind.isin([ONE, NONE])]
    return {
        "statements": len(rows),
        "counted": float(rows.counted.mean()),
        "whole": float(rows.whole.mean()),
        "right_source": float((one.right & (one.said == ONE)).mean()),
        **{f"told_{kind}": float(told.get(kind, np.nan)) for kind in ("either", "both", "none")},
        "right_sources_of_either_and_both": float(several.right.mean()),
        "false_rests_on": float((none.said != NONE).mean()),
        "wrong_of_named": _share_of_wrong(counted),
        "none_below": float((none.nats < MIN_GAP).mean()),
        **{f"counted_{kind}": of for kind, of in rows.groupby("kind").counted.mean().items()},
        **{f"all_{kind}": of for kind, of in of_all.mean().items()},
    }


def _share_of_wrong(rows: pd.DataFrame) -> float:
    """Of the sources named in an exercise, on average over exercises."""
    of_exercises = rows.groupby("exercise")[["named", "wrong"]].sum()
    return float((of_exercises.wrong / of_exercises.named.clip(lower=1)).mean())


def summary_of_swapped(rows: pd.DataFrame) -> dict[str, float]:
    """Of statements that rested on a source, and of all exercises, whose error rate is held."""
    of_exercises = (rows.said != NONE).groupby(rows.exercise).any()
    rows = rows[rows.kind != NONE]
    return {
        "swapped": len(rows),
        "swapped_rests_on": float((rows.said != NONE).mean()),
        "swapped_exercises": float(of_exercises.mean()),
        "swapped_below": float((rows.nats < MIN_GAP).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--num", type=int, default=400, help="exercises")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="gets the shares of this run (JSON)")
    parser.add_argument("--swapped", action="store_true")
    parser.add_argument("--any-decoys", action="store_true")
    options = parser.parse_args()
    model = load_model(options.model, dtype="fp32")
    drawn = list(exercises(options.num, options.seed))
    rows = measure(model, drawn, options.draws, options.swapped, options.any_decoys)
    counted = rows if options.swapped else rows[rows.counted]
    print(pd.crosstab(counted.kind, counted.said))
    shares = summary_of_swapped(rows) if options.swapped else summary(rows)
    start = "any_" if options.any_decoys else ""
    shares = {f"{start}{name}": round(value, 4) for name, value in shares.items()}
    print(json.dumps(shares, indent=1))
    if options.keep:
        kept = json.loads(options.keep.read_text()) if options.keep.exists() else {}
        name = Path(options.model).name
        kept[name] = kept.get(name, {}) | shares
        options.keep.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
