"""Tiny random models, ours and those of transformers."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_check import MODELS

OURS: dict[str, dict[str, Any]] = {
    "olmo": MODELS["OLMo-2"],
    "olmo, ALiBi, grouped heads": MODELS["ALiBi, grouped heads"],
    "gpt_neox": MODELS["GPT-NeoX"],
}


def build(name: str) -> Any:
    import torch

    from olmo_sparsity.config.sections import ModelConfig
    from olmo_sparsity.model.build import build_model

    torch.manual_seed(0)
    if name in OURS:
        sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "init_std": 0.2}
        return build_model(ModelConfig(**sizes, max_sequence_length=128, **OURS[name])).eval()
    import transformers

    config = getattr(transformers, name).config_class(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **({} if "NeoX" in name else {"num_key_value_heads": 2, "head_dim": 8}),
        **({"query_pre_attn_scalar": 8, "sliding_window": 96} if "Gemma" in name else {}),
    )
    from olmo_sparsity.analysis.models.huggingface import HuggingFaceLM

    return HuggingFaceLM(getattr(transformers, name)(config).eval())
