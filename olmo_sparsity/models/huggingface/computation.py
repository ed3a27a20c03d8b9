"""Compare what two models compute from the same weights, by their configs.

A field of `ModelConfig` may have no effect next to others, or two spellings of one value: a width
of None and the width it stands for. `computation_of` removes these differences:

    ModelConfig(mlp_hidden_size=None, mlp_ratio=4, d_model=64)    {…, "mlp_hidden_size": 256}
    ModelConfig(mlp_hidden_size=256)                              {…, "mlp_hidden_size": 256}

RoPE's base and scaling are compared apart (`check_angles`), as a run may change them to reach a
greater length.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.model import COMPUTATION, ModelConfig
from olmo_sparsity.config.schema import properties_of
from olmo_sparsity.models.huggingface.families import embedding_rows, mlp_width

_FIELDS_OF_ALL_ARCHITECTURES = (
    "architecture",
    "d_model",
    "n_layers",
    "n_heads",
    "rotary_fraction",
    "layer_norm_eps",
    "weight_tying",
    "mlp_hidden_size",
    "embedding_size",
)
"""Fields that decide what a model of each architecture computes. For GPT-NeoX the others have one
value, which `build_transformers_model` checks."""

_REDUNDANT_FIELDS = {"mlp_ratio", "vocab_size"}
"""Fields whose effective values have the names of others: mlp_hidden_size and embedding_size."""


def computation_of(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that determine the computation, each with its effective value. Two models
    with equal values and equal angles of RoPE compute the same from the same weights."""
    values = {
        item.name: getattr(config, item.name)
        for item in fields(ModelConfig)
        if properties_of(item).changes == COMPUTATION and item.name not in _REDUNDANT_FIELDS
    }
    values |= _effective_values(config)
    if config.architecture == "gpt_neox":
        return {name: values[name] for name in _FIELDS_OF_ALL_ARCHITECTURES}
    return values


def _effective_values(config: ModelConfig) -> dict[str, Any]:
    """Return the effective values of fields whose default depends on other fields, or that have no
    effect next to other fields."""
    width = config.effective_head_width
    has_usual_width = width * config.n_heads == config.d_model
    norm_bias = config.bias_for_layer_norm
    has_query_norm = config.attention_layer_norm
    return {
        "mlp_hidden_size": mlp_width(config),
        "embedding_size": embedding_rows(config),
        "n_kv_heads": config.effective_n_kv_heads,
        "head_width": None if has_usual_width else width,
        "qkv_bias": config.qkv_bias and not config.include_bias,
        "alibi_bias_max": config.alibi_bias_max if config.alibi else None,
        # low_precision is also LayerNorm; it differs under autocast only.
        "layer_norm_type": "rms" if config.layer_norm_type == "rms" else "default",
        "attention_layer_norm_with_affine": (
            has_query_norm and config.attention_layer_norm_with_affine
        ),
        "bias_for_layer_norm": config.include_bias if norm_bias is None else norm_bias,
    }


# --- a run and the model that it begins from ------------------------------------------------------


def check_same_computation(theirs: ModelConfig, ours: ModelConfig, init_from: str) -> None:
    """Raise ConfigError unless a run can begin from weights of another model, because both compute
    the same. A run may leave out RoPE, and add learned scales of queries.

    Args:
        theirs: The config of the weights' model.
        ours: The config of the run's model.
        init_from: Where the weights are, for messages.
    """
    if theirs.query_scale_learned and not ours.query_scale_learned:
        raise ConfigError(
            f"init_from='{init_from}' has learned scales of queries, without which its attention "
            "is another one; pass --model.query_scale_learned=true"
        )
    their_values = computation_of(theirs)
    our_values = computation_of(ours)
    if theirs.rope and not ours.rope:
        # DroPE: a model that was trained with positions continues without them.
        for name in ("rope", "rotary_fraction", "nope_every"):
            their_values[name] = our_values[name]
    if adds_query_scales(theirs, ours):
        their_values["query_scale_learned"] = True
    for name, value in our_values.items():
        if their_values.get(name) != value:
            raise ConfigError(
                f"init_from='{init_from}' has model.{name}={their_values.get(name)}, this run "
                f"{value}; set it alike"
            )


def adds_query_scales(theirs: ModelConfig, ours: ModelConfig) -> bool:
    """Return whether a run learns scales of queries, and the model that it begins from has none."""
    return ours.query_scale_learned and not theirs.scales_queries


def check_angles(theirs: ModelConfig, ours: ModelConfig, origin: str) -> None:
    """Raise ConfigError for a run that lowers RoPE's base, or leaves out the scaling of the model
    that it begins from, as these are forgotten settings. To reach a greater length, a run may scale
    RoPE or raise its base. `origin`: where that model is from, for messages."""
    if ours.rope and theirs.rope and ours.rope_theta < theirs.rope_theta:
        raise ConfigError(
            f"model.rope_theta={ours.rope_theta} must be at least {float(theirs.rope_theta)}, as "
            f"in {origin}"
        )
    if ours.rope and theirs.rope_scaling and not ours.rope_scaling:
        raise ConfigError(
            f"{origin} scales RoPE ({describe_angles(theirs)}), not this run; set positions.scaling"
        )


def describe_changes(theirs: ModelConfig, ours: ModelConfig) -> str:
    """Return what a run changes of the model that it begins from, as the end of a sentence. It is
    empty if nothing changes."""
    changes = ""
    their_angles = describe_angles(theirs)
    our_angles = describe_angles(ours)
    if their_angles != our_angles:
        changes += f"; changes its RoPE: {their_angles} → {our_angles}"
    if adds_query_scales(theirs, ours):
        changes += "; adds learned scales of queries, which begin near a model without them"
    return changes


def describe_angles(config: ModelConfig) -> str:
    """Return RoPE's base and scaling in words, such as "base 10000, scaling none"."""
    if not config.rope:
        return "none"
    scaling = config.rope_scaling or {"rope_type": "none"}
    words = f"base {float(config.rope_theta):g}, scaling {scaling['rope_type']}"
    for name, value in sorted(scaling.items()):
        if name != "rope_type":
            words += f", {name} {value:g}"
    return words
