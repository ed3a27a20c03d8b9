"""Build a new model from a config: OLMo, or GPT-NeoX of transformers."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

from olmo_sparsity.analysis.models.huggingface import HuggingFaceLM
from olmo_sparsity.analysis.models.use import forget
from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model.rope import to_rope_parameters

if TYPE_CHECKING:
    from transformers import GPTNeoXConfig

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


# All other fields of ModelConfig must have their default, or one of the values in _GPT_NEOX_IS,
# which describe GPT-NeoX in OLMo's terms.
_GPT_NEOX_READS = {
    *("architecture", "d_model", "n_heads", "n_layers", "mlp_ratio", "mlp_hidden_size"),
    *("rotary_fraction", "rope_theta", "layer_norm_eps", "max_sequence_length", "weight_tying"),
    *("attention_dropout", "residual_dropout", "embedding_dropout", "init_std", "vocab_size"),
    *("embedding_size", "eos_token_id", "pad_token_id", "n_kv_heads", "rope_scaling"),
}
_GPT_NEOX_IS = {
    "activation_type": ("gelu", "swiglu"),  # the default, swiglu, means "not set"
    "include_bias": (True, False),  # likewise False
    "bias_for_layer_norm": (None, True),
}


def gpt_neox_config(config: ModelConfig) -> GPTNeoXConfig:
    from transformers import GPTNeoXConfig

    for item in fields(config):
        if item.name in _GPT_NEOX_READS:
            continue
        value = getattr(config, item.name)
        assert item.default is not MISSING
        allowed = _GPT_NEOX_IS.get(item.name, (item.default,))
        if value not in allowed:
            raise ConfigError(f"model.{item.name}={value}: model.architecture=gpt_neox has none")
    if config.n_kv_heads not in (None, config.n_heads):
        raise ConfigError(f"model.n_kv_heads={config.n_kv_heads}: gpt_neox has {config.n_heads}")
    if config.embedding_dropout != config.residual_dropout:
        raise ConfigError(
            f"model.embedding_dropout={config.embedding_dropout} must be "
            f"model.residual_dropout={config.residual_dropout}: gpt_neox has one rate"
        )
    return GPTNeoXConfig(
        vocab_size=config.embedding_size or config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        # OLMo: with SwiGLU this counts gate and value; here: GELU, so it is the width itself.
        intermediate_size=config.mlp_hidden_size or config.mlp_ratio * config.d_model,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.residual_dropout,
        max_position_embeddings=config.max_sequence_length,
        initializer_range=config.init_std,
        layer_norm_eps=config.layer_norm_eps,
        tie_word_embeddings=config.weight_tying,
        rope_parameters=to_rope_parameters(config)
        | {"partial_rotary_factor": config.rotary_fraction},
        bos_token_id=config.eos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
