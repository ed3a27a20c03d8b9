"""Build a new model from a config: OLMo, or GPT-NeoX of transformers."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from olmo_sparsity.analysis.models.huggingface import HuggingFaceLM
from olmo_sparsity.analysis.models.use import forget
from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model.families import FAMILIES, transformers_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from olmo_sparsity.model.olmo import PositionedOLMo


def build_model(config: ModelConfig) -> PositionedOLMo | HuggingFaceLM:
    if config.vocab_size < 1:
        raise ConfigError(f"model.vocab_size={config.vocab_size} must be at least 1")
    if config.architecture == "olmo":
        from olmo_sparsity.model.olmo import PositionedOLMo

        return PositionedOLMo(config)
    from transformers import GPTNeoXForCausalLM

    model = HuggingFaceLM(GPTNeoXForCausalLM(gpt_neox_config(config)))
    forget(model)  # its random weights, with which it was tried
    return model


# Other fields of ModelConfig must have their default, or one of the values below, which describe
# GPT-NeoX in OLMo's terms.
_GPT_NEOX_READS = {
    *("architecture", "d_model", "n_heads", "n_layers", "mlp_ratio", "mlp_hidden_size"),
    *("rotary_fraction", "rope_theta", "layer_norm_eps", "max_sequence_length", "weight_tying"),
    *("attention_dropout", "embedding_dropout", "init_std", "vocab_size", "embedding_size"),
    *("eos_token_id", "pad_token_id", "rope_scaling"),
}


def gpt_neox_config(config: ModelConfig) -> PreTrainedConfig:
    allowed = {
        "activation_type": ("gelu", "swiglu"),  # the default, swiglu, means "not set"
        "include_bias": (True, False),  # likewise False
        "bias_for_layer_norm": (None, True),
        "n_kv_heads": (None, config.n_heads),
        "residual_dropout": (config.embedding_dropout,),
    }
    for item in fields(config):
        value, values = getattr(config, item.name), allowed.get(item.name, (item.default,))
        if item.name not in _GPT_NEOX_READS and value not in values:
            raise ConfigError(
                f"model.{item.name}={value}: model.architecture=gpt_neox has {values[0]} there"
            )
    return transformers_config(config, FAMILIES["gpt_neox"])
