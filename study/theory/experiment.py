"""Run a theory experiment: learn on lengths L/2 … L, measure risk up to 8L next to both bounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from olmo_sparsity.base.progress import Progress, format_duration
from olmo_sparsity.base.provenance import provenance
from olmo_sparsity.base.work_folder import WorkFolder
from study.tables_of_rows import write_rows
from study.theory import bounds
from study.theory.learning import learn, training_lengths
from study.theory.planted import Planted, locality, regularity, translated_shapes
from study.theory.results import TABLE, Row, cases_table, summarise
from study.theory.settings import (
    CaseConfig,
    TheoryConfig,
    build_planted,
    load_theory_config,
    setting_of,
)
from study.theory.sparse_attention import KeyShape, build_layout, sampled_risk


def run(config_path: str, overrides: list[str]) -> None:
    config = load_theory_config(config_path, overrides)
    # Built once before training, to fail early.
    plans = [_plan(config, case) for case in config.cases]
    work = WorkFolder(Path(config.output), "output")
    with work.opened():
        work.identify(asdict(replace(config, output="")))
        _compute(config, plans, " ".join(["python -m study.theory", config_path, *overrides]))


def _compute(config: TheoryConfig, plans: list[_Plan], command: str) -> None:
    started, cpu_started = time.perf_counter(), time.process_time()
    rows: list[Row] = []
    num_steps = config.learning.num_steps
    with Progress("theory", total=len(plans) * num_steps, unit="steps") as progress:
        for index, plan in enumerate(plans):
            rows += _run_case(config, plan, progress, index * num_steps)
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    meta = {
        "command": command,
        "config": asdict(config),
        **provenance(f"{torch.get_num_threads()} threads"),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
    }
    write_rows(Path(config.output) / TABLE, rows, meta)
    print(cases_table(summarise(rows), ["attention"]))
    print(f"{len(rows):,} risks in {format_duration(seconds)}: {config.output}/table.parquet")


@dataclass(frozen=True)
class _Plan:
    case: CaseConfig
    train_length: int
    planted: Planted
    shape: KeyShape
    local_span: int
    """L_local that data and class both satisfy, in tokens."""

    eta: Callable[[int], float]
    """η at a length, in tokens."""

    uniform_placement: bool


def _plan(config: TheoryConfig, case: CaseConfig) -> _Plan:
    setting, planted = setting_of(case), build_planted(config, case)
    k = case.attention_places or case.num_places
    train_length = case.train_length or config.train_length
    longest = train_length * max(config.test_multiples)
    lengths = [*training_lengths(train_length), longest]
    window = {
        "local": config.local_span,
        "coupled": config.coupled_window,
        "trained": train_length,
        "everywhere": train_length,
        "tokens": 1,
    }[setting.keys]
    shape = KeyShape(
        k,
        window,
        distant="initial" if setting.keys == "everywhere" else "zero",
        relative=setting.keys != "tokens",
    )
    build_layout(planted.ids(longest), shape)  # fails early if it does not fit
    if setting.coupled:
        # In ID order an ID covers k tokens, and S* is one uniformly drawn ID: a span of 1. η counts
        # in IDs.
        regular_law = translated_shapes([(0,)])
        span = config.coupled_window * case.num_places
    else:
        regular_law, span = planted.law, locality(planted.law, lengths)
        reach = longest if setting.keys in ("everywhere", "tokens") else window
        span = max(span, reach if k > 1 else 1)
    # Any L_local from the true span to L/4 is valid. The largest gives the smallest η, and is the
    # choice in the answer to the reviewers.
    span = max(span, train_length // 4)
    per_id = case.num_places if setting.coupled else 1

    @cache
    def eta(length: int) -> float:
        return regularity(regular_law, length // per_id, max(1, span // per_id))

    uniform = setting.places != "drifting"
    return _Plan(case, train_length, planted, shape, span, eta, uniform)


def _run_case(
    config: TheoryConfig, plan: _Plan, progress: Progress, steps_before: int
) -> list[Row]:
    case = plan.case
    title = f"{case.setting} k={case.num_places} {case.objective}"
    model = learn(
        plan.planted,
        plan.shape,
        plan.train_length,
        case.objective,
        config.learning,
        config.seeds,
        report=lambda step, risk: progress.update(
            steps_before + step, case=title, risk=f"{risk:.4f}"
        ),
    )
    trained_on = training_lengths(plan.train_length)
    lengths = sorted({*trained_on, *(plan.train_length * m for m in config.test_multiples)})
    risks = {
        length: sampled_risk(model, plan.planted, length, config.num_strings, config.seeds)
        for length in lengths
    }
    training_risks_GR = np.stack([risks[length].mean_R for length in trained_on])
    rows = []
    for length, risk in risks.items():
        for replica, seed in enumerate(config.seeds):
            risks_G = training_risks_GR[:, replica]
            deltas = float(risks_G.mean()), float(risks_G.max())
            rows.append(
                Row(
                    model="attention",
                    setting=case.setting,
                    num_places=case.num_places,
                    attention_places=plan.shape.num_places,
                    train_length=plan.train_length,
                    objective=case.objective,
                    marker_rate=float(1 - plan.planted.background_V[0]),
                    seed=seed,
                    length=length,
                    risk=float(risk.mean_R[replica]),
                    low=float(risk.low_R[replica]),
                    high=float(risk.high_R[replica]),
                    **bounds.both_bounds(
                        plan.train_length,
                        length,
                        plan.local_span,
                        deltas,
                        plan.eta,
                        uniform_placement=plan.uniform_placement,
                    ),
                )
            )
    return rows
