"""Each main family of transformers, as a tiny random model.

`python -m tests.support.families` writes the tables of docs/models.md from these lists.
"""

from __future__ import annotations

import functools
import re
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from olmo_sparsity.analysis.models.compatibility import position_limit
from olmo_sparsity.analysis.models.huggingface import HuggingFaceLM
from olmo_sparsity.errors import ConfigError
from tests.support.models import SIZES, TOKEN_IDS

PAGE = Path(__file__).parents[2] / "docs/models.md"

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

OLDER = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKEN_IDS}
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
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Family:
    name: str
    class_name: str
    settings: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)


SUPPORTED = [
    Family("Llama 1, 2, 3", "LlamaForCausalLM"),
    Family(
        "Llama 4 (text)",
        "Llama4ForCausalLM",
        {**HEADS, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
    ),
    Family("Mistral", "MistralForCausalLM", {"sliding_window": 16}),
    Family("Ministral", "MinistralForCausalLM", {**HEADS, **SLIDING}),
    Family("Mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": None}),
    Family("Qwen 2, 2.5", "Qwen2ForCausalLM"),
    Family("Qwen 2 MoE", "Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    Family("Qwen 3", "Qwen3ForCausalLM", HEADS),
    Family("Qwen 3 MoE", "Qwen3MoeForCausalLM", {**HEADS, **EXPERTS}),
    Family("Gemma", "GemmaForCausalLM", HEADS),
    Family("Gemma 2", "Gemma2ForCausalLM", {**HEADS, **SLIDING}),
    Family("Gemma 3 (text)", "Gemma3ForCausalLM", {**HEADS, **SLIDING}),
    Family(
        "Gemma 3n (text)",
        "Gemma3nForCausalLM",
        {**HEADS, **SHARED, "laurel_rank": 4, "activation_sparsity_pattern": None},
    ),
    Family("Gemma 4 (text)", "Gemma4ForCausalLM", {**HEADS, **SHARED, "global_head_dim": 16}),
    Family(
        "Gemma 3 (with images)",
        "Gemma3ForConditionalGeneration",
        sizes={
            "text_config": {**SIZES, **HEADS, **SLIDING},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
    ),
    Family("Phi 1, 2", "PhiForCausalLM"),
    Family("Phi 3, 4", "Phi3ForCausalLM", {"sliding_window": None}),
    Family(
        "Phi 3, 4 (LongRoPE)",
        "Phi3ForCausalLM",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    Family("OLMo", "OlmoForCausalLM"),
    Family("OLMo 2", "Olmo2ForCausalLM"),
    Family("OLMo 3", "Olmo3ForCausalLM", SLIDING),
    Family("OLMoE", "OlmoeForCausalLM", EXPERTS),
    Family("DeepSeek V2", "DeepseekV2ForCausalLM", LATENT),
    Family("DeepSeek V3, R1", "DeepseekV3ForCausalLM", LATENT),
    Family(
        "gpt-oss",
        "GptOssForCausalLM",
        {**HEADS, **SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Family("Cohere Command R", "CohereForCausalLM"),
    Family("Cohere Command R7B, A", "Cohere2ForCausalLM", {**HEADS, **SLIDING}),
    Family("Granite", "GraniteForCausalLM", {"logits_scaling": 3.0, "attention_multiplier": 0.3}),
    Family("SmolLM 3", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    Family("StableLM", "StableLmForCausalLM"),
    Family("StarCoder", "GPTBigCodeForCausalLM", sizes=OLDER),
    Family("StarCoder 2", "Starcoder2ForCausalLM", {"sliding_window": 16}),
    Family("GLM 4", "Glm4ForCausalLM", {**HEADS, "partial_rotary_factor": 0.5}),
    Family("EXAONE 4", "Exaone4ForCausalLM", {**HEADS, **SLIDING}),
    Family("nanochat", "NanoChatForCausalLM"),
    Family("Falcon (RoPE)", "FalconForCausalLM", {"num_kv_heads": 4}),
    Family("GPT-NeoX, Pythia", "GPTNeoXForCausalLM", {"rotary_pct": 0.5}),
    Family("GPT-2", "GPT2LMHeadModel", sizes=OLDER),
    Family("GPT-J", "GPTJForCausalLM", {"rotary_dim": 4}, sizes=OLDER),
    Family(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 16,
        },
        sizes={k: v for k, v in SIZES.items() if "num_" not in k},
    ),
    Family("CodeGen", "CodeGenForCausalLM", {"rotary_dim": 4}, sizes=OLDER),
    Family("OPT", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
]

MAMBA = {k: v for k, v in SIZES.items() if k not in ("num_attention_heads", "num_key_value_heads")}
ENCODER_DECODER = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
REFUSED = [
    Family(
        "BLOOM",
        "BloomForCausalLM",
        {"n_layer": 2, "n_head": 4},
        sizes={"vocab_size": 61, "hidden_size": 32, **TOKEN_IDS},
    ),
    Family(
        "MPT",
        "MptForCausalLM",
        sizes={
            "vocab_size": 61,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
            **TOKEN_IDS,
        },
    ),
    Family("Falcon (ALiBi)", "FalconForCausalLM", {"alibi": True, "num_kv_heads": 4}),
    Family("Mamba", "MambaForCausalLM", sizes=MAMBA),
    Family(
        "RWKV",
        "RwkvForCausalLM",
        {"attention_hidden_size": 32},
        sizes={"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, **TOKEN_IDS},
    ),
    Family(
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        {**HEADS, "lru_width": 32, "attention_window_size": 16},
    ),
    Family(
        "Qwen 3 Next",
        "Qwen3NextForCausalLM",
        {**HEADS, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
    ),
    Family("LFM 2", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    Family("BERT (not a decoder)", "BertLMHeadModel"),
    Family(
        "T5",
        "T5ForConditionalGeneration",
        sizes={"vocab_size": 61, **ENCODER_DECODER, "decoder_start_token_id": 0},
    ),
]


def build(family: Family, **changes: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model_class = getattr(transformers, family.class_name)
    # Copied: configs write into the dicts that they are given.
    config = model_class.config_class(**deepcopy(family.sizes | family.settings | changes))
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
    return said


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


def longest(index: int) -> str:
    """The hard limit in tokens, by the defaults of the config class in transformers."""
    family, tiny = SUPPORTED[index], wrap(index).limit
    config = getattr(transformers, family.class_name).config_class()
    hard = position_limit(config, only_wrong_beyond=True)
    if hard is None and tiny is not None and not tiny.cause.startswith("max_position"):
        number = getattr(config, "original_max_position_embeddings", None)
        return f"{number:,} ({tiny.cause})" if number else f"{tiny.cause} of the config"
    return f"{hard.num_positions:,} ({hard.cause})" if hard else "none"


def page() -> str:
    """docs/models.md, with its tables as these lists make them now."""
    supported = [(f.name, f.class_name, longest(index)) for index, f in enumerate(SUPPORTED)]
    refused = [(f.name, f.class_name, reason(index)) for index, f in enumerate(REFUSED)]
    text = PAGE.read_text()
    for title, entries in (("limit in tokens", supported), ("why", refused)):
        head = f"| family | class in transformers | {title} |\n"
        rows = "".join(f"| {name} | `{cls}` | {said} |\n" for name, cls, said in entries)
        assert head in text
        text = re.sub(
            re.escape(head) + r"(\|.*\n)*",
            lambda _, new=head + "| --- | --- | --- |\n" + rows: new,
            text,
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
