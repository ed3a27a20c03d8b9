"""Measurements of seconds, and tables of which the truth is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from olmo_sparsity.analysis.measurement.measurement import run
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.planning import make_plan
from olmo_sparsity.analysis.measurement.request import MeasureRequest
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.windows import Windows
from tests.support.models import FIELDS

VOCAB = 40
SETTINGS = Settings(
    long=16,
    short=6,
    stride=8,
    units=("tokens", "span:3"),
    selectors=("add_one", "gradient", "random"),
    ks=(1, 4),
    share=0.15,
    min_gap=0.0,
    draws=2,
    halves=4,
)
FEW = replace(SETTINGS, units=("tokens",), selectors=("add_one",))
SHAPE = FIELDS | {"vocab_size": VOCAB, "init_std": 0.3}


def untrained(seed: int = 0, **changed: Any) -> Any:
    torch.manual_seed(seed)
    return build_model(ModelConfig(**SHAPE | {"n_layers": 1} | changed)).eval()


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(model, None, "tiny", 1, None, "weights")


def measured_into(
    folder: Path, model: Any, documents: Documents, settings: Settings = SETTINGS, **options: Any
) -> Any:
    return run(Plan.of(loaded(model), documents, settings), folder, **options)


def planned(
    model: Any, documents: Any = None, windows: Windows | None = None, **given: Any
) -> Plan:
    """A plan by keyword arguments, as `measure` takes them."""
    return make_plan(MeasureRequest.of(model=model, documents=documents, windows=windows, **given))


def losses_table(**columns: Any) -> pd.DataFrame:
    """Without what a test does not say: no placebo gap, no bigram."""
    table = pd.DataFrame(columns)
    given = {"placebo_loss_long": table.loss_short, "bigram": False, "placebo_bigram": False}
    return table.assign(**{name: value for name, value in given.items() if name not in table})


def recovery_rows(keys: list, control: str, losses: list, draw: int = 0, **more: Any) -> list[dict]:
    same = {
        "distant_part": "document",
        "units": "tokens",
        "selector": "add_one",
        "k": 1,
        "num_tokens": 1,
        "loss_without": np.nan,
    } | more
    return [
        {"document": document, "target": target, "control": control, "draw": draw, "loss_set": loss}
        | same
        for (document, target), loss in zip(keys, losses, strict=True)
    ]
