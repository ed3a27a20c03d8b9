"""What a layer is said to keep for its backward pass is what a real layer keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from olmo.model import RMSLayerNorm
from torch import Tensor

from olmo_sparsity.config.sections import ModelConfig, Precision
from olmo_sparsity.models import layers
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.rope import rotary_tables
from olmo_sparsity.training.activations import kept_bytes

LENGTH = 512
SHAPES: dict[str, dict[str, Any]] = {
    "as C4": {"mlp_ratio": 8},
    "wider MLP": {"mlp_ratio": 12},
    "norms of queries and keys": {"mlp_ratio": 8, "attention_layer_norm": True},
    "OLMo 2": {
        "mlp_ratio": 8,
        "attention_layer_norm": True,
        "layer_norm_type": "rms",
        "norm_after": True,
    },
    "grouped keys": {"n_kv_heads": 1},
}


def kept_by_a_real_layer(sizes: ModelConfig, precision: Precision) -> float:
    model: Any = build_model(sizes)
    tables = rotary_tables(torch.arange(LENGTH)[None], sizes)
    weights = {weight.untyped_storage().data_ptr() for weight in [*model.parameters(), *tables]}
    sizes_of_weights = {weight.numel() for weight in model.parameters()}
    alive: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        return tensor

    inputs = torch.randn(1, LENGTH, sizes.d_model, requires_grad=True)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with autocast, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.blocks[0](inputs * 1, tables, None)
    kept = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in alive
        if tensor.numel() not in sizes_of_weights  # cast weights
    }
    return sum(size for address, size in kept.items() if address not in weights) / LENGTH


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_a_traced_layer_keeps_what_a_real_one_keeps(
    changes: dict[str, Any], precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers.RMSNorm, "forward", RMSLayerNorm.forward)  # as on a GPU
    sizes = ModelConfig(d_model=96, n_heads=3, n_layers=1, vocab_size=64, **changes)
    expected = kept_by_a_real_layer(sizes, precision)
    assert kept_bytes(sizes, precision) == pytest.approx(expected, rel=0.03)
