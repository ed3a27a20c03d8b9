"""What a measurement will cost: counted exactly, and timed on a few blocks."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity import estimate_cost, measure
from olmo_sparsity.analysis.inputs.documents import Documents
from olmo_sparsity.analysis.measurement import estimate as module
from olmo_sparsity.analysis.measurement import measurement
from olmo_sparsity.analysis.measurement.estimate import (
    _counting,
    estimate,
    losses_forwards,
    within_budget,
)
from olmo_sparsity.analysis.measurement.measurement import run
from olmo_sparsity.analysis.measurement.parts import Parts
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.targets import sampled_blocks
from olmo_sparsity.analysis.settings import Settings
from tests.support.measurements import FEW, VOCAB, loaded, untrained


@pytest.fixture(scope="module")
def model() -> Any:
    return untrained(n_layers=2)


def documents(*lengths: int, seed: int = 0) -> Documents:
    draws = np.random.default_rng(seed)
    return Documents.of([draws.integers(0, VOCAB, length) for length in lengths])


OF_WHOLE: dict[str, Any] = {"long": "all", "short": 6, "stride": 4}
WHOLE = Settings(**OF_WHOLE, ks=(1, 4), share=0.3, min_gap=0.0, sets=("gap", "bigram"), halves=4)
KINDS = {
    "windows": replace(FEW, prefix_ids=(3,)),
    "whole documents": replace(WHOLE, prefix_ids=(3, 4)),
    "isolated": replace(WHOLE, far_states="isolated", halves=0),
    "every rule": replace(FEW, selectors=("add_one", "gradient", "attention", "nearest")),
}


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_token_forwards_are_counted_exactly(model: Any, settings: Settings) -> None:
    plan = Plan.of(loaded(model), documents(60, 45, 52, 60, 48), replace(settings, sample=0.6))
    targets = pd.DataFrame(
        {"document": 1, "target": [22, 25, 40], "far_part": ["document", "placebo", "document"]}
    )
    for number in plan.measured:
        before = plan.scorer.token_forwards
        plan.scorer._last = None
        plan.losses(number)
        blocks = sampled_blocks(plan.documents[number], plan.settings)
        assert losses_forwards(plan, number, blocks) == plan.scorer.token_forwards - before
    counting, before = _counting(plan), plan.scorer.token_forwards
    plan.scorer._last = None
    plan.recovery(1, targets)
    counting.recovery(1, targets)
    assert counting.scorer.token_forwards == plan.scorer.token_forwards - before > 0


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        (FEW, {"long": 24, "short": 8, "share": 0.1}),
        (WHOLE, {}),
        (WHOLE, {"sample": 0.4, "sets": ("gap",)}),
    ],
)
def test_the_estimate_is_near_what_is_spent(
    model: Any,
    settings: Settings,
    changed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trial ends with the documents, and not by a clock."""
    monkeypatch.setattr(module, "TRIED_S", 1e6)
    texts = documents(*[48] * 4, 10, seed=1)
    settings = replace(settings, **changed)
    plan, tried = (Plan.of(loaded(model), texts, settings) for _ in range(2))
    text = str(estimate(tried))
    again = str(estimate_cost(measure, loaded(model), texts, **settings.given, prefix="none"))
    assert again.splitlines()[1:5] == text.splitlines()[1:5]
    assert text.startswith("induction: loss ")
    assert "1 too short" in text
    found = run(plan, tmp_path)
    (said,) = re.findall(r"targets +([\d,]+) with both losses", text)
    assert int(said.replace(",", "")) == len(found.losses)
    (said,) = re.findall(r"token-forwards +about ([\d.e+]+), [\d,]+ for each evaluated", text)
    assert 0.7 < float(said) / plan.scorer.token_forwards < 1.3


def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 1,000 token-forwards a second, on which a trial takes no time."""
    really = module._Trial.of
    speeds = {"speed": 1000.0, "speed_of_targets": 1000.0}
    monkeypatch.setattr(module._Trial, "of", lambda plan: replace(really(plan), **speeds))
    still = SimpleNamespace(monotonic=lambda: 0.0, perf_counter=time.perf_counter)
    monkeypatch.setattr(module, "time", still)


def test_a_budget_chooses_the_sample_once_for_all_processes(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = documents(*[100] * 5, seed=2)
    known_speed(monkeypatch)
    settings = replace(WHOLE, max_targets="all")
    every = Plan.of(loaded(model), texts, settings)
    whole = module._Trial.of(every).cost(every).forwards
    plan = Plan.of(loaded(model), texts, replace(settings, budget=f"{whole / 1000 / 5:.1f}s"))
    assert 0.8 < estimate(plan).token_forwards * 5 / whole < 1.2
    first = within_budget(plan, tmp_path / "a", (0, 1))
    assert 0.02 < first.settings.sample < 0.3
    two = within_budget(plan, tmp_path / "b", (1, 2))
    assert first.settings.sample < two.settings.sample < 0.6
    few = replace(plan, settings=replace(plan.settings, sample=0.01))
    assert within_budget(few, tmp_path / "c").settings.sample == 0.01
    monkeypatch.setattr(module._Trial, "of", None)  # not asked again
    assert within_budget(plan, tmp_path / "b", (0, 2)).settings == two.settings
    before = first.scorer.token_forwards
    results = run(first, tmp_path / "a")
    assert results.meta.windows["sample"] == first.settings.sample
    assert len(results.losses) < 0.4 * 5 * 88
    assert first.scorer.token_forwards - before < 1.2 * whole / 5


def test_a_measurement_ends_with_its_budget_and_goes_on_with_the_next(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each document takes a second here, and the estimate says that all are done at once."""
    texts, now = documents(*[60] * 12, seed=2), [0.0]
    known_speed(monkeypatch)
    monkeypatch.setattr(module._Trial, "cost", lambda *_: SimpleNamespace(seconds=0.0))
    monkeypatch.setattr(
        measurement, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]})
    )
    really = Parts.write

    def slow(*given: Any) -> None:
        now[0] += 1
        really(*given)

    monkeypatch.setattr(Parts, "write", slow)
    plan = Plan.of(loaded(model), texts, replace(WHOLE, budget="10s"))
    first = run(plan, tmp_path)
    assert now == [9.0]
    assert first.losses.document.nunique() == 6
    assert first.missing.startswith("partial: 6 of 12")
    assert len(run(plan, tmp_path).targets) >= len(first.targets)
