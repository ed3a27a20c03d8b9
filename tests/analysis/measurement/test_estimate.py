"""What a measurement will cost: counted exactly, and timed on a few blocks."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity import estimate_cost, measure
from olmo_sparsity.analysis.measurement import trial as module
from olmo_sparsity.analysis.measurement.counted_cost import count_losses_of_document
from olmo_sparsity.analysis.measurement.estimate import estimate, estimate_untrained
from olmo_sparsity.analysis.measurement.measurement import run
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.target_costs import counting_plan
from olmo_sparsity.analysis.measurement.targets import sampled_blocks
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.text.documents import Documents
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
    "isolated": replace(WHOLE, distant_states="isolated", halves=0),
    "every rule": replace(FEW, selectors=("add_one", "gradient", "attention", "nearest")),
}


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_token_forwards_are_counted_exactly(model: Any, settings: Settings) -> None:
    plan = Plan.of(loaded(model), documents(60, 45, 52, 60, 48), replace(settings, sample=0.6))
    targets = pd.DataFrame(
        {"document": 1, "target": [22, 25, 40], "distant_part": ["document", "placebo", "document"]}
    )
    for number in plan.measured_numbers:
        before = plan.scorer.token_forwards
        plan.scorer._known_text = None
        plan.compute_losses(number)
        blocks = sampled_blocks(plan.documents[number], plan.settings)
        assert count_losses_of_document(plan, number, blocks) == plan.scorer.token_forwards - before
    counting, before = counting_plan(plan), plan.scorer.token_forwards
    plan.scorer._known_text = None
    plan.evaluate_targets(1, targets)
    counting.evaluate_targets(1, targets)
    assert counting.scorer.token_forwards == plan.scorer.token_forwards - before > 0


def test_gpu_hours_of_an_untrained_model_are_its_forwards_by_the_speed(model: Any) -> None:
    plan = Plan.of(loaded(model), documents(60, 45, 52, 60, 48), FEW)
    without_speed = estimate_untrained(plan)
    assert without_speed.gpu_hours is None
    with_speed = estimate_untrained(plan, "50")
    assert with_speed.forwards == without_speed.forwards > 0
    assert with_speed.gpu_hours == pytest.approx(with_speed.forwards / 50 / 3600)


def test_the_induction_check_is_that_of_the_measurement_or_is_said_to_be_smaller(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.of(loaded(model), documents(*[48] * 4, seed=1), replace(FEW, min_gap=0.0))
    measured = plan.run_induction_check()
    text = str(estimate(plan))
    assert (
        f"loss {measured['loss_first']:.2f} on a passage, {measured['loss_repeated']:.2f}" in text
    )
    assert "tried on" not in text
    monkeypatch.setattr(module, "TRIED_S", 0.0)
    text = str(estimate(plan))
    num_passages, length = measured["num_passages"], measured["passage_length"]
    assert "tried on 2 passages of" in text
    assert f"the measurement reads {num_passages} of {length} and may find another drop" in text
    assert "copies little" not in text


def test_a_sample_without_a_target_has_no_interval(model: Any) -> None:
    settings = replace(FEW, sets=("gap",), min_gap=1e9)
    text = str(estimate(Plan.of(loaded(model), documents(*[48] * 4, seed=1), settings)))
    assert "intervals       none, as no target of the sample passes" in text


def test_a_measurement_that_would_evaluate_nothing_says_so_and_what_to_change(model: Any) -> None:
    texts = documents(*[48] * 4, seed=1)
    settings = replace(FEW, sets=("gap",), min_gap=1000.0)
    text = str(estimate(Plan.of(loaded(model), texts, settings)))
    assert "about 0 evaluated" in text
    (warning,) = [line for line in text.splitlines() if line.startswith("warning  ")]
    assert "this measurement would evaluate nothing: " in warning
    assert "gains 1000 nats (--min-gap)" in warning
    assert warning.endswith("or draw targets evenly: --sets every")
    some = str(estimate(Plan.of(loaded(model), texts, replace(settings, min_gap=0.0, share=1.0))))
    assert "warning  " not in some


@pytest.mark.accept
@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        (FEW, {"long": 24, "short": 8, "share": 0.1}),
        (WHOLE, {}),
        (WHOLE, {"sample": 0.4, "sets": ("gap",)}),
    ],
)
def test_the_estimate_is_near_what_is_spent(
    model: Any, settings: Settings, changed: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial ends with the documents, and not by a clock."""
    monkeypatch.setattr(module, "TRIED_S", 1e6)
    texts = documents(*[48] * 4, 10, seed=1)
    settings = replace(settings, **changed)
    plan, tried = (Plan.of(loaded(model), texts, settings) for _ in range(2))
    text = str(estimate(tried))
    again = str(
        estimate_cost(measure, loaded(model), texts, **settings.changed_options, prefix="none")
    )
    assert again.splitlines()[1:5] == text.splitlines()[1:5]
    assert "1 too short" in text
    (spent,) = re.findall(r"token-forwards +about ([\d.e+]+)", text)
    for speed, wanted in (("2e3", 2e3), ("a100", 0.4 * 312e12 / 2 / tried.model.num_parameters)):
        priced = str(estimate(tried, speed=speed))
        (hours, said) = re.findall(r"GPU-hours +about (\S+) \(([\d,]+) a second", priced)[0]
        assert float(said.replace(",", "")) == pytest.approx(wanted, rel=1e-3)
        assert float(hours) == pytest.approx(float(spent) / wanted / 3600, rel=0.06)
    assert "GPU-hours" not in text
    with pytest.raises(ConfigError, match=r"--speed=fast must be token-forwards a second.*H100"):
        estimate(tried, speed="fast")
    found = run(plan, tmp_path)
    (said,) = re.findall(r"targets +([\d,]+) with both losses", text)
    assert int(said.replace(",", "")) == len(found.losses)
    (wide,) = re.findall(r"intervals +about ±([\d.]+) of recovery", text)
    targets = found.targets[found.targets.distant_part == "document"]
    num_own = len(targets.drop_duplicates(["document", "target"]))
    assert float(wide) == pytest.approx(0.67 / num_own**0.5, rel=0.2)
    (said,) = re.findall(r"token-forwards +about ([\d.e+]+), [\d,]+ for each evaluated", text)
    assert 0.7 < float(said) / plan.scorer.token_forwards < 1.3
