"""Parameters, FLOPs and memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.estimate import (
    count_parameters,
    estimate,
    flops_per_token,
    stated_flops,
)

MakeConfig = Callable[..., RunConfig]


def test_estimates_count_what_is_built(make_config: MakeConfig) -> None:
    config = make_config(model__vocab_size=512, model__weight_tying=False)
    model = build_model(config.model)
    assert estimate(config, torch.device("cpu"))["parameters"] == f"{count_parameters(model):,}"
    assert "CUDA's context 0.50" in estimate(config, torch.device("cuda"))["memory"]
    weights = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    weights += sum(p.numel() for n, p in model.named_parameters() if "out" in n)
    assert flops_per_token(model, config) == 6 * weights + 6 * 2 * 16 * 32


def test_of_several_lengths_the_longest_is_estimated(make_config: MakeConfig) -> None:
    config = make_config(model__vocab_size=512)
    plain = estimate(config, torch.device("cpu"))
    stages = [{"tokens": 4, "until": 2}, {"tokens": 16}]
    config = make_config(model__vocab_size=512, training__length=stages)
    assert estimate(config, torch.device("cpu")) == plain


def test_stated_peaks_go_by_the_device_name() -> None:
    for name, tflops in {
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H200": 989,
    }.items():
        assert stated_flops(name) == tflops * 1e12
    for name in ("cpu", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert stated_flops(name) is None
