"""Run a theory experiment: learn on lengths L/2 … L, measure risk up to 8L beside both bounds.

Place in the flow: settings → planted data → learning → risks, bounds → results → figure.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from olmo_sparsity.errors import ConfigError
from olmo_sparsity.progress import Progress, format_duration
from olmo_sparsity.theory import bounds
from olmo_sparsity.theory.cases import build_planted, setting_of
from olmo_sparsity.theory.learning import learn, training_lengths
from olmo_sparsity.theory.planted import (
    Planted,
    PositionLaw,
    locality,
    regularity,
    translated_shapes,
)
from olmo_sparsity.theory.results import Row, write_results
from olmo_sparsity.theory.risks import Risk, can_transfer, sampled_risk, transfer_risk
from olmo_sparsity.theory.settings import CaseConfig, TheoryConfig, load_theory_config
from olmo_sparsity.theory.sparse_attention import KeyShape, SparseAttention, build_layout
from olmo_sparsity.theory.worst_case import search_worst_cases
from olmo_sparsity.versions import provenance


def run(config_path: str, overrides: list[str]) -> None:
    config = load_theory_config(config_path, overrides)
    started, cpu_started = time.perf_counter(), time.process_time()
    rows: list[Row] = []
    # Build everything once before training, to fail early.
    plans = [_plan(config, case) for case in config.cases]
    for case in config.bridge.cases:
        build_planted(config, case)
    # Also fail early if the outputs cannot be written.
    for folder in (Path(config.output), Path(config.figure).parent):
        folder.mkdir(parents=True, exist_ok=True)
    num_steps = config.learning.num_steps
    with Progress("theory", total=len(plans) * num_steps, unit="steps") as progress:
        for index, plan in enumerate(plans):
            rows += _run_case(config, plan, progress, index * num_steps)
    if config.worst_case.seeds:
        rows += search_worst_cases(config.worst_case, config.test_multiples, config.bound_constant)
    if config.bridge.cases:  # imported here, as OLMo takes seconds to load
        from olmo_sparsity.theory.bridge import run_bridge

        rows += run_bridge(config)
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    meta = _meta(config, config_path, overrides)
    meta |= {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds, 1)}
    write_results(config.output, rows, meta)
    (Path(config.output) / "config.yaml").write_text(
        OmegaConf.to_yaml(OmegaConf.structured(config))
    )
    from olmo_sparsity.theory.figure import draw

    for path in draw(config.output, config.figure):
        print(path)
    print(f"{len(rows):,} risks in {format_duration(seconds)}: {config.output}/table.parquet")


@dataclass(frozen=True)
class _Plan:
    case: CaseConfig
    train_length: int
    planted: Planted
    shape: KeyShape
    local_span: int
    """L_local that data and class both satisfy, in tokens."""

    regular_law: PositionLaw
    """The law of the planted places, counted in position IDs."""

    uniform_placement: bool
    etas: dict[int, float] = field(default_factory=dict)


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
        far="initial" if setting.keys == "everywhere" else "zero",
        relative=setting.keys != "tokens",
    )
    build_layout(planted.ids(longest), shape)  # fails early if it does not fit
    if setting.coupled:
        # In ID order an ID covers k tokens, and S* is one uniformly drawn ID: a span of 1.
        regular_law = translated_shapes([(0,)], [1.0])
        span = config.coupled_window * case.num_places
    else:
        regular_law, span = planted.law, locality(planted.law, lengths)
        reach = longest if setting.keys in ("everywhere", "tokens") else window
        span = max(span, reach if k > 1 else 1)
    # Any L_local from the true span to L/4 is valid. The largest gives the smallest η, and is the
    # choice in the answer to the reviewers.
    span = max(span, train_length // 4)
    uniform = setting.places != "drifting"
    return _Plan(case, train_length, planted, shape, span, regular_law, uniform)


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
    risks = {length: _measure(config, plan, model, length) for length in lengths}
    training_risks_GR = np.stack([risks[length].mean_R for length in trained_on])
    rows = []
    for length, risk in risks.items():
        for replica, seed in enumerate(config.seeds):
            delta_mean = float(training_risks_GR[:, replica].mean())
            delta_worst = float(training_risks_GR[:, replica].max())
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
                    method=risk.method,
                    delta_mean=delta_mean,
                    delta_worst=delta_worst,
                    local_span=plan.local_span,
                    **_bounds(config, plan, length, delta_mean, delta_worst),
                )
            )
    return rows


def _measure(config: TheoryConfig, plan: _Plan, model: SparseAttention, length: int) -> Risk:
    if can_transfer(model, plan.planted):
        return transfer_risk(model, plan.planted, length)
    return sampled_risk(model, plan.planted, length, config.num_strings, config.seeds)


def _bounds(
    config: TheoryConfig, plan: _Plan, length: int, delta_mean: float, delta_worst: float
) -> dict[str, Any]:
    """Both bounds, or the reason why they do not apply."""
    if length < plan.train_length:
        return {"refusal": "a training length"}
    values: dict[str, Any] = {}
    lengths = bounds.Lengths(plan.train_length, length, plan.local_span)
    constant = config.bound_constant
    try:
        lengths.check()
        eta_train = _eta(plan, plan.train_length)
        eta_test = _eta(plan, length)
        values |= {"eta_train": eta_train, "eta_test": eta_test}
        stated = bounds.stated_bound(lengths, delta_mean, eta_train, eta_test, constant=constant)
        values["bound_stated"] = stated.value
        improved = bounds.improved_bound(
            lengths, delta_worst, uniform_placement=plan.uniform_placement, constant=constant
        )
        values["bound_improved"] = improved.value
    except ConfigError as error:
        values["refusal"] = str(error)
    return values


def _eta(plan: _Plan, length: int) -> float:
    per_id = plan.case.num_places if plan.planted.coupled else 1
    if length not in plan.etas:
        local_ids = max(1, plan.local_span // per_id)
        plan.etas[length] = regularity(plan.regular_law, length // per_id, local_ids)
    return plan.etas[length]


def _meta(config: TheoryConfig, config_path: str, overrides: list[str]) -> dict[str, Any]:
    return {
        "command": " ".join(["olmo-sparsity", "theory", config_path, *overrides]),
        "seeds": config.seeds,
        "train_length": config.train_length,
        "test_multiples": config.test_multiples,
        "local_span": config.local_span,
        "bound_constant": config.bound_constant,
        "config": json.loads(json.dumps(OmegaConf.to_container(OmegaConf.structured(config)))),
    } | provenance(f"{torch.get_num_threads()} threads")
