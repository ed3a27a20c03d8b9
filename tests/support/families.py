"""Each main family of transformers, as a tiny random model.

`python -m tests.support.families` writes the tables of docs/extend.md from these lists.
"""

from __future__ import annotations

import functools
import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.huggingface.position_limits import position_limit
from olmo_sparsity.models.load import wrap_model
from tests.support.models import OLDER_SIZES, SIZES, TOKEN_IDS

PAGE = Path(__file__).parents[2] / "docs/extend.md"

CPU = torch.device("cpu")
LENGTH, NUM_FAR = 12, 7
# Their attention takes more than queries, keys and values of one width, or is their own.
COPIES_FAR = {
    *("Gemma2", "Gemma3n", "Gemma4", "DeepseekV2", "DeepseekV3", "GptOss", "Falcon", "GPTJ"),
    *("GPTNeo", "CodeGen"),
}
COUNTED = torch.arange(LENGTH)[None]
GAPPED = torch.tensor([[0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15]])
TOKENS = torch.randint(0, 61, (1, LENGTH), generator=torch.Generator().manual_seed(1))

OLDER = OLDER_SIZES | TOKEN_IDS
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
SHARED = {  # the last layers look at keys and values of earlier ones
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 16,
    "vocab_size_per_layer_input": 61,
    "hidden_size_per_layer_input": 8,
    "bos_token_id": 1,
}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "moe_intermediate_size": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "first_k_dense_replace": 1,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}
VISION = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
IMAGES = {
    "text_config": {**SIZES, **HEADS, **SLIDING},
    "vision_config": {"hidden_size": 16, "intermediate_size": 16, **VISION},
    "mm_tokens_per_image": 4,
}
NEO = {k: v for k, v in SIZES.items() if "num_" not in k} | {"num_layers": 2, "num_heads": 4}
MAMBA = {k: v for k, v in SIZES.items() if k not in ("num_attention_heads", "num_key_value_heads")}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61}


@dataclass(frozen=True)
class Family:
    name: str
    class_name: str
    settings: dict[str, Any]


def family(name: str, class_name: str, sizes: dict[str, Any] = SIZES, /, **settings: Any) -> Family:
    """`class_name`: without ForCausalLM."""
    whole = (
        class_name if "For" in class_name or "Head" in class_name else f"{class_name}ForCausalLM"
    )
    return Family(name, whole, {**sizes, **settings})


