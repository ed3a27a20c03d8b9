"""The documents of a first look."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from olmo_sparsity.analysis.documents import Documents
from olmo_sparsity.analysis.plan import Plan, first_look
from olmo_sparsity.analysis.settings import Reading
from olmo_sparsity.analysis.windows import Windows
from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.model.load import build_model
from tests.support.measurements import SETTINGS, SHAPE, VOCAB, loaded


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return build_model(ModelConfig(**SHAPE, n_layers=2)).eval()


@pytest.mark.parametrize("windows", [Windows(16, 6), Windows(40, 8, 4), Windows(60, 30)], ids=str)
@pytest.mark.parametrize("far_states", ["contextual", "isolated"])
def test_a_first_look_bounds_the_work_and_not_the_documents(
    model: Any, windows: Windows, far_states: Reading
) -> None:
    """However many documents there are, and however long."""
    rng = np.random.default_rng(0)
    budget = 25_000
    for num_documents, length in ((4, 2000), (12, 400)):
        texts = Documents.of([rng.integers(0, VOCAB, length) for _ in range(num_documents)])
        settings = replace(
            SETTINGS, long=windows.long, short=windows.short, stride=windows.stride, min_gap=0.0,
            draws=1, ks=(1, 2, 4, 8), far_states=far_states, halves=16,
            share=0.1, units=("tokens",), selectors=("add_one_screened", "random"),
        )  # fmt: skip
        cut = first_look(texts, settings, budget)
        assert [d.number for d in cut] == [d.number for d in texts]
        settings = replace(settings, halves=SETTINGS.halves)
        plan = Plan.of(loaded(model), cut, settings)
        losses = pd.concat([pd.DataFrame(dict(plan.losses(d.number)["losses"])).assign(
            document=d.number) for d in cut])  # fmt: skip
        targets = plan.targets(losses)
        for number in sorted(set(targets.document)):
            plan.recovery(number, targets[targets.document == number])
        assert budget / 4 < plan.scorer.token_forwards < 2 * budget
