"""Read which `ModelConfig` the model of some weights has: that of a checkpoint, a run, or a Hugging
Face folder.

    config_of("runs/mine")             the fields that its checkpoint stores
    config_of("allenai/OLMo-2-…")      config.json of transformers, translated by the table of
                                       families.py

A Hugging Face model with a setting that `ModelConfig` cannot express is rejected by the name of the
setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from olmo_sparsity.base.errors import ConfigError, UserError, unreadable
from olmo_sparsity.models.checkpoint_files import load_checkpoint_config
from olmo_sparsity.models.find import find_folder
from olmo_sparsity.models.huggingface.families import FAMILIES, Family
from olmo_sparsity.models.huggingface.folder import NO_CODE
from olmo_sparsity.models.rope import from_rope_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def config_of(init_from: str) -> dict[str, Any]:
    """Return the fields of ModelConfig that weights determine. `init_from`: name or folder of a
    checkpoint, a run or a Hugging Face model."""
    folder = find_folder(init_from)
    if not (folder / "config.json").is_file():
        return dict(vars(load_checkpoint_config(folder).model))
    from transformers import AutoConfig

    try:
        return _hugging_face_fields(AutoConfig.from_pretrained(folder, **NO_CODE), init_from)
    except UserError:
        raise
    except Exception as error:  # a damaged config.json raises almost any
        raise unreadable(folder / "config.json", error) from None


def _hugging_face_fields(theirs: PreTrainedConfig, init_from: str) -> dict[str, Any]:
    """Return the fields of ModelConfig for a config of transformers. Raise ConfigError if it has a
    setting that they cannot express."""
    family = FAMILIES.get(theirs.model_type)
    if family is None:
        raise ConfigError(
            f"init_from='{init_from}' is {theirs.model_type}, not {', '.join(FAMILIES)}"
        )
    settings = theirs.to_dict()
    rope = settings.get("rope_parameters") or {}
    if theirs.model_type == "olmo3":
        rope = rope["full_attention"]  # only layers without a window scale their angles
    usual_width = theirs.hidden_size // theirs.num_attention_heads
    head_width = settings.get("head_dim") or usual_width
    rotary_fraction = rope.get("partial_rotary_factor", 1.0)

    requirements = _requirements(theirs, family)
    if "head_width" not in family.settings:
        requirements.append(_Requirement("head_dim", head_width, usual_width))
    # Of our families only GPT-NeoX may rotate a part of each head.
    if not family.is_neox:
        requirements.append(_Requirement("partial_rotary_factor", rotary_fraction, 1.0))
    for requirement in requirements:
        if requirement.value != requirement.supported:
            raise ConfigError(
                f"init_from='{init_from}' has {requirement.name}={requirement.value}, supported: "
                f"{requirement.supported}; take another model"
            )

    values = {ours: settings.get(name) for ours, name in family.settings.items()}
    return values | {
        "mlp_hidden_size": theirs.intermediate_size * family.width_per_intermediate,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": from_rope_parameters(rope, init_from),
        "rotary_fraction": rotary_fraction,
        "head_width": None if head_width == usual_width else head_width,
        **family.fixed_fields(),
    }


class _Requirement(NamedTuple):
    """A setting of transformers that must have one value, as our config has no field for it."""

    name: str
    value: Any
    """The value in the config of a model."""

    supported: Any
    """The only value that our models can have."""


def _requirements(theirs: PreTrainedConfig, family: Family) -> list[_Requirement]:
    """Return the settings that must have one value in a config of this family, as our models
    compute nothing else."""
    settings = theirs.to_dict()
    supported = family.required | {"quantization_config": None}
    requirements = [
        _Requirement(name, settings.get(name, value), value) for name, value in supported.items()
    ]
    config: Any = theirs
    if theirs.model_type == "olmo3":
        usual = type(config)(num_hidden_layers=config.num_hidden_layers)
        requirements.append(_Requirement("layer_types", config.layer_types, usual.layer_types))
        rope = settings["rope_parameters"]
        plain = {"rope_type": "default", "rope_theta": rope["full_attention"]["rope_theta"]}
        requirements.append(_Requirement("rope_parameters", rope["sliding_attention"], plain))
    if theirs.model_type == "smollm3":
        # Layers without positions may be listed one by one, too, in any order.
        layers = range(1, config.num_hidden_layers + 1)
        usual_layers = [int(layer % config.no_rope_layer_interval != 0) for layer in layers]
        requirements.append(_Requirement("no_rope_layers", config.no_rope_layers, usual_layers))
    return requirements
