"""Each field of the model says what it changes, and what changes the computation is never lost."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any, get_args

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config import model as model_section
from olmo_sparsity.config.model import COMPUTATION, ModelConfig
from olmo_sparsity.config.schema import properties_of, schema_fields
from olmo_sparsity.models.huggingface.computation import computation_of
from olmo_sparsity.models.huggingface.families import family_of, transformers_config

WORDS = {
    model_section.COMPUTATION,
    model_section.ANGLES,
    model_section.ROUNDING,
    model_section.TRAINING,
    model_section.START,
    model_section.USE,
    model_section.NOTHING,
}

# A model that transformers expresses, with each norm and bias that another field needs to matter.
EXPORTED: dict[str, Any] = {
    **{"layer_norm_type": "rms", "attention_layer_norm": True, "attention_norm_per_head": True},
    **{"d_model": 48, "n_heads": 4, "n_layers": 4, "vocab_size": 64},
}
OTHER_VALUES: dict[str, Any] = {
    "mlp_ratio": 6,
    "mlp_hidden_size": 100,
    "n_kv_heads": 2,
    "head_width": 16,
    "embedding_size": 80,
    "clip_qkv": 0.5,
    "bias_for_layer_norm": True,
    "layer_norm_eps": 1e-3,
    "sliding_window": 5,
    "nope_every": 2,
    "rotary_fraction": 0.5,
    "query_scale_length": 16.0,
    "n_heads": 2,
    "n_layers": 3,
    "d_model": 96,
    "vocab_size": 32,
}
# Without the field that they belong to they mean nothing, which loading a config refuses.
WITH = {"alibi_bias_max": {"alibi": True, "rope": False, "alibi_bias_max": 4.0}}

OF_COMPUTATION = [
    item for item in fields(ModelConfig) if properties_of(item).changes == COMPUTATION
]


def other_value(item: Field) -> Any:
    if item.name in OTHER_VALUES:
        return OTHER_VALUES[item.name]
    present = EXPORTED.get(item.name, item.default)
    if isinstance(present, bool):
        return not present
    choices = get_args(schema_fields(ModelConfig)[item.name].kind)
    return next(choice for choice in choices if choice != present)


@pytest.mark.parametrize("item", fields(ModelConfig), ids=lambda item: item.name)
def test_each_field_says_what_it_changes(item: Field) -> None:
    assert properties_of(item).changes in WORDS


@pytest.mark.parametrize("item", OF_COMPUTATION, ids=lambda item: item.name)
def test_a_field_of_the_computation_is_compared_and_exported_or_refused(item: Field) -> None:
    changes = WITH.get(item.name) or {item.name: other_value(item)}
    config = ModelConfig(**EXPORTED)
    changed = ModelConfig(**EXPORTED | changes)
    if changed.architecture != "olmo":  # such a model is transformers' own
        return
    assert computation_of(changed) != computation_of(config)
    exported = transformers_config(config, family_of(computation_of(config)))
    try:
        family = family_of(computation_of(changed))
    except ConfigError as error:
        assert "cannot be exported" in str(error)  # noqa: PT017 # most fields are not refused
        return
    of_changed = transformers_config(changed, family)
    assert of_changed.to_dict() != exported.to_dict()
