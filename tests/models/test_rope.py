"""Angles are those of transformers, whatever scales them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.models.rope import (
    attention_factor,
    from_rope_parameters,
    rotary_frequencies,
    rotary_tables,
    rotated_width,
    to_rope_parameters,
)

CPU = torch.device("cpu")

YARN = {"scaling": "yarn", "factor": 16, "original_length": 512}
LLAMA_3 = {"scaling": "llama3", "factor": 8, "original_length": 1024}
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"scaling": "linear", "factor": 4},
    "ntk": {"scaling": "ntk", "factor": 4},
    "yarn": {"scaling": "yarn", "factor": 4, "original_length": 2048},
    "yarn, its own": {**YARN, "beta_fast": 20, "beta_slow": 2, "attention_factor": 1.25},
    "yarn, of few turns": {**YARN, "beta_fast": 1e5, "beta_slow": 1e-4},
    "llama3": {**LLAMA_3},
    "llama3, its own": {**LLAMA_3, "low_frequency_factor": 2, "high_frequency_factor": 16},
}


def config_with(positions: dict[str, Any], **model: Any) -> ModelConfig:
    model = {"d_model": 256, "n_heads": 2} | model
    return RunConfig(positions=PositionsConfig(**positions), model=ModelConfig(**model)).model


@pytest.mark.parametrize("theta", [500, 10_000, 500_000])
@pytest.mark.parametrize("positions", SCALED.values(), ids=SCALED)
def test_angles_at_all_lengths_are_those_of_transformers(
    positions: dict[str, Any], theta: int
) -> None:
    config = config_with(positions, rope_theta=theta)
    parameters, seq_len = to_rope_parameters(config), None
    if positions["scaling"] == "ntk":  # its dynamic form, at the length where that has the factor
        parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": float(theta)}
        seq_len = 4096 * 7 // 4
    theirs = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters=parameters,
    )
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequencies, factor = init(theirs, CPU, seq_len=seq_len)
    positions_1L = torch.cat([torch.arange(9000), torch.arange(2**17 - 9, 2**17)])[None]
    cos_1LR, sin_1LR = rotary_tables(positions_1L, config)
    angles = positions_1L.float()[..., None] * frequencies
    torch.testing.assert_close(cos_1LR, angles.cos() * factor, atol=1e-6, rtol=0)
    torch.testing.assert_close(sin_1LR, angles.sin() * factor, atol=1e-6, rtol=0)
    torch.testing.assert_close(rotary_frequencies(config, CPU), frequencies, atol=0, rtol=1e-6)
    assert attention_factor(config) == pytest.approx(factor)
    if positions["scaling"] != "ntk":
        assert from_rope_parameters(parameters, "m") == config.rope_scaling
    plain = rotary_frequencies(config_with({}, rope_theta=theta), CPU)
    assert not torch.allclose(frequencies, plain, rtol=1e-3), "nothing was scaled"


def test_a_scaling_without_counterpart_is_named() -> None:
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    with pytest.raises(ConfigError, match=r"'m': rope_type=longrope, supported: default, linear"):
        from_rope_parameters({"rope_type": "longrope"}, "m")
    with pytest.raises(ConfigError, match="truncate=False of its YaRN"):
        from_rope_parameters(yarn | {"truncate": False}, "m")
    deepseek = from_rope_parameters(yarn | {"mscale": 1.0, "mscale_all_dim": 0.5}, "m")
    assert deepseek is not None
    expected = (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert deepseek["attention_factor"] == pytest.approx(expected)
    assert from_rope_parameters(yarn | {"mscale": 1.0}, "m") == yarn
    assert from_rope_parameters({}, "m") is None


@pytest.mark.parametrize(
    ("width", "share", "rotated"), [(128, 1, 128), (128, 0.25, 32), (10, 0.3, 2)]
)
def test_pairs_of_a_share_of_the_head_are_turned(width: int, share: float, rotated: int) -> None:
    config = config_with({}, d_model=2 * width, rotary_fraction=share)
    assert rotated_width(config) == rotated
    assert len(rotary_frequencies(config, CPU)) == rotated // 2
