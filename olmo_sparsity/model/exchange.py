"""Export weights to Hugging Face format, and import them from it.

Place in the flow: beside `load_model`. `export` writes a folder that transformers loads without
this project; `import_weights` starts a run from other weights (`init_from`).

The norms of a config determine the transformers class: LayerNorm without weights before each layer
is OLMo, RMSNorm after each layer with q/k-norm is OLMo 2, RMSNorm before each layer is Llama, which
may have biases in all maps but the last. A field that the class cannot express is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from olmo_sparsity.config.file import load_saved_config
from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.disk.files import follow_umask, remove_partial, writing
from olmo_sparsity.errors import ConfigError, UserError
from olmo_sparsity.model.checkpoint_files import check_fit, fill, unreadable
from olmo_sparsity.model.huggingface import HuggingFaceLM, gpt_neox_config
from olmo_sparsity.model.load import find_folder, load_model
from olmo_sparsity.model.official import (
    is_official,
    read_official_config,
    read_official_weights,
)
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.model.transformers_folder import NO_CODE

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedModel

# --- the tables ---------------------------------------------------------------------------------

# Fields of our config with a fixed value in all three classes, and in each class.
_ALL_HAVE: dict[str, Any] = {
    "block_type": "sequential",
    "activation_type": "swiglu",
    "rope": True,
    "alibi": False,
    "rotary_fraction": 1.0,
    "query_scale_length": None,
    "bias_for_layer_norm": False,
    "embedding_layer_norm": False,
    "scale_logits": False,
}
_EACH_HAS: dict[str, dict[str, Any]] = {
    "OlmoForCausalLM": {
        "include_bias": False,
        "layer_norm_type": "default",
        "layer_norm_with_affine": False,
        "layer_norm_eps": 1e-5,
        "norm_after": False,
        "attention_layer_norm": False,
    },
    "Olmo2ForCausalLM": {
        "include_bias": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "norm_after": True,
        "attention_layer_norm": True,
        "attention_layer_norm_with_affine": True,
        "clip_qkv": None,
    },
    "LlamaForCausalLM": {
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "norm_after": False,
        "attention_layer_norm": False,
        "clip_qkv": None,
    },
}

# Our weight → theirs; several of theirs are rows of ours, in this order.
_BLOCK = {
    "att_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_out": ("self_attn.o_proj",),
    "ff_proj": ("mlp.up_proj", "mlp.gate_proj"),
    "ff_out": ("mlp.down_proj",),
}
_BLOCK_NORMS = {
    "OlmoForCausalLM": {},
    "Olmo2ForCausalLM": {
        "q_norm": ("self_attn.q_norm",),
        "k_norm": ("self_attn.k_norm",),
        "attn_norm": ("post_attention_layernorm",),
        "ff_norm": ("post_feedforward_layernorm",),
    },
    "LlamaForCausalLM": {
        "attn_norm": ("input_layernorm",),
        "ff_norm": ("post_attention_layernorm",),
    },
}


def _names(class_name: str, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Maps each weight of ours to the weights of theirs that hold its rows."""
    names: dict[str, tuple[str, ...]] = {"transformer.wte.weight": ("model.embed_tokens.weight",)}
    parts = [(*item, "weight") for item in (_BLOCK | _BLOCK_NORMS[class_name]).items()]
    if config.include_bias:
        parts += [(*item, "bias") for item in _BLOCK.items()]
    for layer in range(config.n_layers):
        for ours, theirs, kind in parts:
            names[f"transformer.blocks.{layer}.{ours}.{kind}"] = tuple(
                f"model.layers.{layer}.{name}.{kind}" for name in theirs
            )
    if config.layer_norm_with_affine:
        names["transformer.ln_f.weight"] = ("model.norm.weight",)
    if not config.weight_tying:
        names["transformer.ff_out.weight"] = ("lm_head.weight",)
    return names


def to_hugging_face(
    weights: Mapping[str, Tensor], class_name: str, config: ModelConfig
) -> dict[str, Tensor]:
    head_width = config.d_model // config.n_heads
    rows = {
        "att_proj": [config.d_model] + [config.effective_n_kv_heads * head_width] * 2,
        "ff_proj": [_mlp_width(config) // 2] * 2,
    }
    theirs: dict[str, Tensor] = {}
    for ours, names in _names(class_name, config).items():
        sizes = rows.get(ours.split(".")[-2], [len(weights[ours])])
        theirs |= zip(names, weights[ours].split(sizes), strict=True)
    return theirs


def from_hugging_face(
    weights: Mapping[str, Tensor], class_name: str, config: ModelConfig
) -> dict[str, Tensor]:
    return {
        ours: torch.cat([weights[name] for name in names])
        for ours, names in _names(class_name, config).items()
    }


# --- export -------------------------------------------------------------------------------------


def export(checkpoint: Path, out: Path) -> str:
    """Write a checkpoint (or a run's latest) as a Hugging Face folder; returns its class name."""
    folder = find_folder(str(checkpoint))
    if (folder / "config.json").is_file():
        raise ConfigError(f"'{checkpoint}' is a Hugging Face folder already; use it directly")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"'{out}' exists; name a folder that does not, or empty it")
    config = load_saved_config(folder / "config.yaml").model
    check_exportable(config)
    loaded = load_model(str(folder), device="cpu")
    assert loaded.tokenizer is not None
    if isinstance(loaded.model, HuggingFaceLM):
        model = loaded.model.model
    else:
        model = hugging_face_model(config, loaded.model.state_dict(), str(folder))
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_partial(out.parent)
    with writing(out) as partial:
        model.save_pretrained(partial)
        for path in partial.glob("*.safetensors"):
            follow_umask(path)
        _save_tokenizer(loaded.tokenizer, config, partial)
    return type(model).__name__


