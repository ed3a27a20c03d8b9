"""A DeepSpeed file and the settings of a run do not contradict each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from olmo_sparsity.errors import ConfigError
from olmo_sparsity.settings import CONFIGS
from olmo_sparsity.training.deepspeed_engine import deepspeed_settings, import_deepspeed
from olmo_sparsity.training.distributed import Processes
from tests.conftest import MakeConfig

TWO = Processes(rank=0, world_size=2, local_world_size=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch_size": 64}, "train_batch_size=64 contradicts .* makes it 4"),
        ({"gradient_clipping": 0.3}, r"gradient_clipping=0\.3 contradicts .* makes it 1\.0"),
        ({"bf16": {"enabled": True}}, r"bf16\.enabled=True .* training\.precision makes it False"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled=True contradicts"),
        ({"zero_optimization": {"stage": 3}}, r"stage=3 .* engine\.name makes it 2"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            r"optimizer\.params\.lr=0\.001 .* optimizer\.learning_rate makes it 0\.01",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, r"scheduler\.type=WarmupLR is not an engine setting"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            r"offload_optimizer\.device=cpu is not an engine setting",
        ),
    ],
)
def test_a_deepspeed_file_that_contradicts_the_run_is_refused(
    make_config: MakeConfig, tmp_path: Path, given: dict, message: str
) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(given))
    config = make_config(engine__name="zero2", engine__deepspeed_config=str(path))
    with pytest.raises(ConfigError, match=message):
        deepspeed_settings(config, TWO)


def test_a_deepspeed_file_that_agrees_is_passed_on(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"reduce_bucket_size": 1000},
    }
    path.write_text(json.dumps(given))
    config = make_config(
        engine__name="zero2", engine__deepspeed_config=str(path), training__micro_batch_size=1
    )
    assert deepspeed_settings(config, TWO) == {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    }


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_the_shipped_files_say_nothing_but_engine_settings(
    make_config: MakeConfig, name: str
) -> None:
    given = json.loads((CONFIGS / f"deepspeed/{name}.json").read_text())
    assert set(given) == {"zero_optimization"}
    settings = deepspeed_settings(make_config(engine__name=name), TWO)
    assert settings["zero_optimization"] == given["zero_optimization"]


def test_a_deepspeed_that_divides_gradients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__="0.18.3"))
    with pytest.raises(ConfigError, match=r"installed 0\.18\.3.* 'deepspeed>=0\.19\.7'"):
        import_deepspeed(torch.device("cuda"))
