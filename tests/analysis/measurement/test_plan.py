"""The documents of a first look; targets that records give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from olmo_sparsity import measure
from olmo_sparsity.analysis.inputs.documents import Document, Documents
from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.measurement.recovery import recover
from olmo_sparsity.analysis.measurement.targets import sampled_blocks
from olmo_sparsity.analysis.models.load import LoadedModel
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.errors import DataError
from tests.support.measurements import VOCAB, loaded, planned, untrained


@pytest.fixture(scope="module")
def model() -> Any:
    return untrained(n_layers=2)


@pytest.mark.parametrize("long", [16, "all"])
def test_a_first_look_draws_blocks_from_whole_documents(model: Any, long: Any) -> None:
    rng = np.random.default_rng(0)
    letters, texts = of_letters(model), [rng.integers(0, VOCAB, 400) for _ in range(6)]
    quick = planned(letters, Documents.of(texts), long=long, short=6, ks=(1,), quick=True)
    places = [block.start for d in quick.documents for block in sampled_blocks(d, quick.settings)]
    assert (quick.settings.stride, quick.settings.draws) == (16, 1)
    assert len(places) == 4 * 6
    assert max(places) > 200, "beginnings alone"
    half = planned(
        letters, Documents.of(texts), long=long, short=6, ks=(1,), quick=True, sample=0.5
    )
    assert half.settings.sample == 0.5, "a given share comes first"


def test_blocks_of_a_first_look_fit_the_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last target of a block sees stride − 1 tokens more than the first."""
    monkeypatch.setattr(LoadedModel, "max_positions", property(lambda self: 24))
    texts = [np.random.default_rng(i).integers(0, VOCAB, 200) for i in range(6)]
    options = {"long": 16, "short": 6, "ks": (1,), "quick": True}
    fits = planned(of_letters(model), Documents.of(texts), **options)
    num_prefix = len(fits.settings.prefix_ids)
    assert fits.settings.windows.num_positions() == 24
    assert fits.settings.stride == 24 - 16 - num_prefix + 1


# --- records of prompt and target -----------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Prompts of 15 to 26 letters, targets of 1 to 3."""
    rng = np.random.default_rng(0)
    letters = [chr(97 + i) for i in rng.integers(0, 26, 400)]
    rows = [
        {"prompt": "".join(letters[i : i + 15 + i]), "target": "".join(letters[-1 - i % 3 :])}
        for i in range(12)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def of_letters(model: Any) -> LoadedModel:
    tokenizer = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(26)}, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return replace(loaded(model), tokenizer=tokenizer)


WINDOWS = {"long": 18, "short": 4}
OPTIONS: dict[str, Any] = {**WINDOWS, "selectors": "add_one", "ks": (1, 4), "draws": 2, "halves": 0}


def test_all_tokens_of_a_records_target_and_no_others_are_targets(
    model: Any, pairs: Path, tmp_path: Path
) -> None:
    """With the losses that they have in the whole text."""
    letters, rows = of_letters(model), [*map(json.loads, pairs.read_text().splitlines())]
    options = OPTIONS | {"prompt_field": "prompt", "out": tmp_path / "out"}
    results: Any = measure(letters, pairs, **options)
    assert set(results.targets.target_set) == {"named"}
    assert set(results.targets.far_part) == {"document"}
    long_enough = [number for number, row in enumerate(rows) if len(row["prompt"]) >= 18]
    sizes = [len(rows[number]["target"]) for number in long_enough]
    assert results.targets.groupby("document").size().tolist() == sizes
    assert results.documents.name.tolist() == [f"{pairs}:{number + 1}" for number in long_enough]
    assert results.meta.counts["documents_too_short"] == len(rows) - len(long_enough) == 3
    assert set(results.recovery.control) == {"own", "foreign"}
    assert len(results.losses) == sum(sizes), "no other loss is computed"
    windows = Windows(18, 4)
    for number, record in enumerate(long_enough):
        prompt, target = (letters.encode([rows[record][n]])[0] for n in ("prompt", "target"))
        whole, first = Document(np.array([*prompt, *target])), len(prompt)
        places = np.arange(first, len(whole.tokens))
        found = recover(Scorer(model), whole, windows, places, ks=(1, 4))["recovery"]
        own = results.recovery.query(f"document == {number} and control == 'own'")
        assert (own.target - 18 + first).tolist() == found.target.tolist()
        np.testing.assert_allclose(own.loss_set, found.loss_set, atol=1e-5)


def test_of_named_tokens_only_the_blocks_have_losses(model: Any, tmp_path: Path) -> None:
    """The same losses as with all blocks."""
    rng, letters = np.random.default_rng(1), of_letters(model)
    texts = ["".join(chr(98 + i) for i in rng.integers(0, 25, 40)) for _ in range(6)]
    named = [text[:30] + "a" + text[31:] for text in texts]
    options = OPTIONS | {"stride": 4}
    some: Any = measure(letters, named, **options, at="a", out=tmp_path / "some")
    everything: Any = measure(letters, named, **options, out=tmp_path / "all")
    assert sorted(some.losses.target) == sorted([30, 31, 32, 33] * 6)
    keys = ["document", "target"]
    both = some.losses.merge(everything.losses, on=keys, suffixes=("", "_all"))
    assert len(both) == 24
    for name in ("loss_short", "loss_long", "placebo_loss_long"):
        np.testing.assert_allclose(both[name], both[f"{name}_all"], atol=1e-5)
    with pytest.raises(DataError, match="no document contains at='aa'"):
        measure(letters, named, **options, at="aa", out=tmp_path / "none")