def check_exportable(config: ModelConfig) -> None:
    """Refuse a config that cannot be exported, before reading or training."""
    if config.architecture == "olmo":
        _class_of(config)


def hugging_face_model(
    config: ModelConfig, weights: Mapping[str, Tensor], origin: str
) -> PreTrainedModel:
    import transformers

    class_name = _class_of(config)
    model_class = getattr(transformers, class_name)
    settings = {
        "vocab_size": _embedding_rows(config),
        "hidden_size": config.d_model,
        "intermediate_size": _mlp_width(config) // 2,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.effective_n_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_sequence_length,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.weight_tying,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config.rope_theta)},
        "attention_dropout": config.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    if class_name == "OlmoForCausalLM":
        settings["clip_qkv"] = config.clip_qkv
    else:
        settings["rms_norm_eps"] = config.layer_norm_eps
    if class_name == "LlamaForCausalLM":
        settings["attention_bias"] = settings["mlp_bias"] = config.include_bias
    model = model_class(model_class.config_class(**settings))
    fill(model, to_hugging_face(weights, class_name, config), origin)
    return model


def _class_of(config: ModelConfig) -> str:
    """The transformers class with the same computation; ConfigError if there is none."""
    if config.layer_norm_type != "rms":
        class_name = "OlmoForCausalLM"
    else:
        class_name = "Olmo2ForCausalLM" if config.norm_after else "LlamaForCausalLM"
    essence = _essence(config)
    needed = _EACH_HAS[class_name] | _ALL_HAVE
    if config.include_bias:
        needed["weight_tying"] = True  # else the last map has a bias here, and none there
    for name, wanted in needed.items():
        if essence[name] != wanted:
            raise ConfigError(
                f"model.{name}={essence[name]} cannot be exported: {class_name} has {wanted} "
                "there; analyse the checkpoint as it is, or train with that value"
            )
    return class_name


def _save_tokenizer(tokenizer: Tokenizer, config: ModelConfig, out: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    # An ordinary token must not be declared special, or decoding would drop it.
    special = tokenizer.get_added_tokens_decoder()
    tokens = {
        name: special[token_id].content
        for name, token_id in (
            ("eos_token", config.eos_token_id),
            ("pad_token", config.pad_token_id),
        )
        if token_id in special
    }
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=config.max_sequence_length, **tokens
    ).save_pretrained(out)


# --- import -------------------------------------------------------------------------------------


def import_weights(source: str, config: ModelConfig) -> dict[str, Tensor]:
    """A state dict for `build_model(config)`, from an official OLMo checkpoint folder, a checkpoint
    or run of ours, or a Hugging Face OLMo, OLMo 2, Llama or GPT-NeoX."""
    implied = ModelConfig(**config_of(source))
    theirs, ours = _essence(implied), _essence(config)
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise ConfigError(
                f"init_from='{source}' has model.{name}={theirs.get(name)}, this run "
                f"model.{name}={value}; set the model's fields as they are there"
            )
    if is_official(source):
        weights = read_official_weights(Path(source))
    else:
        model = load_model(source, dtype="fp32").model
        weights = dict(model.state_dict())
        if isinstance(model, HuggingFaceLM) and config.architecture == "olmo":
            weights = dict(model.model.state_dict())
            weights = from_hugging_face(weights, type(model.model).__name__, config)
    check_fit(_expected(config), weights, source)
    return weights


def config_of(source: str) -> dict[str, Any]:
    """The fields of ModelConfig that a source of weights implies."""
    if is_official(source):
        return dict(vars(read_official_config(Path(source))))
    folder = find_folder(source)
    if not (folder / "config.json").is_file():
        return dict(vars(load_saved_config(folder / "config.yaml").model))
    from transformers import AutoConfig

    try:
        return _hugging_face_fields(AutoConfig.from_pretrained(folder, **NO_CODE), source)
    except UserError:
        raise
    except Exception as error:  # a damaged config.json raises almost any
        raise unreadable(folder / "config.json", error) from None


def _hugging_face_fields(theirs: PreTrainedConfig, source: str) -> dict[str, Any]:
    class_name = {
        "olmo": "OlmoForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        "llama": "LlamaForCausalLM",
        "gpt_neox": "GPTNeoXForCausalLM",
    }.get(theirs.model_type)
    if class_name is None:
        raise ConfigError(
            f"init_from='{source}' is of type {theirs.model_type}; only olmo, olmo2, llama and "
            "gpt_neox have a counterpart here"
        )
    get = theirs.to_dict().get
    neox = class_name == "GPTNeoXForCausalLM"
    biases = class_name == "LlamaForCausalLM" and bool(get("mlp_bias"))
    rope = get("rope_parameters") or {}
    head_width = theirs.hidden_size // theirs.num_attention_heads
    for name, value, wanted in (
        ("hidden_act", get("hidden_act"), "gelu" if neox else "silu"),
        ("attention_bias", get("attention_bias"), neox or biases),
        ("mlp_bias", get("mlp_bias", False), biases),
        ("use_parallel_residual", get("use_parallel_residual", True), True),
        ("rope_type", rope.get("rope_type", "default"), "default"),
        ("head_dim", get("head_dim") or head_width, head_width),
    ):
        if value != wanted:
            raise ConfigError(
                f"init_from='{source}': {name}={value} in its config.json has no counterpart here, "
                f"only {wanted}"
            )
    shared = {
        "architecture": "gpt_neox" if neox else "olmo",
        "d_model": theirs.hidden_size,
        "n_layers": theirs.num_hidden_layers,
        "n_heads": theirs.num_attention_heads,
        "mlp_hidden_size": theirs.intermediate_size * (1 if neox else 2),
        "rope_theta": rope["rope_theta"],
        "max_sequence_length": theirs.max_position_embeddings,
        "vocab_size": theirs.vocab_size,
        "weight_tying": theirs.tie_word_embeddings,
    }
    if neox:
        return shared | {
            "rotary_fraction": rope["partial_rotary_factor"],
            "layer_norm_eps": theirs.layer_norm_eps,
        }
    return (
        shared
        | {"n_kv_heads": theirs.num_key_value_heads, "clip_qkv": get("clip_qkv")}
        | {"layer_norm_eps": get("rms_norm_eps"), "include_bias": biases}
        | _ALL_HAVE
        | _EACH_HAS[class_name]
    )


# --- comparing configs --------------------------------------------------------------------------


def _essence(config: ModelConfig) -> dict[str, Any]:
    """The fields that determine the computation, each as its effective value. Lengths, dropout and
    initialisation may differ between a source of weights and a run."""
    shared = {
        "architecture": config.architecture,
        "d_model": config.d_model,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "mlp_hidden_size": _mlp_width(config),
        "rope_theta": float(config.rope_theta) if config.rope else None,
        "rotary_fraction": config.rotary_fraction,
        "layer_norm_eps": config.layer_norm_eps,
        "weight_tying": config.weight_tying,
        "embedding_size": _embedding_rows(config),
    }
    if config.architecture == "gpt_neox":
        return shared
    bias = config.bias_for_layer_norm
    return shared | {
        "query_scale_length": config.query_scale_length,
        "n_kv_heads": config.effective_n_kv_heads,
        "activation_type": str(config.activation_type),
        "block_type": str(config.block_type),
        "rope": config.rope,
        "alibi": config.alibi,
        "alibi_bias_max": config.alibi_bias_max if config.alibi else None,
        # low_precision is also LayerNorm; it differs under autocast only.
        "layer_norm_type": "rms" if config.layer_norm_type == "rms" else "default",
        "layer_norm_with_affine": config.layer_norm_with_affine,
        "norm_after": config.norm_after,
        "attention_layer_norm": config.attention_layer_norm,
        "attention_layer_norm_with_affine": (
            config.attention_layer_norm and config.attention_layer_norm_with_affine
        ),
        "embedding_layer_norm": config.embedding_layer_norm,
        "include_bias": config.include_bias,
        "bias_for_layer_norm": config.include_bias if bias is None else bias,
        "clip_qkv": config.clip_qkv,
        "scale_logits": config.scale_logits,
    }


def _mlp_width(config: ModelConfig) -> int:
    return config.mlp_hidden_size or config.mlp_ratio * config.d_model


def _embedding_rows(config: ModelConfig) -> int:
    return config.embedding_size or config.vocab_size


def _expected(config: ModelConfig) -> dict[str, Tensor]:
    """Names and shapes of `build_model(config)`, without allocating memory."""
    if config.architecture == "olmo":
        on_meta = config.update_with(init_device="meta")
        return PositionedOLMo(on_meta, init_params=False).state_dict(keep_vars=True)
    from transformers import GPTNeoXForCausalLM

    with torch.device("meta"):
        model = GPTNeoXForCausalLM(gpt_neox_config(config))
    return {f"model.{name}": t for name, t in model.state_dict(keep_vars=True).items()}
