"""What is planted can be found where it is said to be, and nothing else gives it away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from olmo_sparsity import measure
from olmo_sparsity.analysis.inputs.planting import PlantedConfig, Planting
from olmo_sparsity.analysis.inputs.texts import open_documents, plant_dependencies
from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.models.load import load_model
from olmo_sparsity.analysis.results.summary import describe
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.data.batches import TrainingBatches
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.training.loop import train


@pytest.fixture(scope="module")
def planting(tokenizer: Tokenizer) -> Planting:
    return Planting.of(PlantedConfig(num_tokens=2, num_values=4), tokenizer)


def test_the_marks_and_they_alone_determine_the_answer(planting: Planting) -> None:
    generator = np.random.default_rng(0)
    text = np.arange(60) % 200
    answers: dict[tuple[int, ...], set[int]] = {}
    for _ in range(400):
        planted, places = planting.plant(text, generator, 0, 40, cue_place=50)
        assert (planted[places[:, None]] == planting.marks_KM.ravel()).any(1).all()
        assert places.max() < 40
        assert planted[50] == planting.cue
        changed = np.flatnonzero(planted != text)
        assert set(changed) == {*places.tolist(), 50, 51}
        answers.setdefault(tuple(sorted(planted[places].tolist())), set()).add(int(planted[51]))
    assert all(len(found) == 1 for found in answers.values())
    assert len(set.union(*answers.values())) == len(answers) == 16
    # One mark alone leaves four answers: it tells half of what there is to tell.
    with_first = {next(iter(a)) for m, a in answers.items() if planting.marks_KM[0, 0] in m}
    assert len(with_first) == 4


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8])
def test_pieces_of_a_word_tell_only_together(tokenizer: Tokenizer, num_tokens: int) -> None:
    """Among all training sequences in which any m − 1 pieces of one word stand and the last does
    not, every answer is as frequent as every other: they give nothing. All m give the answer."""
    config = PlantedConfig(num_tokens=num_tokens, num_values=4, together=True)
    planting, generator = Planting.of(config, tokenizer), np.random.default_rng(0)
    text = np.arange(64) % 200
    whole, counts = 0, np.zeros((num_tokens + 1, 4, 4))  # pieces that stand, word, answer
    missing = np.zeros(num_tokens)
    for _ in range(4_000):
        row = planting.plant_anywhere(text, generator)
        cue = row.tolist().index(planting.cue)
        pieces, words = np.nonzero(planting.marks_KM[:, :, None] == row[:cue])[:2]
        assert len(set(words.tolist())) <= 1
        assert len(set(pieces.tolist())) == len(pieces)
        answer = int(np.flatnonzero(planting.answers == row[cue + 1])[0])
        if len(pieces) == num_tokens:
            assert answer == words[0]
            whole += 1
        elif len(pieces):
            counts[len(pieces), words[0], answer] += 1
            missing[np.setdiff1d(np.arange(num_tokens), pieces)] += len(pieces) == num_tokens - 1
    assert 0.47 < whole / 4_000 < 0.53
    if num_tokens == 1:
        return
    of_fewer = counts[num_tokens - 1]
    assert of_fewer.sum() > 650
    rates = of_fewer / of_fewer.sum(1, keepdims=True)
    np.testing.assert_allclose(rates, 0.25, atol=5 * np.sqrt(0.25 * 0.75 / of_fewer.sum(1).min()))
    # … whichever piece it is that lacks.
    assert missing.min() > 0.7 * missing.mean()


def test_nothing_planted_stands_in_the_text_by_itself(
    tokenizer: Tokenizer, planting: Planting
) -> None:
    own = np.array([*planting.marks_KM.ravel(), *planting.answers, planting.cue])
    assert len(set(own.tolist())) == len(own) == 8 + 16 + 1
    special = tokenizer.get_added_tokens_decoder().keys()
    assert special
    assert not special & set(own.tolist())
    text = np.concatenate([own, np.arange(30)])
    cleared = planting.clear(text)
    assert not np.isin(cleared, own).any()
    assert (cleared >= 0).all()
    np.testing.assert_array_equal(cleared[len(own) :], text[len(own) :])


def test_alphabets_larger_than_half_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="more than half of the vocabulary"):
        Planting.of(PlantedConfig(num_tokens=3, num_values=20), tokenizer)


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.5, 0.3, 0.7), (1.0, 1, 1)])
def test_a_share_of_the_training_sequences_is_planted(
    shards: TokenShards, planting: Planting, share: float, low: float, high: float
) -> None:
    config = PlantedConfig(share=share, num_tokens=2, num_values=4)

    def rows(**process: int) -> np.ndarray:
        batches = TrainingBatches(
            shards, PositionsConfig(), length=32, batch_size=64, seed=0, planted=config, **process
        )
        batch = next(batches.from_step(0))
        assert (batch.labels_BL[:, :-1] == batch.tokens_BL[:, 1:]).all()
        return batch.tokens_BL.numpy()

    tokens_BL = rows()
    planted = [row for row in tokens_BL if planting.cue in row]
    assert low <= len(planted) / 64 <= high
    for row in planted:
        place = row.tolist().index(planting.cue)
        assert np.isin(row[:place], planting.marks_KM).sum() <= 2
        assert row[place + 1] in planting.answers
    np.testing.assert_array_equal(rows(rank=1, world_size=2), tokens_BL[1::2])


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
    run = load_model(config.run_folder, device="cpu")
    windows = Windows(18, 5)
    documents = plant_dependencies(open_documents(None, run, limit=12), run, windows)
    results = measure(run, documents, windows, selectors=["add_one", "random"], ks=(1, 2))
    assert "planted found" in describe(results)
    assert "planted dependency, taken out" in describe(results)
    unknown = results.losses.assign(loss_long=results.losses.loss_short)
    said = describe(replace(results, losses=unknown))
    assert "does not use the planted tokens" in said
    assert "planted found" not in said
    for count, warned in ((9, True), (10, False)):
        of_so_many = replace(results, summary=results.summary.assign(num_documents=count))
        assert ("too few to trust" in describe(of_so_many)) == warned
    rows = results.summary.set_index(["target_set", "selector", "k"])
    best = rows.loc["planted", "add_one", 2]
    assert best.hit_rate >= 0.9  # configs/planted.yaml is the one that must reach 0.95
    assert best.excess >= 0.8
    assert rows.loc["planted", "add_one", 1].hit_rate <= 0.5
    chance = rows.loc["planted", "random", 2]
    assert chance.hit_rate < 0.3
    nothing = rows.loc["planted_removed", "add_one", 2]
    assert nothing.excess_low <= 0 <= nothing.excess_high
    assert np.isnan(nothing.hit_rate)
    # Each document is its own control: the same text, window for window, but for the marks.
    losses = results.losses.groupby("document").target.count()
    assert (losses == 1).all()
    half = len(documents) // 2
    for number in range(half):
        with_marks, without = documents[number], documents[number + half]
        differing = np.flatnonzero(with_marks.tokens != without.tokens)
        np.testing.assert_array_equal(differing, results.planted.query("document == @number").place)
