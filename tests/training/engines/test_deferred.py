"""A weight that is made when it is looked up is that of a model built as usual."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.training.engines.deferred import Deferred, without_drawing


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_tying": False, "init_cutoff_factor": 3, "layer_norm_type": "rms"},
        {"init_fn": "mitchell", "include_bias": True},
        {"query_scale_learned": True},
        {"init_fn": "full_megatron", "attention_layer_norm": True, "norm_after": True},
    ],
)
def test_deferred_weights_are_those_of_a_model_built_as_usual(changes: dict) -> None:
    sizes = {"d_model": 32, "n_heads": 2, "n_layers": 2, "vocab_size": 300}
    config = ModelConfig(**sizes, **changes)
    torch.manual_seed(3)
    expected, drawn_after = build_model(config), torch.rand(2)
    torch.manual_seed(3)
    deferred = Deferred(partial(build_model, config))
    assert torch.equal(torch.rand(2), drawn_after)
    assert all(weight.is_meta for weight in deferred.model.parameters())
    assert dict(expected.named_parameters()).keys() == deferred.keys()
    for name in reversed(list(deferred)):
        assert torch.equal(deferred[name], expected.get_parameter(name)), name


def test_a_model_that_is_filled_from_a_checkpoint_draws_nothing() -> None:
    config = ModelConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=300)
    expected = build_model(config)
    torch.manual_seed(3)
    state_before = torch.get_rng_state()
    with without_drawing():
        undrawn = build_model(config)
    assert torch.equal(torch.get_rng_state(), state_before)

    def build() -> torch.nn.Module:
        with without_drawing():
            return build_model(config)

    assert Deferred(build).model is not None
    assert torch.equal(torch.get_rng_state(), state_before)
    undrawn.load_state_dict(expected.state_dict())
    tokens_BL = torch.arange(20)[None]
    positions_BL = torch.arange(20)[None]
    found = undrawn(tokens_BL, positions_BL)
    assert torch.equal(found, expected(tokens_BL, positions_BL))
