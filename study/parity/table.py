"""Judge U1 to U7: the paper's table, with K_train of 4 to 12, tested up to ten times the trained
length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from study.pages.stored import ROOT
from study.parity.models import (
    NAMES,
    STORED,
    Model,
    degradation,
    degradation_though_known,
    known_at,
    read_models,
    select,
    slope_at_500,
)
from study.parity.verdicts import (
    CONFIRMED,
    REFUTED,
    UNDECIDED,
    UNFINISHED,
    AtLeast,
    Below,
    Falls,
    Finding,
    Outcome,
    Rule,
    decide,
    format_share,
    verdict_over,
)
from study.tables_of_rows import markdown
from study.tasks.settings import ExperimentSettings, load_settings

SCHEMES = ("pose", "rope")
SHOWN_LENGTHS = (50, 200, 500)

NEEDED = 4
"""Number of the five K_train that decide a verdict."""


@dataclass(frozen=True)
class Claim:
    """What is measured of each model of a scheme, and the rule over its seeds."""

    scheme: str
    measure: Callable[[Model], float | None]
    """Returns None if the model does not count."""

    rule: Rule


REACH = AtLeast(0.9, floor=0.8)
CLAIMS = {
    "U2": Claim("pose", lambda model: known_at(model, 200), REACH),
    "U3": Claim("pose", lambda model: known_at(model, 500), REACH),
    "U4": Claim("pose", degradation, AtLeast(0.1)),
    "U5": Claim("pose", degradation_though_known, AtLeast(0.05)),
    "U6": Claim("rope", lambda model: known_at(model, 500), Below(0.6)),
    "U7": Claim("pose", slope_at_500, Falls(0.02)),
}


def table_settings() -> ExperimentSettings:
    """Return the settings with which the table's models were trained."""
    return load_settings(ROOT / "study/configs/tasks/sparse_parity_table.yaml", [])


def read_table() -> list[Model]:
    return read_models(STORED / "table")


def judge(models: list[Model], train_ks: Sequence[int], num_seeds: int) -> dict[str, Finding]:
    """Judge U1 to U7 by all finished models, of `num_seeds` for each scheme and K_train."""
    findings = {"U1": judge_learnt(models, train_ks, num_seeds)}
    for name, claim in CLAIMS.items():
        outcomes = {
            case_name(claim.scheme, k): judge_case(
                claim, select(models, claim.scheme, k), num_seeds
            )
            for k in train_ks
        }
        findings[name] = Finding(verdict_over(outcomes.values(), NEEDED), outcomes)
    return findings


def case_name(scheme: str, train_k: int) -> str:
    """Return how tables and pages name a case."""
    return f"{NAMES[scheme]}, K_train = {train_k}"


def judge_case(claim: Claim, models: Sequence[Model], num_seeds: int) -> Outcome:
    """Apply a claim's rule to the models of one K_train. Those that have not mastered do not
    count."""
    measured = [claim.measure(model) for model in models if model.mastered]
    values = [value for value in measured if value is not None]
    return decide(claim.rule, values, finished=len(models) >= num_seeds)


def judge_learnt(models: list[Model], train_ks: Sequence[int], num_seeds: int) -> Finding:
    """Judge U1: confirmed if all but one seed master their k, refuted if at most one does."""
    outcomes: dict[str, Outcome] = {}
    verdicts = set()
    for scheme in SCHEMES:
        scheme_outcomes = {
            case_name(scheme, k): learnt_outcome(select(models, scheme, k), num_seeds)
            for k in train_ks
        }
        outcomes |= scheme_outcomes
        verdicts.add(verdict_over(scheme_outcomes.values(), NEEDED))
    if UNFINISHED in verdicts:
        return Finding(UNFINISHED, outcomes)
    # Both schemes must agree.
    return Finding(verdicts.pop() if len(verdicts) == 1 else "open", outcomes)


def learnt_outcome(models: Sequence[Model], num_seeds: int) -> Outcome:
    """Return whether the models of one scheme and K_train have mastered their k."""
    learnt = tuple(float(model.mastered) for model in models)
    num_learnt = sum(learnt)
    verdict = UNDECIDED
    if len(models) < num_seeds:
        verdict = UNFINISHED
    elif num_learnt >= num_seeds - 1:
        verdict = CONFIRMED
    elif num_learnt <= 1:
        verdict = REFUTED
    return Outcome(verdict, learnt)


def format_table(models: list[Model], scheme: str, lengths: Sequence[int]) -> str:
    """Write the paper's table: a line for each K_train and length, a column for each k of the test;
    means and intervals over the models that have mastered their k."""
    mastered = [model for model in models if model.trial.scheme == scheme and model.mastered]
    test_ks = sorted({k for model in mastered for k in model.accuracy.index})
    lines = [["K_train", "models", "tokens", *(f"k = {k}" for k in test_ks)]]
    for train_k in sorted({model.train_k for model in mastered}):
        seeds = select(mastered, scheme, train_k)
        for length in lengths:
            cells = [
                format_share([model.accuracy.loc[k, length] for model in seeds]) for k in test_ks
            ]
            lines.append([str(train_k), str(len(seeds)), str(length), *cells])
    return markdown(lines)
