"""Export weights to a folder of transformers, and import them (`init_from`).

    a run of ours  ── export ──>  a folder of transformers     (`hugging_face_model`)
    a new run      <─ init_from ─ a folder of transformers, or a run of ours    (`import_weights`)

In both directions the fields of our config determine the family of transformers (families.py), and
two configs are compared by what they compute (`computation_of`). A field that a family cannot
express is rejected by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from olmo_sparsity.base.errors import ConfigError, UserError, unreadable
from olmo_sparsity.base.files import follow_umask, read_json, remove_partial, writing
from olmo_sparsity.config.model import COMPUTATION, ModelConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.checkpoint_files import (
    WEIGHTS,
    StoredWeights,
    check_fit,
    fill,
    load_checkpoint_config,
)
from olmo_sparsity.models.families import (
    FAMILIES,
    Family,
    FromHuggingFace,
    embedding_rows,
    family_of,
    mlp_width,
    to_hugging_face,
    transformers_config,
)
from olmo_sparsity.models.find import DTYPES, find_folder
from olmo_sparsity.models.huggingface import HuggingFaceLM
from olmo_sparsity.models.pretrained_tokenizer import read_tokenizer
from olmo_sparsity.models.rope import from_rope_parameters
from olmo_sparsity.models.transformers_folder import (
    NO_CODE,
    check_weight_files,
    read_hugging_face,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

# --- export -------------------------------------------------------------------------------------


def export(checkpoint: Path, out: Path, dtype: str = "fp32") -> str:
    """Write a checkpoint (or a run's latest) as a Hugging Face folder. Return its class name."""
    folder = find_folder(str(checkpoint))
    if (folder / "config.json").is_file():
        raise ConfigError(f"'{checkpoint}' is a Hugging Face folder already; use it directly")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"'{out}' exists; name a folder that does not, or empty it")
    config = load_checkpoint_config(folder).model
    check_exportable(config)
    model = hugging_face_model(config, StoredWeights(folder / WEIGHTS), str(folder))
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_partial(out.parent)
    with writing(out) as partial:
        torch.nn.Module.to(model, DTYPES[dtype])  # transformers' own is not typed
        model.save_pretrained(partial)
        for path in partial.glob("*.safetensors"):
            follow_umask(path)
        tokenizer = read_tokenizer(folder / "tokenizer.json")
        hugging_face_tokenizer(tokenizer, config).save_pretrained(partial)
    return type(model).__name__


def check_exportable(config: ModelConfig) -> None:
    """Reject a config that cannot be exported, before reading or training."""
    if config.architecture == "olmo":
        family_of(computation_of(config))


def hugging_face_model(
    config: ModelConfig, weights: Mapping[str, Tensor], origin: str
) -> PreTrainedModel:
    """Return the model of transformers with these weights. OLMo's are used as views, because they
    may be mapped files, which are not copied into memory then."""
    import transformers

    if config.architecture != "olmo":
        wrapped: Any = build_model(config)
        fill(wrapped, weights, origin)
        return wrapped.model
    family = family_of(computation_of(config))
    model_class = getattr(transformers, family.class_name)
    with torch.device("meta"):
        model = model_class(transformers_config(config, family))
    theirs = to_hugging_face(weights, family, config)
    check_fit(model.state_dict(keep_vars=True), theirs, origin)
    model.load_state_dict(theirs, assign=True, strict=False)
    model.tie_weights()
    # Its buffers are still on the meta device, and no weight fills them.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


