"""Describe the families of transformers that a model of this project can be.

`FAMILIES` is a table with a row for each family. `family_of` finds the row of a config of ours, and
`transformers_config` translates the config by it:

    ModelConfig(d_model=64, layer_norm_type="rms", norm_after=True, …)
        ─ family_of ─> FAMILIES["olmo2"]
        ─ transformers_config ─> Olmo2Config(hidden_size=64, …)

config_of_weights.py translates in the other direction, and family_weights.py translates the names
of weights. In names, `ours` and `theirs` are our and the family's names of the same thing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.model import COMPUTATION, ModelConfig
from olmo_sparsity.config.schema import properties_of
from olmo_sparsity.models.rope import to_rope_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of transformers, in terms of our config and weights."""

    class_name: str
    """The name of the family's class in transformers."""

    fixed: dict[str, Any]
    """The values of our fields that have one value in the family. Fields that distinguish families
    come first, so that `family_of` names the most telling difference."""

    settings: dict[str, str]
    """The names in the family's config of our fields that vary."""

    required: dict[str, Any] = field(default_factory=dict)
    """Settings of the family that must have this value, or be absent: our models compute nothing
    else."""

    norms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our norms of a layer, and the names of the family's."""

    def fixed_fields(self) -> dict[str, Any]:
        """Return the values of all fields of ours that have one value in this family: its own, and
        then those that most families have in common."""
        # GPT-NeoX has other values than the other families in most of the common fields.
        if self.is_neox:
            return self.fixed
        common = {name: value for name, value in _COMMON.items() if name not in self.settings}
        return self.fixed | common

    @property
    def is_neox(self) -> bool:
        return self.fixed.get("architecture") == "gpt_neox"

    @property
    def is_computed_by_transformers(self) -> bool:
        """Return whether models of this family run as models of transformers here (build.py), and
        not as our OLMo. They need no translation."""
        return "architecture" in self.fixed

    @property
    def width_per_intermediate(self) -> int:
        """Return our width of the feed-forward layer divided by the `intermediate_size` of
        transformers: with SwiGLU, our width counts gate and value; GPT-NeoX has GELU."""
        return 1 if self.is_neox else 2


# --- parts of the table, which several families have in common ------------------------------------

_COMMON: dict[str, Any] = {
    "block_type": "sequential",
    "activation_type": "swiglu",
    "rope": True,
    "alibi": False,
    "rotary_fraction": 1.0,
    "nope_every": None,
    "query_scale_length": None,
    "query_scale_learned": False,
    "include_bias": False,
    "bias_for_layer_norm": False,
    "embedding_layer_norm": False,
    "scale_logits": False,
}
"""Fields of ours that have one value in all families but GPT-NeoX, unless a family has a setting
for them."""

# Settings.
_SIZES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_sequence_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "weight_tying": "tie_word_embeddings",
}
_SIZES_WITH_GROUPS = _SIZES | {"n_kv_heads": "num_key_value_heads"}
_SIZES_WITH_RMS_NORM = _SIZES_WITH_GROUPS | {"layer_norm_eps": "rms_norm_eps"}

# Required values.
_NO_BIASES = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}

