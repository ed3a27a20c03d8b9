"""Tiny random models, ours and those of transformers."""

from __future__ import annotations

from typing import Any

OURS: dict[str, dict[str, Any]] = {
    "olmo": {"layer_norm_type": "rms", "attention_layer_norm": True, "norm_after": True},
    "olmo, ALiBi, grouped heads": {"rope": False, "alibi": True, "n_kv_heads": 2},
    "gpt_neox": {
        "architecture": "gpt_neox",
        "rotary_fraction": 0.5,
        "include_bias": True,
        "activation_type": "gelu",
    },
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
