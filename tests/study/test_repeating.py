"""Sequences that repeat: what is asked for can be known from what was read, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.data.batches import BatchPlan, TrainingBatches
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.text.vocabulary import IGNORED
from study.transforms import RepeatedSettings, Repeating, plant_or_repeat


def test_every_label_followed_the_same_token_the_last_time(shards: TokenShards) -> None:
    repeating = Repeating.of(RepeatedSettings(min_length=3, max_length=9), shards.tokenizer)
    periods = set()
    for seed in range(200):
        tokens, labels = repeating.draw(np.zeros(40, int), np.random.default_rng(seed))
        asked = np.flatnonzero(labels != IGNORED)
        period = int(asked[0])
        periods.add(period)
        assert len(set(tokens[:period])) == period
        assert asked.tolist() == list(range(period, 40))
        np.testing.assert_array_equal(labels[asked], tokens[asked - period + 1])
        np.testing.assert_array_equal(tokens[asked], tokens[asked - period])
        np.testing.assert_array_equal(labels[asked[:-1]], tokens[asked[1:]])
    assert periods == set(range(3, 10))


def test_a_passage_of_text_is_trained_on_from_its_first_reading(shards: TokenShards) -> None:
    config = RepeatedSettings(of="text", min_length=5, max_length=5)
    text = np.arange(100, 117)
    tokens, labels = Repeating.of(config, shards.tokenizer).draw(text, np.random.default_rng(0))
    np.testing.assert_array_equal(tokens, [*(list(range(100, 105)) * 3), 100, 101])
    np.testing.assert_array_equal(labels[:-1], tokens[1:])
    assert labels[-1] == 102


def test_the_share_of_sequences_is_the_one_asked_for(shards: TokenShards) -> None:
    def rows(**given: Any) -> np.ndarray:
        transform = plant_or_repeat(shards.tokenizer, 32, **given) if given else None
        plan = BatchPlan(PositionsConfig(), length=32, batch_size=64, seed=1, transform=transform)
        batches = TrainingBatches(shards, plan)
        return next(batches.from_step(1)).tokens_BL.numpy()

    options = {"share": 0.5, "min_length": 4, "max_length": 8}
    text, repeated = rows(), rows(repeated=options)
    changed = (repeated != text).any(1)
    assert 0.3 < changed.mean() < 0.7
    both = rows(repeated=options, planted={"share": 0.5, "num_values": 2})
    np.testing.assert_array_equal(both[changed], repeated[changed])
    assert (both != text).any(1).mean() > 0.95  # what does not repeat has something planted


def test_what_cannot_be_drawn_is_refused(shards: TokenShards) -> None:
    with pytest.raises(ConfigError, match="max_length=1000000 must be at most"):
        Repeating.of(RepeatedSettings(max_length=10**6), shards.tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing changes"),
        ({"repeated": {"share": 0.5, "min_length": 20, "max_length": 10}}, "above max_"),
        ({"repeated": {"share": 0.5, "min_length": 4, "max_length": 12}}, "twice"),
        ({"repeated": {"of": "text"}}, "nothing changes"),
        ({"planted": {"share": 0.5, "num_tokens": 16}}, "num_tokens=16"),
        (
            {
                "repeated": {"share": 0.6, "max_length": 7, "min_length": 2},
                "planted": {"share": 0.6},
            },
            "more than 1",
        ),
        ({"planted": {"shares": 0.5}}, "did you mean 'share'"),
    ],
)
def test_options_that_cannot_be_followed_are_rejected(
    shards: TokenShards, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plant_or_repeat(shards.tokenizer, 16, **options)
