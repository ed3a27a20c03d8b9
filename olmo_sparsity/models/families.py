"""Describe the families of transformers that a model of this project can be.

`FAMILIES` is a table with a row for each family:

- `fixed`: fields of our config that have one value in this family;
- `settings`: fields of ours that vary, and their names in the family's config;
- `required`: settings of the family that our models have with one value only;
- `norms`: our norms of a layer, and the names of the family's.

`family_of` finds the row of a config of ours. The functions below the table translate configs and
names of weights by it, in both directions (exchange.py). In names, `ours` and `theirs` are our and
the family's names of the same thing:

    d_model=64, norm_after=True            Olmo2ForCausalLM with hidden_size=64
    transformer.blocks.0.att_proj.weight   the rows of model.layers.0.self_attn.q_proj.weight, then
                                           those of its k_proj and of its v_proj
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.config.model import COMPUTATION, ModelConfig
from olmo_sparsity.models.rope import to_rope_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
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

    def fields(self) -> dict[str, Any]:
        """Return the values of all fields of ours that have one value in this family."""
        # GPT-NeoX has other values than the other families in most of the common fields.
        if self.is_neox:
            return self.fixed
        common = {name: value for name, value in _ALL_HAVE.items() if name not in self.settings}
        return self.fixed | common

    @property
    def is_neox(self) -> bool:
        return self.fixed.get("architecture") == "gpt_neox"


_ALL_HAVE: dict[str, Any] = {
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
_SHARED = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_sequence_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "weight_tying": "tie_word_embeddings",
}
_GROUPED = _SHARED | {"n_kv_heads": "num_key_value_heads"}
_RMS = _GROUPED | {"layer_norm_eps": "rms_norm_eps"}
_PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_NORM_BEFORE = {"attn_norm": ("input_layernorm",), "ff_norm": ("post_attention_layernorm",)}
_NORM_AFTER = {
    "attn_norm": ("post_attention_layernorm",),
    "ff_norm": ("post_feedforward_layernorm",),
}
_NORM_QK = {"q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)}

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
_QK_OF_HEADS = {
    "attention_layer_norm": True,
    "attention_norm_per_head": True,
    "attention_layer_norm_with_affine": True,
}

FAMILIES = {
    "olmo": Family(
        "OlmoForCausalLM",
        {
            "layer_norm_type": "default",
            "layer_norm_with_affine": False,
            "layer_norm_eps": 1e-5,
            "norm_after": False,
            "attention_layer_norm": False,
            "head_width": None,
            "qkv_bias": False,
        },
        _GROUPED | {"clip_qkv": "clip_qkv"},
        _PLAIN,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _OLMO2,
        _RMS | {"qkv_bias": "attention_bias"},  # theirs has one of the output as well: 0
        {"hidden_act": "silu", "mlp_bias": False},
        _NORM_AFTER | _NORM_QK,
    ),
    "llama": Family(
        "LlamaForCausalLM", _LLAMA, _RMS | {"head_width": "head_dim"}, _PLAIN, _NORM_BEFORE
    ),
    # Llama whose every n-th layer has no positions. After Llama, which is chosen where all have.
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _LLAMA | {"head_width": None},
        _RMS | {"nope_every": "no_rope_layer_interval"},
        _PLAIN | {"use_sliding_window": False},
        _NORM_BEFORE,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _LLAMA | {"qkv_bias": True, "head_width": None},
        _RMS,
        {"hidden_act": "silu", "use_sliding_window": False},
        _NORM_BEFORE,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA | _QK_OF_HEADS,
        _RMS | {"head_width": "head_dim"},
        _PLAIN | {"use_sliding_window": False},
        _NORM_BEFORE | _NORM_QK,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"architecture": "olmo3"} | _OLMO2 | {"qkv_bias": False},
        _RMS | {"sliding_window": "sliding_window"},
        {"hidden_act": "silu", "attention_bias": False},
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        {"architecture": "gpt_neox"},
        _SHARED | {"layer_norm_eps": "layer_norm_eps"},
        {"hidden_act": "gelu", "attention_bias": True, "use_parallel_residual": True},
    ),
}
"""The families by their `model_type` in transformers."""


def family_of(computation: Mapping[str, Any]) -> Family:
    """Return the family that computes the same as a model of ours. If there is none, raise
    ConfigError with the first field in which the closest family differs.

    computation: What `computation_of` (computation.py) returns for our model.
    """

    def num_equal_fields(family: Family) -> int:
        """Return the number of fields before the first one in which a family differs, and one more
        than all of its fields if none does. So of two families in which none differs, that with
        more fields is closer: it is the more special one."""
        expected = family.fields()
        for num_equal, (name, value) in enumerate(expected.items()):
            if computation[name] != value:
                return num_equal
        return len(expected) + 1

    # A family that fixes the architecture runs as a model of transformers here (build.py), and
    # needs no translation.
    families = [family for family in FAMILIES.values() if "architecture" not in family.fixed]
    closest = max(families, key=num_equal_fields)
    expected = _inexpressible_fields(closest) | closest.fields()
    for name, value in expected.items():
        if computation[name] != value:
            raise ConfigError(
                f"model.{name}={computation[name]} cannot be exported: {closest.class_name} has "
                f"{value} there; pass the run itself to load_model, measure and losses"
            )
    return closest


def _inexpressible_fields(family: Family) -> dict[str, Any]:
    """Return the default values of the fields that a family does not name. An exported model must
    have them, so that `export` rejects a new field until the table expresses it."""
    named = set(family.settings) | set(family.fields()) | _EXPRESSED_BY_CODE
    return {
        item.name: item.default
        for item in dataclasses.fields(ModelConfig)
        if item.metadata["changes"] == COMPUTATION and item.name not in named
    }


_EXPRESSED_BY_CODE = {
    *("mlp_ratio", "mlp_hidden_size", "vocab_size", "embedding_size", "architecture"),
    # These have no effect next to values that every family has, such as alibi=False.
    *("alibi_bias_max", "n_kv_heads", "head_width", "attention_norm_per_head"),
    "attention_layer_norm_with_affine",
}
"""Fields that `transformers_config` writes itself, or that have no effect without another one."""


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

    values = vars(config) | {
        "n_kv_heads": config.effective_n_kv_heads,
        "vocab_size": embedding_rows(config),
        "head_width": config.effective_head_width,
    }
    settings = {theirs: values[ours] for ours, theirs in family.settings.items()}
    settings |= {
        # OLMo: with SwiGLU the width counts gate and value; GPT-NeoX has GELU.
        "intermediate_size": mlp_width(config) // (1 if family.is_neox else 2),
        "hidden_act": "gelu" if family.is_neox else "silu",
        "initializer_range": config.init_std,
        "rope_parameters": to_rope_parameters(config),
        "attention_dropout": config.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    if config.architecture == "olmo3":  # only its layers without a window scale their angles
        plain = {"rope_type": "default", "rope_theta": float(config.rope_theta)}
        settings["rope_parameters"] = {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": plain,
        }
    if family.is_neox:
        settings["hidden_dropout"] = config.residual_dropout
        settings["rope_parameters"]["partial_rotary_factor"] = config.rotary_fraction
    return getattr(transformers, family.class_name).config_class(**settings)


# --- weights --------------------------------------------------------------------------------------

_BLOCK = {
    "att_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_out": ("self_attn.o_proj",),
    "ff_proj": ("mlp.up_proj", "mlp.gate_proj"),
    "ff_out": ("mlp.down_proj",),
}
"""For each weight of a layer of ours: the names of the family's weights that hold its rows, in this
order."""


def _theirs_of_ours(family: Family, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return for each weight of ours the names of the family's weights that hold its rows, in the
    order of the rows."""
    names: dict[str, tuple[str, ...]] = {"transformer.wte.weight": ("model.embed_tokens.weight",)}
    for layer in range(config.n_layers):
        layer_names = {}
        for ours, theirs in {**_BLOCK, **family.norms}.items():
            layer_names[f"{ours}.weight"] = theirs
        if config.qkv_bias:
            layer_names["att_proj.bias"] = _BLOCK["att_proj"]
        for ours, theirs in layer_names.items():
            kind = ours.rpartition(".")[2]
            names[f"transformer.blocks.{layer}.{ours}"] = tuple(
                f"model.layers.{layer}.{name}.{kind}" for name in theirs
            )
    if config.layer_norm_with_affine:
        names["transformer.ln_f.weight"] = ("model.norm.weight",)
    if not config.weight_tying:
        names["transformer.ff_out.weight"] = ("lm_head.weight",)
    return names