def hugging_face_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a run as a transformers object, with its special tokens."""
    from transformers import PreTrainedTokenizerFast

    # An ordinary token must not be declared special, or decoding would drop it.
    special = tokenizer.get_added_tokens_decoder()
    ids = {"eos_token": config.eos_token_id, "pad_token": config.pad_token_id}
    tokens = {name: special[number].content for name, number in ids.items() if number in special}
    length = config.max_sequence_length
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **tokens)


# --- import -------------------------------------------------------------------------------------


def import_weights(source: str, config: ModelConfig) -> Mapping[str, Tensor]:
    """Return the weights for `build_model(config)` from a checkpoint or run of ours, or from a
    Hugging Face folder of one of FAMILIES. Each is read when it is looked up. A source that
    computes something else than the config is rejected."""
    implied = ModelConfig(**config_of(source))
    check_angles(implied, config, f"init_from='{source}'")
    _check_same_computation(implied, config, source)
    folder = find_folder(source)
    if config.architecture != "olmo":
        return _transformers_weights(folder)
    weights: Mapping[str, Tensor] = StoredWeights(folder / WEIGHTS)
    if (folder / "config.json").is_file():
        model_type = read_json(folder / "config.json", dict, "restore it")["model_type"]
        weights = FromHuggingFace(weights, FAMILIES[model_type], config)
    if _adds_query_scales(implied, config):
        return WithFirstQueryScales(weights, config)
    return weights


def _check_same_computation(implied: ModelConfig, config: ModelConfig, source: str) -> None:
    """Raise ConfigError unless the model of a source, whose config is `implied`, computes what
    `config` says. A run may leave out RoPE and add learned scales of queries."""
    if implied.query_scale_learned and not config.query_scale_learned:
        raise ConfigError(
            f"init_from='{source}' has learned scales of queries, without which its attention "
            "is another one; pass --model.query_scale_learned=true"
        )
    theirs = computation_of(implied)
    ours = computation_of(config)
    if implied.rope and not config.rope:
        # DroPE: a model that was trained with positions continues without them.
        for name in ("rope", "rotary_fraction", "nope_every"):
            theirs[name] = ours[name]
    if _adds_query_scales(implied, config):
        theirs["query_scale_learned"] = True
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise ConfigError(
                f"init_from='{source}' has model.{name}={theirs.get(name)}, this run {value}; set "
                "it alike"
            )


def _adds_query_scales(theirs: ModelConfig, ours: ModelConfig) -> bool:
    """Return whether a run has learned scales of queries and its source scales none."""
    return ours.query_scale_learned and not theirs.scales_queries


class WithFirstQueryScales(Mapping[str, Tensor]):
    """Weights of a model that scales no queries, and the scales with which a new model begins."""

    def __init__(self, weights: Mapping[str, Tensor], config: ModelConfig) -> None:
        from olmo_sparsity.models.layers import first_query_scale  # imports all of OLMo

        self.weights = weights
        scale = first_query_scale(config.max_sequence_length)
        self.scales: dict[str, Tensor] = {}
        for layer in range(config.n_layers):
            name = f"transformer.blocks.{layer}.query_scale"
            self.scales[name] = torch.full((config.n_heads,), scale)

    def __getitem__(self, name: str) -> Tensor:
        return self.scales[name] if name in self.scales else self.weights[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.weights
        yield from self.scales

    def __len__(self) -> int:
        return len(self.weights) + len(self.scales)


def _transformers_weights(folder: Path) -> Mapping[str, Tensor]:
    """Return the weights of a model of transformers, named as `build_model` names them."""
    if not (folder / "config.json").is_file():
        return StoredWeights(folder / WEIGHTS)
    check_weight_files(folder)
    model = read_hugging_face(folder, torch.float32, "cpu", None)
    return dict(HuggingFaceLM(model, is_tried=False).state_dict())


def check_angles(theirs: ModelConfig, ours: ModelConfig, origin: str) -> None:
    """Reject a run that lowers RoPE's base, or leaves out the scaling of its origin, as these are
    forgotten settings. To reach a greater length, a run may scale RoPE or raise its base."""
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
    """Describe what a run changes of its origin's model; empty if nothing."""
    changes = ""
    their_angles = describe_angles(theirs)
    our_angles = describe_angles(ours)
    if their_angles != our_angles:
        changes += f"; changes its RoPE: {their_angles} → {our_angles}"
    if _adds_query_scales(theirs, ours):
        changes += "; adds learned scales of queries, which begin near a model without them"
    return changes


def describe_angles(config: ModelConfig) -> str:
    """Return RoPE's base and scaling in words."""
    if not config.rope:
        return "none"
    scaling = config.rope_scaling or {"rope_type": "none"}
    words = f"base {float(config.rope_theta):g}, scaling {scaling['rope_type']}"
    for name, value in sorted(scaling.items()):
        if name != "rope_type":
            words += f", {name} {value:g}"
    return words


def config_of(source: str) -> dict[str, Any]:
    """Return the fields of ModelConfig that a source of weights implies."""
    folder = find_folder(source)
    if not (folder / "config.json").is_file():
        return dict(vars(load_checkpoint_config(folder).model))
    from transformers import AutoConfig

    try:
        return _hugging_face_fields(AutoConfig.from_pretrained(folder, **NO_CODE), source)
    except UserError:
        raise
    except Exception as error:  # a damaged config.json raises almost any
        raise unreadable(folder / "config.json", error) from None


def _hugging_face_fields(theirs: PreTrainedConfig, source: str) -> dict[str, Any]:
    """Return the fields of ModelConfig for a config of transformers. Reject a setting that they
    cannot express."""
    family = FAMILIES.get(theirs.model_type)
    if family is None:
        raise ConfigError(f"init_from='{source}' is {theirs.model_type}, not {', '.join(FAMILIES)}")
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
    if not family.is_neox:
        requirements.append(_Requirement("partial_rotary_factor", rotary_fraction, 1.0))
    for requirement in requirements:
        if requirement.value != requirement.supported:
            raise ConfigError(
                f"init_from='{source}' has {requirement.name}={requirement.value}, supported: "
                f"{requirement.supported}; take another model"
            )

    values = {ours: settings.get(name) for ours, name in family.settings.items()}
    return values | {
        # With SwiGLU, our width counts gate and value.
        "mlp_hidden_size": theirs.intermediate_size * (1 if family.is_neox else 2),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": from_rope_parameters(rope, source),
        "rotary_fraction": rotary_fraction,
        "head_width": None if head_width == usual_width else head_width,
        **family.fields(),
    }


class _Requirement(NamedTuple):
    """A setting of transformers that must have one value, as our config has no field for it."""

    name: str
    value: Any
    supported: Any


def _requirements(theirs: PreTrainedConfig, family: Family) -> list[_Requirement]:
    """Return the settings of a config of transformers that must have the values of our models."""
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


# --- comparing configs --------------------------------------------------------------------------


_FIELDS_OF_ALL_ARCHITECTURES = (
    *("architecture", "d_model", "n_layers", "n_heads", "rotary_fraction", "layer_norm_eps"),
    *("weight_tying", "mlp_hidden_size", "embedding_size"),
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
        if item.metadata["changes"] == COMPUTATION and item.name not in _REDUNDANT_FIELDS
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
