"""What is planted can be found where it is said to be, and nothing else gives it away."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.data.batches import BatchPlan, TrainingBatches
from olmo_sparsity.data.shards import TokenShards
from study.transforms import PlantedSettings, Planting, plant_or_repeat


@pytest.fixture(scope="module")
def planting(tokenizer: Tokenizer) -> Planting:
    return Planting.of(PlantedSettings(num_tokens=2, num_values=4), tokenizer)


def test_the_marks_and_they_alone_determine_the_answer(planting: Planting) -> None:
    generator = np.random.default_rng(0)
    text = np.arange(60) % 200
    answers: dict[tuple[int, ...], set[int]] = {}
    for _ in range(400):
        planted, places = planting.plant(text, generator, 0, 40, cue_place=50)
        assert (planted[places[:, None]] == planting.marks_KM.ravel()).any(1).all()
        assert places.max() < 40
        assert planted[50] == planting.cue
        assert set(np.flatnonzero(planted != text)) == {*places.tolist(), 50, 51}
        answers.setdefault(tuple(sorted(planted[places].tolist())), set()).add(int(planted[51]))
    assert all(len(found) == 1 for found in answers.values())
    assert len(set.union(*answers.values())) == len(answers) == 16
    # One mark alone leaves four answers: it tells half of what there is to tell.
    assert len({next(iter(a)) for m, a in answers.items() if planting.marks_KM[0, 0] in m}) == 4


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8])
def test_pieces_of_a_word_tell_only_together(tokenizer: Tokenizer, num_tokens: int) -> None:
    """Among all training sequences in which any m − 1 pieces of one word stand and the last does
    not, every answer is as frequent as every other: they give nothing. All m give the answer."""
    config = PlantedSettings(num_tokens=num_tokens, num_values=4, together=True)
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
    with pytest.raises(ConfigError, match="num_tokens=3"):
        Planting.of(PlantedSettings(num_tokens=3, num_values=20), tokenizer)


@pytest.mark.parametrize(("share", "low", "high"), [(0.5, 0.3, 0.7), (1.0, 1, 1)])
def test_a_share_of_the_training_sequences_is_planted(
    shards: TokenShards, planting: Planting, share: float, low: float, high: float
) -> None:
    options = {"share": share, "num_tokens": 2, "num_values": 4}
    transform = plant_or_repeat(shards.tokenizer, 32, planted=options)

    def rows(**process: int) -> np.ndarray:
        plan = BatchPlan(PositionsConfig(), length=32, batch_size=64, seed=0, transform=transform)
        batches = TrainingBatches(shards, plan, **process)
        batch = next(batches.from_step(1))
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
