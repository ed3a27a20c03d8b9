"""U8 to U14: what decides how far a model carries: depth and rate, the end of training, the
cooldown."""

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
FEWEST = 6
"""With fewer models that know k = 2 and k = 4, a case is void."""

LARGE_KS = (8, 12)
NUM_SEEDS_OF_LARGE = 3
COST = AtLeast(0.05)

Cells = dict[str, list[Model]]
"""The models of each cell of study/Makefile's `parity_reach`, by name: four_late, say."""

CELLS = (
    *(f"{depth}_{end}" for depth in DEPTHS for end in ("mastery", "late")),
    *("once", "uncooled", "twice", "four_times"),
)


def read_cells() -> Cells:
    return {cell: read_models(STORED / f"reach_{cell}") for cell in CELLS}


def judge(cells: Cells) -> dict[str, Finding]:
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
    """Say whether a model knows both k where it was trained."""
    return bool((model.accuracy.loc[[2, 4], 50] >= 0.99).all())


def judge_larger_k(cells: Cells, end: str) -> Finding:
    """U8, U9: k = 4 loses more than k = 2."""
    outcomes = {}
    for depth in DEPTHS:
        models = cells[f"{depth}_{end}"]
        values = [fall(model, 4) - fall(model, 2) for model in models if counts(model)]
        finished = len(models) >= NUM_SEEDS
        outcomes[f"{depth} layers"] = decide(COST, values, finished=finished, fewest=FEWEST)
    return Finding(verdict_over(outcomes.values(), len(DEPTHS)), outcomes)


def judge_past_mastery(cells: Cells) -> Finding:
    """U10: k = 4 loses more after 5,000 steps than at mastery."""
    outcomes = {
        f"{depth} layers": compare_falls(cells[f"{depth}_late"], cells[f"{depth}_mastery"])
        for depth in DEPTHS
    }
    return Finding(verdict_over(outcomes.values(), len(DEPTHS)), outcomes)


def judge_depth(cells: Cells) -> Finding:
    """U11: k = 4 loses more in two layers than in four."""
    outcome = compare_falls(cells["two_late"], cells["four_late"])
    return Finding(verdict_over([outcome], 1), {"5,000 steps": outcome})


def compare_falls(models: list[Model], others: list[Model]) -> Outcome:
    """Compare the fall of k = 4, by seed, of the seeds of which both models count."""
    other_of = {model.trial.seed: model for model in others if counts(model)}
    values = [
        fall(model, 4) - fall(other_of[model.trial.seed], 4)
        for model in models
        if counts(model) and model.trial.seed in other_of
    ]
    finished = min(len(models), len(others)) >= NUM_SEEDS
    return decide(COST, values, finished=finished, fewest=FEWEST)


# --- K_train = 8 and 12, three seeds --------------------------------------------------------------


def judge_pairs(
    cells: Cells, before: str, after: str, bound: float, measure: Callable[[Model], float]
) -> Finding:
    """U12 to U14: a measure in one cell exceeds that in another by `bound`, on each seed."""
    outcomes = {}
    for train_k in LARGE_KS:
        firsts = [model for model in cells[before] if model.train_k == train_k]
        seconds = {model.trial.seed: model for model in cells[after] if model.train_k == train_k}
        values = [
            measure(first) - measure(seconds[first.trial.seed])
            for first in firsts
            if first.mastered and first.trial.seed in seconds and seconds[first.trial.seed].mastered
        ]
        outcomes[f"K_train = {train_k}"] = decide_by_each_seed(
            bound,
            values,
            finished=min(len(firsts), len(seconds)) >= NUM_SEEDS_OF_LARGE,
            num_seeds=NUM_SEEDS_OF_LARGE,
        )
    return Finding(verdict_over(outcomes.values(), len(LARGE_KS)), outcomes)
