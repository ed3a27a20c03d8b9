"""Planted documents have the marks where it is said, and selectors are scored by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity import Windows, read_results
from olmo_sparsity.analysis.inputs.documents import Controls, Document, Documents, FarText
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.text import PlantedConfig
from olmo_sparsity.data.planting import Planting
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.errors import DataError
from olmo_sparsity.training.loop import train
from study import planting
from study.planting import hit_rates, open_planted, plant_dependencies
from tests.conftest import named

WINDOWS = Windows(30, 10)


@pytest.fixture(scope="module")
def prepared(heldout: TokenShards) -> Documents:
    def document(number: int) -> Document:
        tokens = heldout.document(number)[: 10 if number == 3 else 60]
        return Document(tokens, number, "a" if number < 2 else "", heldout.tokenizer)

    return Documents("prepared", [document(number) for number in range(8)])


@pytest.fixture(scope="module")
def marks(heldout: TokenShards) -> Planting:
    return Planting.of(PlantedConfig(), heldout.tokenizer)


def test_what_is_planted_has_a_twin_without_it(prepared: Documents, marks: Planting) -> None:
    planted, places = plant_dependencies(prepared, marks, WINDOWS)
    assert (len(planted), planted.num_too_short) == (14, 1)
    assert [d.number for d in planted] == list(range(14))
    of_document = places.groupby("document").place.apply(list).to_dict()
    assert list(of_document) == list(range(7))
    originals = [d for d in prepared if d.number != 3]
    for original, marked, bare in zip(originals, planted.items[:7], planted.items[7:], strict=True):
        truth = of_document[marked.number]
        assert len(truth) == len(marks.marks_KM)
        assert max(truth) < WINDOWS.num_far
        assert len(marked.tokens) == len(bare.tokens) == WINDOWS.long + 1
        assert np.flatnonzero(marked.tokens != bare.tokens).tolist() == truth
        assert not np.isin(bare.tokens, marks.marks_KM).any()
        assert marked.tokens[-2] == bare.tokens[-2] == marks.cue
        cleared = marks.clear(original.tokens[: WINDOWS.long + 1])
        assert bare.tokens[:-2].tolist() == cleared[:-2].tolist()
        assert marked.group == bare.group != ""
    assert planted[0].group == planted[1].group != planted[2].group
    again, _ = plant_dependencies(prepared, marks, WINDOWS)
    other, _ = plant_dependencies(prepared, marks, WINDOWS, seed=1)
    assert again.fingerprint == planted.fingerprint != other.fingerprint


@pytest.mark.parametrize("kind", ["unrelated", "matched"])
def test_no_foreign_text_holds_what_is_planted(
    prepared: Documents, marks: Planting, kind: Any
) -> None:
    planted, _ = plant_dependencies(prepared, marks, WINDOWS)
    controls = Controls(planted, WINDOWS, kind)
    for document in planted:
        (block,) = WINDOWS.blocks(document.tokens)
        texts = [controls.placebo(document, block)]
        own = {"own": (FarText.at(document, block.first, block.num_far), [(0, 1)])}
        for draw in range(3):
            texts += [far for far, _ in controls.foreign(document, block, own, draw)]
        for far in texts:
            assert far.document.number >= 7
            assert far.document.group != document.group


def test_planting_where_it_cannot_be_is_refused(prepared: Documents, marks: Planting) -> None:
    with pytest.raises(DataError, match="0 documents are longer than long=60"):
        plant_dependencies(prepared, marks, Windows(60, 10))
    with pytest.raises(DataError, match="long=30 has 1 distant"):
        plant_dependencies(prepared, marks, Windows(30, 29))
    with pytest.raises(DataError, match="model=somebody/elses"):
        open_planted(named("somebody/elses", None), None, WINDOWS)


def test_hit_rates_count_planted_tokens_among_the_first() -> None:
    ranks = {("a", 0): [4, 7, 1], ("a", 1): [2, 9, 5], ("b", 0): [1, 4, 7], ("b", 1): [3, 8, 9]}
    influence = pd.DataFrame(
        [
            (document, 20, "tokens", selector, control, rank, place, place + 1)
            for (selector, document), places in ranks.items()
            for control in ("own", "foreign")
            for rank, place in enumerate(places if control == "own" else [4, 7, 9], start=1)
        ],
        columns=[
            *("document", "target", "units", "selector", "control", "rank"),
            *("far_first", "far_end"),
        ],
    )
    planted = pd.DataFrame({"document": [0, 0, 1, 1], "place": [4, 7, 5, 9]})
    found = hit_rates(influence, planted, [1, 2, 3]).set_index(["selector", "k"]).hit_rate
    for selector in "ab":
        for k in (1, 2, 3):
            truth = ({4, 7}, {5, 9})
            shares = [len(truth[d] & {*ranks[selector, d][:k]}) / 2 for d in (0, 1)]
            assert found[selector, k] == pytest.approx(np.mean(shares))


def test_what_is_planted_is_found_and_nothing_where_it_is_taken_out(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The whole way: a model trained on planted text, measured on planted held-out documents."""
    config = make_config(
        data__planted={"share": 1.0, "num_tokens": 2, "num_values": 3},
        positions__target_length=26,
        model={
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_sequence_length": 48,
            "layer_norm_type": "rms",
            "attention_layer_norm": True,
            "weight_tying": True,
            "norm_after": True,
        },
        training={"length": 20, "batch_size": 16, "num_steps": 700, "precision": "fp32"},
        optimizer={"learning_rate": 3e-2, "warmup_steps": 20},
        checkpoint={},
    )
    train(config)
    out = tmp_path / "planted"
    words = ["--long=18", "--short=5", "--max-documents=12", "--selectors=add_one,random"]
    words += ["--ks=1,2", "--device=cpu", f"--out={out}"]
    assert planting.main([config.run_folder, *words]) == 0
    rows = pd.read_csv(f"{out}_planted.csv").set_index(["selector", "k"])
    best = rows.loc["add_one", 2]
    assert best.hit_rate >= 0.9  # configs/planted.yaml is the one that must reach 0.95
    assert best.excess >= 0.8
    assert rows.loc["add_one", 1].hit_rate <= 0.5
    assert rows.loc["random", 2].hit_rate < 0.3
    # Each document is its own control: where the marks are taken out, there is nothing to find.
    results = read_results(out)
    gaps = (results.losses.loss_short - results.losses.loss_long).groupby(results.losses.document)
    assert (gaps.count() == 1).all()
    half = results.tokens.document.nunique() // 2
    assert gaps.mean()[:half].mean() > 0.5 > 5 * abs(gaps.mean()[half:].mean())
