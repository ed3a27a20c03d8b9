"""A model in a notebook: trained on, edited, hooked, shared by threads, left as it was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from olmo_sparsity import measure
from olmo_sparsity.analysis.models.load import wrap_model
from olmo_sparsity.errors import ConfigError, DataError
from tests.support.explanations import (
    TEXT,
    WORDS,
    asked,
    make_model,
    make_tokenizer,
)

WHERE = re.compile("w7 w8")
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, 80).tolist()) for i in range(10, 16)]
MEASURED: dict[str, Any] = {
    "long": 32, "short": 8, "stride": 16, "selectors": "add_one_screened", "ks": (1,), "draws": 1,
    "halves": 0, "min_gap": 0.0, "share": 0.5, "max_targets": 2,
}  # fmt: skip


@pytest.fixture
def model() -> Any:
    return make_model()


@pytest.fixture
def documents(tmp_path: Path) -> Any:
    """A folder of texts, which `measure` reads."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


def loss_of(model: Any, text: str = TEXT) -> float:
    """By plain transformers: of the words "w7 w8" with everything before them."""
    ids = torch.tensor([make_tokenizer()(text).input_ids])
    (first,) = (
        i for i in range(ids.shape[1] - 1) if ids[0, i : i + 2].tolist() == ids[0, -3:-1].tolist()
    )
    with torch.no_grad():
        log_p = model(input_ids=ids).logits.log_softmax(-1)[0]
    return -sum(float(log_p[i - 1, ids[0, i]]) for i in (first, first + 1))


def train(model: Any, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = make_tokenizer()([TEXT], return_tensors="pt").input_ids
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def test_a_notebook_that_trains_explains_trains_on_generates_and_measures(
    model: Any, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # %% train and explain
    model.train()
    train(model)
    found = asked(model, at=WHERE)
    assert found.targets.loss_long.iloc[-1] == pytest.approx(loss_of(model), abs=1e-4)
    # %% train on: the explanation is of the model before, and says so
    train(model)
    with pytest.raises(DataError, match=r"has changed since explain \(.* tensors\): explain again"):
        found.check(draws=2)
    again = asked(model, at=WHERE)
    assert again.targets.loss_long.iloc[-1] == pytest.approx(loss_of(model), abs=1e-4)
    again.check(draws=2)
    # %% generate, with a streamer that asks
    prompt = make_tokenizer()(["w1 w2 w3"], return_tensors="pt").input_ids

    class Asking:
        def put(self, _: Any) -> None:
            with pytest.raises(ConfigError, match="is running: this call came from inside its"):
                asked(model)

        def end(self) -> None: ...

    model.generate(prompt, max_new_tokens=2, streamer=Asking(), do_sample=False)
    # %% measure, train on, measure again into the same folder
    kept = wrap_model(model, make_tokenizer())
    first = measure(kept, documents, out=tmp_path / "out", **MEASURED)
    assert first is not None
    train(model)
    with pytest.raises(ConfigError, match="holds work with model"):
        measure(kept, documents, out=tmp_path / "out", **MEASURED)
    with pytest.raises(DataError, match=r"losses .* of another model"):
        measure(kept, documents, losses=first, **MEASURED)
    assert "has changed since its last use" in capsys.readouterr().err
    second = measure(kept, documents, **MEASURED)
    fresh = measure(wrap_model(model, make_tokenizer()), documents, **MEASURED)
    assert second is not None
    assert fresh is not None
    np.testing.assert_array_equal(second.losses.loss_long, fresh.losses.loss_long)
    assert float((second.losses.loss_long - first.losses.loss_long).abs().max()) > 0.1
    assert model.training
