"""Tiny GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer
from torch import Tensor

_LEAVES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, _, layer, *leaf, last = name.split(".")
    return f"blk.{layer}.{_LEAVES['.'.join(leaf)]}.{last}"


@torch.no_grad()
def round_weights(model: transformers.PreTrainedModel, kind: GGMLQuantizationType) -> None:
    """Give its matrices the values that this type can represent."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            rounded = dequantize(quantize(parameter.numpy(), kind), kind)
            parameter.copy_(torch.from_numpy(rounded))


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    tokenizer: Tokenizer,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    architecture: str = "llama",
    pre: str = "gpt-2",
    special: tuple[str, ...] = ("<|end|>",),
    entries: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    raw: dict[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
) -> None:
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges(merges_of(tokenizer))
    writer.add_eos_token_id(vocabulary[special[0]])
    writer.add_bos_token_id(vocabulary[special[0]])
    writer.add_chat_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    for key, value in (entries or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_string)(key, value)
    for name, weight in model.named_parameters():
        array = _as_stored(name, weight.detach(), config).numpy()
        stored = kind if array.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quantize(array, stored), raw_dtype=stored)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    for name, (array, stored) in (raw or {}).items():
        writer.add_tensor(name, array, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def merges_of(tokenizer: Tokenizer) -> list[str]:
    return [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def _as_stored(name: str, weight: Tensor, config: Any) -> Tensor:
    """llama.cpp turns neighbouring numbers of queries and keys, transformers distant ones."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for leaf, num in heads.items():
        if leaf in name:
            return (
                weight.reshape(num, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
            ).contiguous()
    return weight
