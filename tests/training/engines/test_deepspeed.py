"""A DeepSpeed file and the settings of a run do not contradict each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.training.engines.deepspeed_import import import_deepspeed
from olmo_sparsity.training.engines.deepspeed_settings import deepspeed_settings
from tests.conftest import MakeConfig


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Of two processes."""
    return deepspeed_settings(config.engine, config.training, 2)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"train_batch_size": 64}, "train_batch_size"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
    ],
)
def test_a_deepspeed_file_configures_communication_alone(
    make_config: MakeConfig, tmp_path: Path, given: dict, named: str
) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(given))
    config = make_config(engine__name="zero2", engine__deepspeed_config=str(path))
    with pytest.raises(ConfigError, match=re.escape(named)):
        settings_of(config)
    path.write_text('{"zero_optimization": {"reduce_bucket_size": 1000}}')
    assert settings_of(make_config(training__micro_batch_size=1)) == {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False, "immediate_grad_update": True},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    }


def test_a_deepspeed_that_divides_gradients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__="0.18.3"))
    with pytest.raises(ConfigError, match=r"0\.18\.3.* 'deepspeed>=0\.19\.7'"):
        import_deepspeed(torch.device("cuda"))


BUILD_AN_ENGINE = """
import sys
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import EngineConfig, OptimizerConfig, TrainingConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.training.engines.choose import build_engine
from olmo_sparsity.training.processes.distributed import Processes

training = TrainingConfig(precision="bf16", batch_size=4, length=8, device="cpu")
model = build_model(ModelConfig(n_layers=1, d_model=16, n_heads=1, vocab_size=64))
sections = EngineConfig(name=sys.argv[1]), training, OptimizerConfig()
engine = build_engine(model, *sections, Processes())
print("steps:", [float(state["step"]) for state in engine.optimizer.state.values()])
"""


@pytest.mark.parametrize("engine", [pytest.param("zero1", marks=pytest.mark.accept), "zero3"])
def test_deepspeed_makes_no_update_while_it_is_built(engine: str) -> None:
    """It would count in Adam's bias correction, as an earlier version's did (with zero1 in bf16).

    In a process of its own, whose environment DeepSpeed changes."""
    command = [sys.executable, "-c", BUILD_AN_ENGINE, engine]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "steps: []" in done.stdout.splitlines()
