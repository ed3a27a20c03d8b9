"""What is planted can be found where it is said to be, and nothing else gives it away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from olmo_sparsity.config import PlantedConfig, PositionsConfig
from olmo_sparsity.config_file import config_from_dict
from olmo_sparsity.data.batches import TrainingBatches
from olmo_sparsity.data.planted import Planting
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.errors import ConfigError
from tests.conftest import data_section


@pytest.fixture(scope="module")
def shards(data_folder: Path) -> TokenShards:
    return open_shards(config_from_dict({"data": data_section(data_folder)}).data, "train")


@pytest.fixture(scope="module")
def tokenizer(shards: TokenShards) -> Tokenizer:
    return shards.tokenizer


@pytest.fixture(scope="module")
def planting(tokenizer: Tokenizer) -> Planting:
    return Planting.of(PlantedConfig(num_tokens=2, num_values=4), tokenizer)


def test_the_marks_and_they_alone_determine_the_answer(planting: Planting) -> None:
    generator = np.random.default_rng(0)
    text = np.arange(60) % 200
    answers: dict[tuple[int, ...], set[int]] = {}
    for _ in range(400):
        planted, places = planting.plant(text, generator, num_places=40, cue_place=50)
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


def test_nothing_planted_stands_in_the_text_by_itself(planting: Planting) -> None:
    own = np.array([*planting.marks_KM.ravel(), *planting.answers, planting.cue])
    assert len(set(own.tolist())) == len(own) == 8 + 16 + 1
    text = np.concatenate([own, np.arange(30)])
    cleared = planting.clear(text)
    assert not np.isin(cleared, own).any()
    assert (cleared >= 0).all()
    np.testing.assert_array_equal(cleared[len(own) :], text[len(own) :])


def test_special_tokens_are_left_alone(tokenizer: Tokenizer, planting: Planting) -> None:
    special = tokenizer.get_added_tokens_decoder().keys()
    own = {*planting.marks_KM.ravel().tolist(), *planting.answers.tolist(), planting.cue}
    assert special
    assert not own & special


def test_alphabets_larger_than_half_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="more than half of the vocabulary"):
        Planting.of(PlantedConfig(num_tokens=3, num_values=20), tokenizer)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_share_of_the_training_sequences_is_planted(
    shards: TokenShards, planting: Planting, share: float
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
    planted = [row for row in tokens_BL if planting.cue in row.tolist()]
    if share in (0.0, 1.0):  # an unplanted text may hold the cue by itself
        assert (len(planted) == 64) == (share == 1.0)
    for row in planted if share == 1.0 else []:
        place = row.tolist().index(planting.cue)
        assert np.isin(row[:place], planting.marks_KM).sum() == 2
        assert row[place + 1] in planting.answers
    np.testing.assert_array_equal(rows(rank=1, world_size=2), tokens_BL[1::2])
