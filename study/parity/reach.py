"""Judge U8 to U14: what decides how far beyond the trained length a model is accurate. Depth and
rate, the end of training, or the cooldown?"""

from __future__ import annotations

from collections.abc import Callable

from study.parity.models import STORED, Model, fall, known_at, read_models, slope_at_500
from study.parity.verdicts import (
    AtLeast,
    Finding,
    Outcome,
    decide,
    decide_by_each_seed,
    verdict_over,
)

DEPTHS = ("four", "two")
NUM_SEEDS = 10
FEWEST_MODELS = 6
"""With fewer models that know k = 2 and k = 4, a case is void."""

LARGE_KS = (8, 12)
NUM_SEEDS_OF_LARGE_KS = 3

LARGER_FALL = AtLeast(0.05)
"""The rule of U8 to U11, on differences of two falls in accuracy."""

Cells = dict[str, list[Model]]
"""The models of each cell of study/Makefile's `parity_reach`, by name: four_late, say."""

CELLS = (
    *(f"{depth}_{end}" for depth in DEPTHS for end in ("mastery", "late")),
    *("once", "uncooled", "twice", "four_times"),
)


def read_cells() -> Cells:
    """Read the stored models of all cells."""
    return {cell: read_models(STORED / f"reach_{cell}") for cell in CELLS}


def judge(cells: Cells) -> dict[str, Finding]:
    """Judge U8 to U14 by the models of all cells."""
    return {
        "U8": judge_larger_k(cells, "mastery"),
        "U9": judge_larger_k(cells, "late"),
        "U10": judge_past_mastery(cells),
        "U11": judge_depth(cells),
        "U12": judge_pairs(cells, "once", "four_times", 0.05, lambda model: known_at(model, 500)),
        "U13": judge_pairs(cells, "once", "uncooled", 0.05, lambda model: known_at(model, 200)),
        "U14": judge_pairs(cells, "once", "four_times", 0.02, slope_at_500),
    }


# --- K_train = 4, ten seeds -----------------------------------------------------------------------


def counts(model: Model) -> bool:
    """Return whether a model knows both k at the trained length."""
    return bool((model.accuracy.loc[[2, 4], 50] >= 0.99).all())


def judge_larger_k(cells: Cells, end: str) -> Finding:
    """Judge U8 and U9: from 50 to 200 tokens k = 4 loses more accuracy than k = 2."""
    outcomes = {}
    for depth in DEPTHS:
        models = cells[f"{depth}_{end}"]
        values = [fall(model, 4) - fall(model, 2) for model in models if counts(model)]
        finished = len(models) >= NUM_SEEDS
        outcomes[f"{depth} layers"] = decide(
            LARGER_FALL, values, finished=finished, fewest=FEWEST_MODELS
        )
    return Finding(verdict_over(outcomes.values(), len(DEPTHS)), outcomes)


def judge_past_mastery(cells: Cells) -> Finding:
    """Judge U10: k = 4 loses more after 5,000 steps than at mastery."""
    outcomes = {
        f"{depth} layers": compare_falls(cells[f"{depth}_late"], cells[f"{depth}_mastery"])
        for depth in DEPTHS
    }
    return Finding(verdict_over(outcomes.values(), len(DEPTHS)), outcomes)


def judge_depth(cells: Cells) -> Finding:
    """Judge U11: k = 4 loses more in two layers than in four."""
    outcome = compare_falls(cells["two_late"], cells["four_late"])
    return Finding(verdict_over([outcome], 1), {"5,000 steps": outcome})


def compare_falls(models: list[Model], others: list[Model]) -> Outcome:
    """Compare the fall of k = 4 with that in another cell, on seeds of which both models count."""
    other_by_seed = {model.trial.seed: model for model in others if counts(model)}
    values: list[float] = []
    for model in models:
        other = other_by_seed.get(model.trial.seed)
        if counts(model) and other is not None:
            values.append(fall(model, 4) - fall(other, 4))
    finished = min(len(models), len(others)) >= NUM_SEEDS
    return decide(LARGER_FALL, values, finished=finished, fewest=FEWEST_MODELS)


# --- K_train = 8 and 12, three seeds --------------------------------------------------------------


def judge_pairs(
    cells: Cells, cell: str, other_cell: str, bound: float, measure: Callable[[Model], float]
) -> Finding:
    """Judge U12 to U14: a measure in one cell exceeds that in another by `bound`, on each seed."""
    outcomes = {}
    for train_k in LARGE_KS:
        models = [model for model in cells[cell] if model.train_k == train_k]
        others = [model for model in cells[other_cell] if model.train_k == train_k]
        other_by_seed = {model.trial.seed: model for model in others}
        values: list[float] = []
        for model in models:
            other = other_by_seed.get(model.trial.seed)
            # A pair counts only if both have mastered their k.
            if other is not None and model.mastered and other.mastered:
                values.append(measure(model) - measure(other))
        outcomes[f"K_train = {train_k}"] = decide_by_each_seed(
            bound,
            values,
            finished=min(len(models), len(other_by_seed)) >= NUM_SEEDS_OF_LARGE_KS,
            num_seeds=NUM_SEEDS_OF_LARGE_KS,
        )
    return Finding(verdict_over(outcomes.values(), len(LARGE_KS)), outcomes)
