"""Build a new model with random weights from a config (`model.architecture`): OLMo (olmo/model.py),
or GPT-NeoX or OLMo 3 of transformers."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.huggingface.families import FAMILIES, Family, transformers_config
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.identity.known_identities import forget

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from olmo_sparsity.models.olmo.model import PositionedOLMo


def build_model(config: ModelConfig) -> PositionedOLMo | HuggingFaceLM:
    """Return a new model of the architecture that the config names, with random weights."""
    if config.vocab_size < 1:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size} must be at least 1; a run takes it from its "
            "tokenizer"
        )
    if config.architecture == "olmo":
        from olmo_sparsity.models.olmo.model import PositionedOLMo

        return PositionedOLMo(config)
    model = HuggingFaceLM(build_transformers_model(config))
    forget(model)  # otherwise the weights that it is given next would count as a change
    return model


_PASSED_FIELDS = {
    "architecture",
    "attention_dropout",
    "embedding_size",
    "eos_token_id",
    "init_std",
    "mlp_hidden_size",
    "mlp_ratio",
    "pad_token_id",
    "rope_scaling",
    "rope_theta",
}
"""Fields that are passed on to any model of transformers. Fields that are not passed on must have
the value of the family, or their default."""


def build_transformers_model(config: ModelConfig) -> PreTrainedModel:
    """Return a new model of transformers. Raise ConfigError if a field has a value that its family
    cannot express."""
    import transformers

    family = FAMILIES[config.architecture]
    _check_fields(config, family)
    model_class = getattr(transformers, family.class_name)
    return model_class(transformers_config(config, family))


def _check_fields(config: ModelConfig, family: Family) -> None:
    """Raise ConfigError for a field that is neither passed on to the family's model nor has the
    value that this has anyway: it would have no effect in silence. An OLMo 3 has no bias, for
    example, so `include_bias=True` is rejected."""
    passed = _PASSED_FIELDS | set(family.settings)
    allowed: dict[str, tuple[Any, ...]] = {
        name: (value,) for name, value in family.fixed_fields().items()
    }
    if family.is_neox:
        passed |= {"rotary_fraction", "embedding_dropout"}
        allowed |= {
            "activation_type": ("gelu", "swiglu"),  # the default, swiglu, means "not set"
            "include_bias": (True, False),  # likewise False
            "bias_for_layer_norm": (None, True),  # None: not set
            "n_kv_heads": (None, config.n_heads),
            "residual_dropout": (config.embedding_dropout,),  # transformers has one for both
        }
    else:
        allowed["bias_for_layer_norm"] = (None, False)
    for item in fields(config):
        if item.name in passed:
            continue
        value = getattr(config, item.name)
        values = allowed.get(item.name, (item.default,))
        if value not in values:
            raise ConfigError(
                f"model.{item.name}={value}: {config.architecture} has {values[0]}; omit it"
            )
