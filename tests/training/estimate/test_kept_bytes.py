"""What a layer is said to keep for its backward pass is what a real layer keeps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from olmo.model import RMSLayerNorm
from torch import Tensor

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.sections import Precision
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.olmo import layers
from olmo_sparsity.models.rope import rotary_tables
from olmo_sparsity.training.engines.compilation import compile_model
from olmo_sparsity.training.estimate.kept_bytes import kept_bytes

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
    return kept_by(build_model(sizes), sizes, precision)


def kept_by(model: Any, sizes: ModelConfig, precision: Precision) -> float:
    """Return the bytes that the first layer keeps for each token."""
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
        model.blocks[0].forward(inputs * 1, tables, None)
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


@pytest.mark.accept
@pytest.mark.filterwarnings("ignore")  # the compiler warns about what it does itself
def test_a_compiled_layer_keeps_about_the_share_of_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what is between its input and all that it keeps, as `activation_bytes` counts it."""
    sizes = ModelConfig(d_model=96, n_heads=3, n_layers=1, vocab_size=64, mlp_ratio=8)
    monkeypatch.setattr(layers.RMSNorm, "forward", RMSLayerNorm.forward)  # as on a GPU
    compiler = partial(torch.compile, backend="aot_eager")  # divides as inductor does
    monkeypatch.setattr(torch, "compile", compiler)

    def kept_within(budget: float | None) -> float:
        torch.compiler.reset()
        model: Any = build_model(sizes)
        compile_model(model, budget, each_layer=True)
        return kept_by(model, sizes, "fp32")

    whole = kept_within(None)
    inputs = 4 * sizes.d_model
    assert kept_within(1.0) == whole
    assert kept_within(0.0) == inputs
    for budget in (0.25, 0.5, 0.75):
        expected = inputs + budget * (whole - inputs)
        assert 0.7 * expected < kept_within(budget) < 1.1 * expected
    compile_model(build_model(sizes))
    assert functorch_config.activation_memory_budget == 1.0, "a later run is not affected"
    torch.compiler.reset()
