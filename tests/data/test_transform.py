"""Training sequences that a function of the user's changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.config.run import config_from_dict
from olmo_sparsity.config.text import DataConfig, PositionsConfig
from olmo_sparsity.data.batches import BatchPlan, TrainingBatches
from olmo_sparsity.data.shards import TokenShards
from olmo_sparsity.data.transform import load_transform
from olmo_sparsity.training.loop import train

RULES = """
import numpy as np

from olmo_sparsity.data.transform import Changed


def reverse_some(tokenizer, shortest, share=0.5):
    def change(tokens_L, seeds):
        if np.random.default_rng([*seeds, 7]).random() < share:
            return Changed(tokens_L[::-1].copy())
        return None
    return change


def cut(tokenizer, shortest):
    return lambda tokens_L, seeds: Changed(tokens_L[1:])


def unknown_tokens(tokenizer, shortest):
    return lambda tokens_L, seeds: Changed(tokens_L + 10**6)
"""


@pytest.fixture
def rules(tmp_path: Path) -> str:
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    return str(path)


def batches(shards: TokenShards, data: DataConfig) -> TrainingBatches:
    transform = load_transform(data, shards.tokenizer, 16)
    plan = BatchPlan(PositionsConfig(), length=16, batch_size=32, seed=0, transform=transform)
    return TrainingBatches(shards, plan)


def test_a_function_of_the_users_changes_some_sequences(shards: TokenShards, rules: str) -> None:
    plain = batches(shards, DataConfig()).of_step(1)
    data = DataConfig(transform=f"{rules}:reverse_some", transform_options={"share": 0.3})
    changed = batches(shards, data).of_step(1)
    pairs = [*zip(plain.tokens_BL.numpy(), changed.tokens_BL.numpy(), strict=True)]
    is_same = [bool((before == after).all()) for before, after in pairs]
    assert 0 < np.mean(is_same) < 1
    for (before, after), same in zip(pairs, is_same, strict=True):
        np.testing.assert_array_equal(after, before if same else before[::-1])
    assert (changed.labels_BL[:, :-1] == changed.tokens_BL[:, 1:]).all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, "defines no nothing"),
        ("reverse_some", {"shares": 1}, "transform_options does not fit"),
        ("cut", {}, r"return \(16,\) of each"),
        ("unknown_tokens", {}, "returned token 10"),
    ],
)
def test_a_transform_that_cannot_be_used_is_rejected_by_name(
    shards: TokenShards, rules: str, name: str, options: dict, message: str
) -> None:
    data = DataConfig(transform=f"{rules}:{name}", transform_options=options)
    with pytest.raises((ConfigError, DataError), match=message):
        batches(shards, data).of_step(1)


def test_a_run_does_not_go_on_with_a_changed_transform(run_dict: dict, rules: str) -> None:
    run_dict["data"] |= {"transform": f"{rules}:reverse_some"}
    train(config_from_dict(run_dict))
    train(config_from_dict(run_dict))  # the same file: nothing is left to do
    Path(rules).write_text(RULES.replace("7", "8"))
    with pytest.raises(ConfigError, match="transform_sha256"):
        train(config_from_dict(run_dict))