# Norms. The same name of theirs is another norm of ours before and after a block.
_NORM_BEFORE = {"attn_norm": ("input_layernorm",), "ff_norm": ("post_attention_layernorm",)}
_NORM_AFTER = {
    "attn_norm": ("post_attention_layernorm",),
    "ff_norm": ("post_feedforward_layernorm",),
}
_NORM_OF_QUERIES_AND_KEYS = {"q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)}

# Fixed values.
_LLAMA = {
    "layer_norm_type": "rms",
    "norm_after": False,
    "attention_layer_norm": False,
    "qkv_bias": False,
    "layer_norm_with_affine": True,
    "clip_qkv": None,
}
_OLMO2 = {
    "layer_norm_type": "rms",
    "norm_after": True,
    "attention_layer_norm": True,
    "attention_norm_per_head": False,
    "attention_layer_norm_with_affine": True,
    "layer_norm_with_affine": True,
    "head_width": None,
    "clip_qkv": None,
}
_NORM_PER_HEAD = {
    "attention_layer_norm": True,
    "attention_norm_per_head": True,
    "attention_layer_norm_with_affine": True,
}

# --- the table ------------------------------------------------------------------------------------

FAMILIES = {
    "olmo": Family(
        class_name="OlmoForCausalLM",
        fixed={
            "layer_norm_type": "default",
            "layer_norm_with_affine": False,
            "layer_norm_eps": 1e-5,
            "norm_after": False,
            "attention_layer_norm": False,
            "head_width": None,
            "qkv_bias": False,
        },
        settings=_SIZES_WITH_GROUPS | {"clip_qkv": "clip_qkv"},
        required=_NO_BIASES,
    ),
    "olmo2": Family(
        class_name="Olmo2ForCausalLM",
        fixed=_OLMO2,
        # `attention_bias` also adds one to the output projection, which must be 0 here
        # (family_weights.py).
        settings=_SIZES_WITH_RMS_NORM | {"qkv_bias": "attention_bias"},
        required={"hidden_act": "silu", "mlp_bias": False},
        norms=_NORM_AFTER | _NORM_OF_QUERIES_AND_KEYS,
    ),
    "llama": Family(
        class_name="LlamaForCausalLM",
        fixed=_LLAMA,
        settings=_SIZES_WITH_RMS_NORM | {"head_width": "head_dim"},
        required=_NO_BIASES,
        norms=_NORM_BEFORE,
    ),
    # Llama whose every n-th layer has no positions. After Llama, which is chosen where all have.
    "smollm3": Family(
        class_name="SmolLM3ForCausalLM",
        fixed=_LLAMA | {"head_width": None},
        settings=_SIZES_WITH_RMS_NORM | {"nope_every": "no_rope_layer_interval"},
        required=_NO_BIASES | {"use_sliding_window": False},
        norms=_NORM_BEFORE,
    ),
    "qwen2": Family(
        class_name="Qwen2ForCausalLM",
        fixed=_LLAMA | {"qkv_bias": True, "head_width": None},
        settings=_SIZES_WITH_RMS_NORM,
        required={"hidden_act": "silu", "use_sliding_window": False},
        norms=_NORM_BEFORE,
    ),
    "qwen3": Family(
        class_name="Qwen3ForCausalLM",
        fixed=_LLAMA | _NORM_PER_HEAD,
        settings=_SIZES_WITH_RMS_NORM | {"head_width": "head_dim"},
        required=_NO_BIASES | {"use_sliding_window": False},
        norms=_NORM_BEFORE | _NORM_OF_QUERIES_AND_KEYS,
    ),
    "olmo3": Family(
        class_name="Olmo3ForCausalLM",
        fixed={"architecture": "olmo3"} | _OLMO2 | {"qkv_bias": False},
        settings=_SIZES_WITH_RMS_NORM | {"sliding_window": "sliding_window"},
        required={"hidden_act": "silu", "attention_bias": False},
    ),
    "gpt_neox": Family(
        class_name="GPTNeoXForCausalLM",
        fixed={"architecture": "gpt_neox"},
        settings=_SIZES | {"layer_norm_eps": "layer_norm_eps"},
        required={"hidden_act": "gelu", "attention_bias": True, "use_parallel_residual": True},
    ),
}
"""The families by their `model_type` in transformers."""


# --- from a config of ours to its family ----------------------------------------------------------


def family_of(computation: Mapping[str, Any]) -> Family:
    """Return the family that computes the same as a model of ours. If there is none, raise
    ConfigError with the first field in which the closest family differs. `computation`: what
    `computation_of` (computation.py) returns for our model."""
    families = [family for family in FAMILIES.values() if not family.is_computed_by_transformers]
    closest = max(families, key=lambda family: _num_equal_fields(family, computation))
    expected = _inexpressible_fields(closest) | closest.fixed_fields()
    for name, value in expected.items():
        if computation[name] != value:
            raise ConfigError(
                f"model.{name}={computation[name]} cannot be exported: {closest.class_name} has "
                f"{value} there; pass the run itself to load_model, measure and losses"
            )
    return closest


def _num_equal_fields(family: Family, computation: Mapping[str, Any]) -> int:
    """Return the number of fields before the first one in which a family differs from a model, and
    one more than all of its fields if none does. So of two families in which none differs, that
    with more fields is closer: it is the more special one."""
    expected = family.fixed_fields()
    for num_equal, (name, value) in enumerate(expected.items()):
        if computation[name] != value:
            return num_equal
    return len(expected) + 1


_WRITTEN_BY_CODE = {"architecture", "mlp_ratio", "mlp_hidden_size", "embedding_size"}
"""Fields of ours that the class of a family, or `transformers_config`, expresses."""

_WITHOUT_EFFECT = {
    "alibi_bias_max",  # all families have alibi=False
    "attention_norm_per_head",  # those that do not name it have attention_layer_norm=False
    "attention_layer_norm_with_affine",  # likewise
}
"""Fields of ours that change nothing in families that do not name them."""


def _inexpressible_fields(family: Family) -> dict[str, Any]:
    """Return the default values of the fields that a family does not name. An exported model must
    have them, so that `export` rejects a new field until the table expresses it."""
    expressible = {*family.settings, *family.fixed_fields(), *_WRITTEN_BY_CODE, *_WITHOUT_EFFECT}
    return {
        item.name: item.default
        for item in dataclasses.fields(ModelConfig)
        if properties_of(item).changes == COMPUTATION and item.name not in expressible
    }


# --- the config of transformers -------------------------------------------------------------------


def mlp_width(config: ModelConfig) -> int:
    """Return the width of the feed-forward layer. With SwiGLU it counts gate and value, so it is
    twice the width that transformers states."""
    return config.mlp_hidden_size or config.mlp_ratio * config.d_model


def embedding_rows(config: ModelConfig) -> int:
    """Return the number of rows of the embedding, which may be more than there are tokens."""
    return config.embedding_size or config.vocab_size


def transformers_config(config: ModelConfig, family: Family) -> PreTrainedConfig:
    """Return the config of transformers for a model of this family."""
    import transformers

    # Effective values: None means "as many key heads as heads", for example.
    values = vars(config) | {
        "n_kv_heads": config.effective_n_kv_heads,
        "vocab_size": embedding_rows(config),
        "head_width": config.effective_head_width,
    }
    settings = {theirs: values[ours] for ours, theirs in family.settings.items()}
    settings |= {
        "intermediate_size": mlp_width(config) // family.width_per_intermediate,
        "hidden_act": "gelu" if family.is_neox else "silu",
        "initializer_range": config.init_std,
        "rope_parameters": _rope_parameters(config, family),
        "attention_dropout": config.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    if family.is_neox:
        settings["hidden_dropout"] = config.residual_dropout
    config_class = getattr(transformers, family.class_name).config_class
    return config_class(**settings)


def _rope_parameters(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return RoPE's parameters as transformers takes them for this family."""
    parameters = to_rope_parameters(config)
    if family.is_neox:
        parameters["partial_rotary_factor"] = config.rotary_fraction
    if config.architecture == "olmo3":
        # Only its layers without a window scale their angles.
        plain = {"rope_type": "default", "rope_theta": float(config.rope_theta)}
        return {"full_attention": parameters, "sliding_attention": plain}
    return parameters
