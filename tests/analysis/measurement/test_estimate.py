"""What a measurement will cost, tried on the beginnings of its documents."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from olmo_sparsity import estimate_cost, measure
from olmo_sparsity.analysis.inputs.documents import Documents
from olmo_sparsity.analysis.measurement.estimate import MANY_TARGETS, estimate
from olmo_sparsity.analysis.measurement.measurement import run
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.model.build import build_model
from tests.support.measurements import FEW, SHAPE, VOCAB, loaded


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return build_model(ModelConfig(**SHAPE, n_layers=2)).eval()


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried ends with the beginnings of the documents, and not by a clock."""
    for name, value in {"LOSSES_S": 1e6, "RECOVERY_S": 1e6, "MANY_TARGETS": 48}.items():
        monkeypatch.setattr(f"olmo_sparsity.analysis.measurement.estimate.{name}", value)


@pytest.mark.usefixtures("short_trials")
def test_the_estimate_of_long_documents_asks_few_of_their_targets(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    texts = Documents.of([rng.integers(0, VOCAB, 3000) for _ in range(6)])
    settings = FEW
    asked, read = [], []
    recovery, losses = Plan.recovery, Plan.losses

    def count(self: Plan, number: int, targets: pd.DataFrame) -> Any:
        asked.append(np.unique(targets.target))
        return recovery(self, number, targets)

    def follow(self: Plan, number: int) -> Any:
        read.append(len(self.documents[number].tokens))
        return losses(self, number)

    monkeypatch.setattr(Plan, "recovery", count)
    monkeypatch.setattr(Plan, "losses", follow)
    text = str(estimate(Plan.of(loaded(model), texts, settings)))
    assert asked
    assert max(map(len, asked)) <= settings.windows.stride
    assert max(read) <= settings.windows.first_target + MANY_TARGETS
    (said,) = re.findall(r"targets +([\d,]+) with both losses", text)
    assert said.replace(",", "") == str(6 * (3000 - settings.windows.long))
    # A third of them in each reported document, and as many of the placebo: of whole documents.
    (said,) = re.findall(r"about ([\d,]+) evaluated", text)
    assert int(said.replace(",", "")) > 0.3 * 3 * (3000 - settings.windows.long)
    few = replace(settings, max_targets=5, sets=("gap",))
    rare = replace(few, max_targets=None, min_gap=100.0)
    assert "about 0 evaluated (uncertain: 0 in the sample)" in str(
        estimate(Plan.of(loaded(model), texts, rare))
    )
    said_of_few = str(estimate(Plan.of(loaded(model), texts, few)))
    (said,) = re.findall(r"about ([\d,]+) evaluated", said_of_few)
    assert int(said) == 3 * 5 * 2  # documents, targets, own and placebo


@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize(
    "changed",
    [{"share": 0.02}, {"max_targets": 3}, {}],
)
def test_the_estimate_of_token_forwards_is_within_a_factor_of_two(
    model: Any, tmp_path: Path, changed: dict[str, Any]
) -> None:
    rng = np.random.default_rng(1)
    texts = Documents.of([rng.integers(0, VOCAB, length) for length in (*[150] * 6, 10)])
    settings = replace(FEW, long=24, short=8, stride=8, **changed)
    plan, tried = (Plan.of(loaded(model), texts, settings) for _ in range(2))
    text = str(estimate(tried))
    options = asdict(settings) | {"prefix": "none"}
    del options["prefix_ids"]
    again = str(estimate_cost(measure, loaded(model), texts, **options))
    assert again.splitlines()[1:4] == text.splitlines()[1:4]
    assert text.startswith("induction: loss ")
    assert "1 too short" in text
    (said,) = re.findall(r"token-forwards +about ([\d.e+]+), [\d,]+ for each evaluated", text)
    run(plan, tmp_path)
    assert 0.5 < float(said) / plan.scorer.token_forwards < 2