def _output_biases(family: Family, config: ModelConfig) -> list[str]:
    """Return the names of the biases of output projections. With `attention_bias` some families
    have them, and our models do not."""
    if not config.qkv_bias or family.settings.get("qkv_bias") != "attention_bias":
        return []
    return [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(config.n_layers)]


def to_hugging_face(
    weights: Mapping[str, Tensor], family: Family, config: ModelConfig
) -> dict[str, Tensor]:
    """Return our weights under the names of a family, as views. Biases that our models do not have
    are 0."""
    key_width = config.effective_n_kv_heads * config.effective_head_width
    query_width = config.n_heads * config.effective_head_width
    theirs: dict[str, Tensor] = {}
    for ours, names in _theirs_of_ours(family, config).items():
        weight = weights[ours]
        if ".att_proj." in ours:
            rows_of_theirs = weight.split([query_width, key_width, key_width])
        else:
            rows_of_theirs = weight.split(len(weight) // len(names))
        theirs |= zip(names, rows_of_theirs, strict=True)
    for name in _output_biases(family, config):
        theirs[name] = torch.zeros(config.d_model)
    return theirs


class FromHuggingFace(Mapping[str, Tensor]):
    """Our weights, in fp32, made of a family's. Each is joined from these when it is looked up."""

    def __init__(self, theirs: Mapping[str, Tensor], family: Family, config: ModelConfig) -> None:
        self.theirs = theirs
        self.names = _theirs_of_ours(family, config)
        output_biases = _output_biases(family, config)
        for name in (*output_biases, *chain(*self.names.values())):
            if name not in theirs:
                raise DataError(f"init_from lacks the weight {name}; download it again")
        for name in output_biases:
            if theirs[name].count_nonzero():
                raise ConfigError(
                    f"init_from: {name} is not 0, and model.qkv_bias has no bias there; take "
                    "another model"
                )

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat([self.theirs[part].float() for part in self.names[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
