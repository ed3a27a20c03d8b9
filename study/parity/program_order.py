"""U22 and U23: variable assignment in program order, where a name means its latest assignment."""

from __future__ import annotations

from study.parity.models import STORED, Model, read_models
from study.parity.verdicts import (
    CONFIRMED,
    REFUTED,
    UNDECIDED,
    UNFINISHED,
    VOID,
    Finding,
    Outcome,
    decide_by_each_seed,
)
from study.tasks.results import wilson

NUM_SEEDS = 3
CHAIN = 5
TRAINED_STATEMENTS = 5
TESTED_STATEMENTS = 50
LEARNT = 0.95
SOLVED = 0.99
VERDICTS = {CONFIRMED: "yes", REFUTED: "no", UNDECIDED: "open"}


def read_program_order() -> list[Model]:
    return read_models(STORED / "program_order")


def judge(models: list[Model]) -> dict[str, Finding]:
    ppc = [model for model in models if model.trial.scheme == "ppc"]
    pose = [model for model in models if model.trial.scheme == "pose"]
    return {"U22": judge_solved(ppc), "U23": judge_difference(ppc, pose)}


def exact_match(model: Model, num_statements: int) -> float:
    return float(model.accuracy.loc[CHAIN, num_statements])


def judge_solved(ppc: list[Model]) -> Finding:
    """U22: PPC solves fifty statements on each seed."""
    values = [exact_match(model, TESTED_STATEMENTS) for model in ppc]
    finished = len(ppc) >= NUM_SEEDS
    outcome = decide_by_each_seed(SOLVED, values, finished=finished, num_seeds=NUM_SEEDS)
    return Finding(VERDICTS.get(outcome.verdict, outcome.verdict), {"PPC": outcome})


def judge_difference(ppc: list[Model], pose: list[Model]) -> Finding:
    """U23: PoSE is below PPC at fifty statements, every interval apart."""
    of_ppc = tuple(exact_match(model, TESTED_STATEMENTS) for model in ppc)
    of_pose = tuple(exact_match(model, TESTED_STATEMENTS) for model in pose)
    num_learnt = sum(exact_match(model, TRAINED_STATEMENTS) >= LEARNT for model in pose)
    verdict = UNDECIDED
    if min(len(ppc), len(pose)) < NUM_SEEDS:
        verdict = UNFINISHED
    elif num_learnt < 2:
        verdict = VOID
    elif highest_end(pose) < lowest_end(ppc):
        verdict = CONFIRMED
    elif sum(of_pose) / len(of_pose) >= sum(of_ppc) / len(of_ppc):
        verdict = REFUTED
    outcomes = {"PPC": Outcome(verdict, of_ppc), "RoPE + PoSE": Outcome(verdict, of_pose)}
    return Finding(VERDICTS.get(verdict, verdict), outcomes)


def highest_end(models: list[Model]) -> float:
    """Return the highest upper end of the models' Wilson intervals at fifty statements."""
    return max(
        wilson(exact_match(model, TESTED_STATEMENTS), model.num_samples)[1] for model in models
    )


def lowest_end(models: list[Model]) -> float:
    """Return the lowest lower end of the models' Wilson intervals at fifty statements."""
    return min(
        wilson(exact_match(model, TESTED_STATEMENTS), model.num_samples)[0] for model in models
    )
