"""Code of a user, which `make check` reads with `mypy --strict`; it is never run."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import pandas as pd
from torch import nn

from olmo_sparsity import attribute, estimate_cost, explain, load_model, measure, read_results
from olmo_sparsity.analysis.explain.check import Check
from olmo_sparsity.analysis.explain.explanation import Explanation
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.analysis.scoring.cost import Cost
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.sources.attribution import Attribution


def use(module: nn.Module, tokenizer: object) -> None:
    model = assert_type(load_model("folder", dtype="bf16"), LoadedModel)
    found = assert_type(explain(module, tokenizer, text="…", at=["name", 3], k=2), Explanation)
    assert_type(found.check(draws=4), Check)
    assert_type(found.top(3), pd.DataFrame)
    answer = attribute(model, sources={"a.txt": "…"}, question="Who?", decoys=Path("texts"))
    assert_type(assert_type(answer, Attribution).statements, pd.DataFrame)
    assert_type(measure(model, "texts", long=1024, ks=(1, 4), out="results"), Results)
    assert_type(read_results("results"), Results)
    assert_type(estimate_cost(explain, model, prompt="…", chat=True), Cost)


def misuse(model: LoadedModel) -> None:
    """Each mistake is an error, as an ignore that is not needed is one, too."""
    explain(model, text="…", unit="words")  # type: ignore[call-arg]
    explain(model, text="…", distant_states="both")  # type: ignore[arg-type]
    attribute(model, source={"a": "…"}, question="Who?")  # type: ignore[call-arg]
    measure(model, "texts", max_targets="2")  # type: ignore[arg-type]
    estimate_cost(explain, model, txt="…")  # type: ignore[call-arg]
