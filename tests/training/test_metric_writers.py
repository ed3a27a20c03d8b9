"""TensorBoard and W&B receive every row."""

from __future__ import annotations

import shutil
import sys
import types

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.metric_writers import _scalars
from olmo_sparsity.training.start import dry_run
from tests.conftest import MakeConfig


def test_wandb_receives_every_row_and_goes_on_in_the_same_curves(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[dict, int]] = []
    fake = types.ModuleType("wandb")
    run = types.SimpleNamespace(id="a1", log=lambda row, step: received.append((row, step)))
    opened: list[dict] = []
    fake.init = lambda **settings: opened.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(config := make_config(logging__wandb_project="test"))
    assert [step for _, step in received] == [1, 2, 3, 4, 5, 6, 6]
    assert {"train/tokens_per_s", "train/peak_memory_gib"} <= received[-2][0].keys()
    places = ("0-16", "16-32", "32-64")
    assert set(received[-1][0]) == {
        *(f"{name}/{place}" for name in ("heldout", "heldout_bits_per_byte") for place in places),
        "heldout/induction_drop",
    }
    shutil.rmtree(list_checkpoints(config.run_folder)[0])
    train(config)
    assert [settings["id"] for settings in opened] == [None, "a1"]


def test_a_measure_has_a_curve_for_each_of_its_numbers() -> None:
    row = {
        "step": 1,
        "by_place": [{"from": 8, "to": 16, "loss": 1.0}],
        "lm_eval": {"words/acc": 0.5},
    }
    assert dict(_scalars(row)) == {"by_place/8-16": 1.0, "lm_eval/words/acc": 0.5}


@pytest.mark.parametrize("module", ["wandb", "lm_eval"])
def test_a_missing_package_is_named_before_a_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = make_config(logging__wandb_project="test" if module == "wandb" else None)
    config.evaluation.lm_eval = ["hellaswag"] if module == "lm_eval" else []
    for start in (dry_run, train):
        with pytest.raises(ConfigError, match=rf"pip install 'olmo-sparsity\[{module}\]'"):
            start(config)
