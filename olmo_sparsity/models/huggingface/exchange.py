"""Export weights to a folder of transformers, and import them (`init_from`).

    a run of ours  ── export ──>  a folder of transformers     (`hugging_face_model`)
    a new run      <─ init_from ─ a folder of transformers, or a run of ours    (`import_weights`)

In both directions the fields of our config determine the family of transformers (families.py,
family_weights.py), and two configs are compared by what they compute (computation.py). A field that
a family cannot express is rejected by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.base.files import follow_umask, read_json, remove_partial, writing
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.checkpoint_files import (
    INDEX,
    WEIGHTS,
    StoredWeights,
    check_fit,
    fill,
    load_checkpoint_config,
)
from olmo_sparsity.models.find import DTYPES, find_folder
from olmo_sparsity.models.huggingface.computation import (
    adds_query_scales,
    check_angles,
    check_same_computation,
    computation_of,
)
from olmo_sparsity.models.huggingface.config_of_weights import config_of
from olmo_sparsity.models.huggingface.families import FAMILIES, family_of, transformers_config
from olmo_sparsity.models.huggingface.family_weights import FromHuggingFace, to_hugging_face
from olmo_sparsity.models.huggingface.folder import read_hugging_face
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.huggingface.weight_files import checked_weight_files
from olmo_sparsity.models.pretrained_tokenizer import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# --- export -------------------------------------------------------------------------------------


def export(checkpoint: Path, out: Path, dtype: str = "fp32") -> str:
    """Write a checkpoint, or the latest one of a run, as a Hugging Face folder. Return the name of
    its class in transformers."""
    if checkpoint.suffix == ".gguf":
        raise ConfigError(f"'{checkpoint}' is a GGUF file; pass a run or a checkpoint")
    folder = find_folder(str(checkpoint))
    if (folder / "config.json").is_file():
        raise ConfigError(f"'{checkpoint}' is a Hugging Face folder already; use it directly")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"'{out}' exists; name a folder that does not, or empty it")
    # Several processes save an index of their files.
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        raise ConfigError(
            f"'{checkpoint}' is neither a run nor a checkpoint; pass one that `train` wrote"
        )
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
    """Raise ConfigError for a config that cannot be exported. It is called before weights are read
    or trained."""
    if config.architecture == "olmo":
        family_of(computation_of(config))


def hugging_face_model(
    config: ModelConfig, weights: Mapping[str, Tensor], origin: str
) -> PreTrainedModel:
    """Return the model of transformers with these weights.

    Args:
        weights: OLMo's are used as views. So weights in a mapped file are not copied into memory.
        origin: Where the weights are from, for messages.
    """
    import transformers

    if config.architecture != "olmo":
        wrapped: Any = build_model(config)
        fill(wrapped, weights, origin)
        return wrapped.model
    family = family_of(computation_of(config))
    model_class = getattr(transformers, family.class_name)
    with torch.device("meta"):
        model = model_class(transformers_config(config, family))
    renamed = to_hugging_face(weights, family, config)
    check_fit(model.state_dict(keep_vars=True), renamed, origin)
    model.load_state_dict(renamed, assign=True, strict=False)
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


def import_weights(init_from: str, config: ModelConfig) -> Mapping[str, Tensor]:
    """Return the weights for `build_model(config)`, each of which is read when it is looked up.
    Raise ConfigError if their model computes something else than the config says. `init_from`: a
    checkpoint or run of ours, or a Hugging Face folder of one of FAMILIES."""
    theirs = ModelConfig(**config_of(init_from))
    check_angles(theirs, config, f"init_from='{init_from}'")
    check_same_computation(theirs, config, init_from)
    folder = find_folder(init_from)
    if config.architecture != "olmo":
        return _transformers_weights(folder)
    weights: Mapping[str, Tensor] = StoredWeights(folder / WEIGHTS)
    if (folder / "config.json").is_file():
        model_type = read_json(folder / "config.json", dict, "restore it")["model_type"]
        weights = FromHuggingFace(weights, FAMILIES[model_type], config)
    if adds_query_scales(theirs, config):
        return WithFirstQueryScales(weights, config)
    return weights


class WithFirstQueryScales(Mapping[str, Tensor]):
    """Weights of a model that scales no queries, with the scales with which a new model begins."""

    def __init__(self, weights: Mapping[str, Tensor], config: ModelConfig) -> None:
        from olmo_sparsity.models.olmo.layers import first_query_scale  # imports all of OLMo

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
    checked_weight_files(folder)
    model = read_hugging_face(folder, torch.float32, "cpu", None)
    return dict(HuggingFaceLM(model, is_tried=False).state_dict())
