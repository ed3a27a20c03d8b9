"""Judge U22 and U23: variable assignment in program order, where a name means its latest
assignment."""

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
from study.tasks.results import ShareInterval, wilson

NUM_SEEDS = 3

CHAIN_LENGTH = 5
"""Number of statements from the queried name to its constant: k of the test."""

TRAINED_STATEMENTS = 5
TESTED_STATEMENTS = 50

LEARNT = 0.95
"""Exact match at the trained length from which a PoSE model counts as trained."""

SOLVED = 0.99
"""Exact match at fifty statements from which a seed solves them."""

VERDICTS = {CONFIRMED: "yes", REFUTED: "no", UNDECIDED: "open"}


def read_program_order() -> list[Model]:
    """Read the stored models of both schemes."""
    return read_models(STORED / "program_order")


def judge(models: list[Model]) -> dict[str, Finding]:
    """Judge U22 and U23 by the models of PPC and of RoPE + PoSE."""
    ppc = [model for model in models if model.trial.scheme == "ppc"]
    pose = [model for model in models if model.trial.scheme == "pose"]
    return {"U22": judge_solved(ppc), "U23": judge_difference(ppc, pose)}


def exact_match(model: Model, num_statements: int) -> float:
    """Return the share of programs of this length that a model answers without an error."""
    return float(model.accuracy.loc[CHAIN_LENGTH, num_statements])


def judge_solved(ppc: list[Model]) -> Finding:
    """Judge U22: PPC solves fifty statements on each seed."""
    values = [exact_match(model, TESTED_STATEMENTS) for model in ppc]
    finished = len(ppc) >= NUM_SEEDS
    outcome = decide_by_each_seed(SOLVED, values, finished=finished, num_seeds=NUM_SEEDS)
    return Finding(VERDICTS.get(outcome.verdict, outcome.verdict), {"PPC": outcome})


def judge_difference(ppc: list[Model], pose: list[Model]) -> Finding:
    """Judge U23: PoSE is below PPC at fifty statements, every interval apart."""
    ppc_values = tuple(exact_match(model, TESTED_STATEMENTS) for model in ppc)
    pose_values = tuple(exact_match(model, TESTED_STATEMENTS) for model in pose)
    num_learnt = sum(exact_match(model, TRAINED_STATEMENTS) >= LEARNT for model in pose)
    verdict = UNDECIDED
    if min(len(ppc), len(pose)) < NUM_SEEDS:
        verdict = UNFINISHED
    elif num_learnt < 2:
        verdict = VOID
    elif highest_end(pose) < lowest_end(ppc):
        verdict = CONFIRMED
    elif sum(pose_values) / len(pose_values) >= sum(ppc_values) / len(ppc_values):
        verdict = REFUTED
    outcomes = {"PPC": Outcome(verdict, ppc_values), "RoPE + PoSE": Outcome(verdict, pose_values)}
    return Finding(VERDICTS.get(verdict, verdict), outcomes)


def highest_end(models: list[Model]) -> float:
    """Return the highest upper end of the models' Wilson intervals at fifty statements."""
    return max(_interval(model).high for model in models)


def lowest_end(models: list[Model]) -> float:
    """Return the lowest lower end of the models' Wilson intervals at fifty statements."""
    return min(_interval(model).low for model in models)


def _interval(model: Model) -> ShareInterval:
    return wilson(exact_match(model, TESTED_STATEMENTS), model.num_samples)