SUPPORTED = [
    family("Llama 1, 2, 3", "Llama"),
    family(
        *("Llama 4 (text)", "Llama4"),
        **(HEADS | {"num_local_experts": 2, "intermediate_size_mlp": 48}),
        attention_chunk_size=16,
    ),
    family("Mistral", "Mistral", sliding_window=16),
    family("Ministral", "Ministral", **HEADS, **SLIDING),
    family("Mixtral", "Mixtral", num_local_experts=4, sliding_window=None),
    family("Qwen 2, 2.5", "Qwen2"),
    family("Qwen 2 MoE", "Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=16),
    family("Qwen 3", "Qwen3", **HEADS),
    family("Qwen 3 MoE", "Qwen3Moe", **HEADS, **EXPERTS),
    family("Gemma", "Gemma", **HEADS),
    family("Gemma 2", "Gemma2", **HEADS, **SLIDING),
    family("Gemma 3 (text)", "Gemma3", **HEADS, **SLIDING),
    family(
        *("Gemma 3n (text)", "Gemma3n"),
        **(HEADS | SHARED | {"laurel_rank": 4, "activation_sparsity_pattern": None}),
    ),
    family("Gemma 4 (text)", "Gemma4", **HEADS, **SHARED, global_head_dim=16),
    family("Gemma 3 (with images)", "Gemma3ForConditionalGeneration", IMAGES),
    family("Phi 1, 2", "Phi"),
    family("Phi 3, 4", "Phi3", sliding_window=None),
    family(
        *("Phi 3, 4 (LongRoPE)", "Phi3"),
        rope_parameters=LONGROPE,
        original_max_position_embeddings=16,
    ),
    family("OLMo", "Olmo"),
    family("OLMo 2", "Olmo2"),
    family("OLMo 3", "Olmo3", **SLIDING),
    family("OLMoE", "Olmoe", **EXPERTS),
    family("DeepSeek V2", "DeepseekV2", **LATENT),
    family("DeepSeek V3, R1", "DeepseekV3", **LATENT),
    family(
        *("gpt-oss", "GptOss"),
        **(HEADS | SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ),
    family("Cohere Command R", "Cohere"),
    family("Cohere Command R7B, A", "Cohere2", **HEADS, **SLIDING),
    family("Granite", "Granite", logits_scaling=3.0, attention_multiplier=0.3),
    family("SmolLM 3", "SmolLM3", no_rope_layers=[1, 0]),
    family("StableLM", "StableLm"),
    family("StarCoder", "GPTBigCode", OLDER),
    family("StarCoder 2", "Starcoder2", sliding_window=16),
    family("GLM 4", "Glm4", **HEADS, partial_rotary_factor=0.5),
    family("EXAONE 4", "Exaone4", **HEADS, **SLIDING),
    family("nanochat", "NanoChat"),
    family("Falcon (RoPE)", "Falcon", num_kv_heads=4),
    family("GPT-NeoX, Pythia", "GPTNeoX", rotary_pct=0.5),
    family("GPT-2", "GPT2LMHeadModel", OLDER),
    family("GPT-J", "GPTJ", OLDER, rotary_dim=4),
    family(
        *("GPT-Neo", "GPTNeo", NEO),
        attention_types=[[["global", "local"], 1]],
        window_size=16,
    ),
    family("CodeGen", "CodeGen", OLDER, rotary_dim=4),
    family("OPT", "OPT", ffn_dim=48, word_embed_proj_dim=32),
]
REFUSED = [
    family("BLOOM", "Bloom", {"vocab_size": 61, "hidden_size": 32}, n_layer=2, n_head=4),
    family("Falcon (ALiBi)", "Falcon", alibi=True, num_kv_heads=4),
    family("Mamba", "Mamba", MAMBA),
    family(
        *("RecurrentGemma", "RecurrentGemma"),
        **(HEADS | {"lru_width": 32, "attention_window_size": 16}),
    ),
    family(
        *("Qwen 3 Next", "Qwen3Next"),
        **(HEADS | EXPERTS | {"layer_types": ["linear_attention", "full_attention"]}),
    ),
    family("Olmo Hybrid", "OlmoHybrid", layer_types=["linear_attention", "full_attention"]),
    family("Falcon-H1", "FalconH1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16),
    family("Granite 4", "GraniteMoeHybrid", layer_types=["mamba", "attention"], mamba_n_heads=4),
    family("LFM 2", "Lfm2", layer_types=["conv", "full_attention"]),
    family("BERT (not a decoder)", "BertLMHeadModel"),
    family("T5", "T5ForConditionalGeneration", T5, decoder_start_token_id=0),
]


def build(family: Family, **changes: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model_class = getattr(transformers, family.class_name)
    # Copied: configs write into the dicts that they are given.
    config = model_class.config_class(**deepcopy(family.settings | changes))
    model = model_class(config).eval()
    # GPT-2 and its kin: whatever the config says, their own 0.02 leaves nothing to attend to.
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and weight.std() < 0.1:
                weight.normal_(std=0.2)
    return model


@functools.cache
def wrap(index: int) -> HuggingFaceLM:
    return HuggingFaceLM(build(SUPPORTED[index]))


@functools.cache
def reason(index: int) -> str:
    family = REFUSED[index]
    with pytest.raises(ConfigError) as caught:
        HuggingFaceLM(build(family))
    name, _, said = str(caught.value).partition(" is not supported: ")
    assert name.startswith(family.class_name)
    return said.partition("; explain and measure take")[0]  # as the next column says


each = pytest.mark.parametrize("index", range(len(SUPPORTED)), ids=[f.name for f in SUPPORTED])


def check_close(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-5 * scale


def own_logits(model: HuggingFaceLM, positions_BL: Tensor, bias: Tensor) -> Tensor:
    return model.model(
        input_ids=TOKENS, position_ids=positions_BL, attention_mask=bias, use_cache=False
    ).logits


def find(name: str) -> int:
    return next(index for index, family in enumerate(SUPPORTED) if family.name == name)


class EightBits(nn.Linear):
    """Weights and activations rounded to 8 bits, as quantized models do."""

    def forward(self, x: Tensor) -> Tensor:
        steps = [t.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127 for t in (x, self.weight)]
        x, weight = ((t / s).round() * s for t, s in zip((x, self.weight), steps, strict=True))
        return F.linear(x, weight, self.bias)


def quantize(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    for module in model.modules():
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            module.__class__ = EightBits
    return model


def layers(index: int) -> str:
    kinds = [name.removesuffix("_attention") or "sliding" for name in wrap(index).windows]
    return ", ".join(sorted(kinds)) or "full"


def longest(index: int) -> str:
    """The hard limit in tokens, by the defaults of the config class in transformers."""
    family, model = SUPPORTED[index], wrap(index)
    config = getattr(transformers, family.class_name).config_class()
    hard = position_limit(config, bool(model.windows), only_wrong_beyond=True)
    if hard is None and model.limit is not None and "LongRoPE" in model.limit.cause:
        return f"{config.original_max_position_embeddings:,} ({model.limit.cause})"
    return f"{hard.num_positions:,} ({hard.cause})" if hard else "none"


def replaced(index: int) -> str:
    """How prompts are computed with distant_states="replaced"."""
    try:
        model = wrap_model(build(REFUSED[index]), whole_prompts=True).prompt_model
    except ConfigError:
        return "no"
    assert model is not None
    return "states of beginnings shared" if model.shares else "whole prompts"


@torch.no_grad()
def error(index: int) -> float:
    """The largest difference of logits, over the largest logit: the last five of 60 tokens behind
    the states of the others, and all of them by transformers."""
    model, limit = wrap(index), wrap(index).wrong_beyond
    length = min(60, limit.num_positions) if limit else 60
    tokens = torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(1))
    places, theirs = torch.arange(length)[None], model.model(input_ids=tokens, use_cache=False)
    distant = model.distant_states(tokens[:, :-5], places[:, :-5])
    ours = model.unembed(model.hidden(tokens[:, -5:], places[:, -5:], distant=distant))
    return float((ours - theirs.logits[:, -5:]).abs().max() / theirs.logits.abs().max())


def errors_on_the_page() -> list[str]:
    return re.findall(r"^\| .* \| (\d\.\de[-+]\d\d) \|$", PAGE.read_text(), re.M)


def page(errors: list[str]) -> str:
    """docs/extend.md, with its tables as these lists make them now. `errors`: as measured once."""
    supported = [
        (f.name, f.class_name, layers(i), longest(i), error)
        for i, (f, error) in enumerate(zip(SUPPORTED, errors, strict=True))
    ]
    refused = [(f.name, f.class_name, reason(i), replaced(i)) for i, f in enumerate(REFUSED)]
    text = PAGE.read_text()
    for title, entries in (
        ("layers | limit in tokens | error", supported),
        ("why | replaced", refused),
    ):
        head = f"| family | class in transformers | {title} |\n"
        rule = "| --- " * head.count(" | ") + "| --- |\n"
        rows = "".join(f"| {n} | `{cls}` | {' | '.join(said)} |\n" for n, cls, *said in entries)
        before, found, after = text.partition(head)
        assert found
        text = before + head + rule + rows + re.sub(r"^(\|.*\n)*", "", after)
    return text


if __name__ == "__main__":
    PAGE.write_text(page([f"{error(i):.1e}" for i in range(len(SUPPORTED))]))
