"""Translate the names of weights between our OLMo and the families of transformers (families.py).

A weight of ours may hold the rows of several weights of theirs, as one matrix product computes
them:

    transformer.blocks.0.att_proj.weight     the rows of model.layers.0.self_attn.q_proj.weight,
                                             then those of its k_proj, then of its v_proj

`to_hugging_face` splits our weights for an export, and `FromHuggingFace` joins theirs for a run
that begins from them. In names, `ours` and `theirs` are our and the family's names of the same
weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.huggingface.families import Family

_PROJECTIONS = {
    "att_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_out": ("self_attn.o_proj",),
    "ff_proj": ("mlp.up_proj", "mlp.gate_proj"),
    "ff_out": ("mlp.down_proj",),
}
"""For each weight of a layer of ours: the names of the family's weights that hold its rows, in this
order."""


def their_names(family: Family, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return for each weight of ours the names of the family's weights that hold its rows, in the
    order of the rows."""
    names: dict[str, tuple[str, ...]] = {"transformer.wte.weight": ("model.embed_tokens.weight",)}
    for layer in range(config.n_layers):
        ours_of_layer = f"transformer.blocks.{layer}"
        theirs_of_layer = f"model.layers.{layer}"
        for ours, theirs in {**_PROJECTIONS, **family.norms}.items():
            names[f"{ours_of_layer}.{ours}.weight"] = tuple(
                f"{theirs_of_layer}.{name}.weight" for name in theirs
            )
        if config.qkv_bias:
            names[f"{ours_of_layer}.att_proj.bias"] = tuple(
                f"{theirs_of_layer}.{name}.bias" for name in _PROJECTIONS["att_proj"]
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
    query_width = config.n_heads * config.effective_head_width
    # Several queries may share a key and a value, so these have fewer rows.
    key_width = config.effective_n_kv_heads * config.effective_head_width
    theirs: dict[str, Tensor] = {}
    for ours, names in their_names(family, config).items():
        weight = weights[ours]
        if ".att_proj." in ours:
            rows_of_theirs = weight.split([query_width, key_width, key_width])
        else:  # rows of equal number, such as those of gate and value
            rows_of_theirs = weight.split(len(weight) // len(names))
        theirs |= zip(names, rows_of_theirs, strict=True)
    for name in _output_biases(family, config):
        theirs[name] = torch.zeros(config.d_model)
    return theirs


class FromHuggingFace(Mapping[str, Tensor]):
    """Our weights, in fp32, made of a family's. Each is joined from these when it is looked up."""

    def __init__(self, theirs: Mapping[str, Tensor], family: Family, config: ModelConfig) -> None:
        self.theirs = theirs
        self.names = their_names(family, config)
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
        return torch.cat([self.theirs[their_name].float() for their_name in self.names[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
