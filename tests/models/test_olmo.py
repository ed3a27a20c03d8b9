"""OLMo with explicit positions: equal to upstream, causal, and its refusals."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.models.training_loss import mean_loss
from tests.support.models import COUNTED, GAPPED, draw_tokens, tiny_olmo

UPSTREAM_KNOWS: dict[str, dict[str, Any]] = {
    "rope": {},
    "rope in low precision": {"rope_full_precision": False},
    "alibi": {"rope": False, "alibi": True},
    "grouped queries": {"n_kv_heads": 2},
    "norm after": {"attention_layer_norm": True, "norm_after": True, "layer_norm_type": "rms"},
    "scaled logits": {"scale_logits": True},
    "untied with biases": {"include_bias": True, "weight_tying": False},
    "clipped, normed embedding": {"clip_qkv": 0.05, "embedding_layer_norm": True},
    "padded embedding": {"embedding_size": 128},
    "gelu": {"activation_type": "gelu", "mlp_hidden_size": 48},
    "mitchell": {"init_fn": "mitchell"},
}


# --- equal to upstream --------------------------------------------------------------------------


def test_settings_are_those_of_upstream() -> None:
    """`ModelConfig` repeats them, with other defaults where its comment says so."""
    from olmo.config import ModelConfig as UpstreamConfig

    ours, theirs = fields(ModelConfig), fields(UpstreamConfig)
    assert [item.name for item in ours[: len(theirs)]] == [item.name for item in theirs]
    changed = {
        own.name for own, item in zip(ours, theirs, strict=False) if own.default != item.default
    }
    assert changed == {
        *("rope", "attention_dropout", "residual_dropout", "embedding_dropout", "include_bias"),
        *("vocab_size", "embedding_size", "eos_token_id", "pad_token_id"),
    }


def upstream_of(model: Any) -> torch.nn.Module:
    from olmo.config import ModelConfig as UpstreamConfig
    from olmo.model import OLMo

    theirs = UpstreamConfig.__dataclass_fields__
    fields = {name: value for name, value in vars(model.config).items() if name in theirs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        upstream = OLMo(UpstreamConfig(**fields), init_params=False)
    upstream.load_state_dict(model.state_dict())
    return upstream


@pytest.mark.parametrize("changes", UPSTREAM_KNOWS.values(), ids=UPSTREAM_KNOWS)
def test_equals_upstream_for_contiguous_positions(changes: dict[str, Any]) -> None:
    model = tiny_olmo(**changes)
    upstream = upstream_of(model)
    tokens_BL = draw_tokens()
    ours = model(tokens_BL, COUNTED)
    torch.testing.assert_close(ours, upstream(tokens_BL).logits, atol=5e-6, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        ours_low, theirs_low = model(tokens_BL, COUNTED), upstream(tokens_BL).logits
    difference = (ours_low.float() - theirs_low.float()).abs().max()
    assert bool(difference < 0.03 * ours.abs().max())


# --- positions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rotary_fraction": 0.5},
        {"rope": False, "alibi": True},
        {"rotary_fraction": 0.5, "architecture": "gpt_neox"},
    ],
    ids=["rope", "half rope", "alibi", "GPT-NeoX"],
)
def test_only_differences_of_positions_matter(changes: dict[str, Any]) -> None:
    model, tokens_BL = tiny_olmo(**changes), draw_tokens()
    logits = model(tokens_BL, GAPPED)
    torch.testing.assert_close(model(tokens_BL, GAPPED + 29), logits, atol=2e-6, rtol=1e-4)
    assert not torch.allclose(model(tokens_BL, COUNTED)[:, 4:], logits[:, 4:], atol=1e-5)
    torch.testing.assert_close(model(tokens_BL, COUNTED)[:, :4], logits[:, :4])


def test_alibi_penalises_the_distance_between_ids() -> None:
    """Against a forward whose whole bias is built here, by hand, and given from outside."""
    alibi, plain = tiny_olmo(rope=False, alibi=True), tiny_olmo(rope=False)
    plain.load_state_dict(alibi.state_dict())
    bias = torch.full((1, 4, 12, 12), -1e9)
    for head in range(4):
        for query in range(12):
            for key in range(query + 1):
                distance = int(GAPPED[0, query] - GAPPED[0, key])
                bias[0, head, query, key] = -distance * 2.0 ** (-8.0 * (head + 1) / 4)
    tokens_BL = draw_tokens()
    torch.testing.assert_close(alibi(tokens_BL, GAPPED), plain(tokens_BL, GAPPED, bias))


def test_an_attention_bias_replaces_causality() -> None:
    model, tokens_BL = tiny_olmo(), draw_tokens()
    explicit = model(tokens_BL, GAPPED, causal_bias(12, torch.device("cpu")))
    torch.testing.assert_close(explicit, model(tokens_BL, GAPPED))
    both_ways = model(tokens_BL, GAPPED, torch.zeros(1, 1, 12, 12))
    assert not torch.allclose(both_ways[:, 0], explicit[:, 0], atol=1e-5)


def test_unsupported_settings_are_refused_by_name() -> None:
    refused = {"block_type": "llama", "init_fn": "fan_in", "rotary_fraction": 0.1}
    for field, value in refused.items():
        with pytest.raises(ConfigError, match=f"model.{field}={value}"):
            tiny_olmo(**{field: value})


# --- activation checkpointing -------------------------------------------------------------------


def gradients(model: Any, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """All forwards before any backward: a recomputation must rotate by its own positions."""
    model.zero_grad()
    values = [
        mean_loss(model, tokens, positions, tokens.roll(-1, dims=1), tokens.numel())
        for tokens, positions in batches
    ]
    for value in values:
        value.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("architecture", ["olmo", "gpt_neox"])
def test_checkpointed_activations_give_equal_gradients(architecture: str) -> None:
    batches = [(draw_tokens(), COUNTED), (draw_tokens().flip(0), GAPPED)]
    plain, frugal = (tiny_olmo(architecture=architecture).train() for _ in range(2))
    frugal.checkpoint_activations()
    for a, b in zip(gradients(plain, batches), gradients(frugal, batches), strict=True):
        torch.testing.assert_close(a, b)
