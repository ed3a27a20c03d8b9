"""Keys of OLMo and of earlier versions: understood, or refused with what they are now."""

from __future__ import annotations

from typing import Any

import pytest

from olmo_sparsity.config.file import config_from_dict, flatten
from olmo_sparsity.config.names import NAMES
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.errors import ConfigError

MINIMAL = {"data": {"tokenizer": {"train_vocab": 300}}}


def given(data: dict | None = None, **sections: Any) -> dict:
    return {"data": MINIMAL["data"] | (data or {}), **sections}


def test_names_of_olmo_are_understood() -> None:
    theirs = given(
        save_folder="runs/x",
        global_train_batch_size=8,
        training={"length": 100},
        max_duration="1.7e4T",
        optimizer={"betas": [0.8, 0.9]},
        precision="amp_bf16",
        scheduler={"name": "cosine_with_warmup", "t_warmup": 7},
        save_interval=5,
    )
    ours = given(
        run_folder="runs/x",
        training={"length": 100, "batch_size": 8, "num_steps": 22, "precision": "bf16"},
        checkpoint={"interval_steps": 5},
        optimizer={"beta1": 0.8, "beta2": 0.9, "schedule": "cosine", "warmup_steps": 7},
    )
    assert config_from_dict(theirs) == config_from_dict(ours)
    assert config_from_dict(given(max_duration=30)).training.num_steps == 30
    stages = {"batch_size": 4, "length": [{"tokens": 8, "until": 5}, {"tokens": 32}]}
    assert config_from_dict(given(max_duration="1280T", training=stages)).training.num_steps == 10
    for name, key in NAMES.items():
        assert set(key.split(", ")) <= set(flatten(RunConfig())), f"{name} means {key}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"save_folder": "a", "run_folder": "b"}, "are the same; .* --run_folder=…"),
        ({"max_duration": "1ep"}, "steps, or tokens with a T"),
        ({"max_duration": "2e9T"}, "needs training.batch_size and training.length"),
        ({"optimizer": {"betas": 0.9}}, "must be 2 numbers"),
        ({"scheduler": {"name": "inverse_sqrt"}}, "inverse_sqrt"),
        ({"scheduler": {"t_max": 3}}, "unknown key 'scheduler'"),
        ({"optimizer": 5, "scheduler": {"name": "linear"}}, "optimizer=5 must be a section"),
        ({"fsdp": {"precision": "mixed"}}, "unknown key 'fsdp'"),
    ],
)
def test_names_of_olmo_that_do_not_fit_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(given(**wrong))
