"""Parameters, FLOPs and memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.estimate import (
    CUDA_CONTEXT_BYTES,
    activation_bytes,
    count_parameters,
    estimate,
    flops_per_token,
    state_bytes,
    stated_flops,
)
from olmo_sparsity.training.start import for_hardware
from tests.conftest import MakeConfig

ROOT = Path(__file__).parents[2]


def lines_of(config: RunConfig, device: str = "cpu") -> dict[str, str]:
    return estimate(config.model, config.training, torch.device(device))


def test_estimates_count_what_is_built(make_config: MakeConfig) -> None:
    config = make_config(model__vocab_size=512, model__weight_tying=False)
    model = build_model(config.model)
    assert lines_of(config)["parameters"] == f"{count_parameters(model):,}"
    assert "CUDA's context 0.50" in lines_of(config, "cuda")["memory"]
    names = [name for name, _ in model.named_parameters() if "proj" in name or "out" in name]
    weights = sum(model.get_parameter(name).numel() for name in names)
    for whole, of_keys in ((False, 6), (True, 12)):
        found = flops_per_token(model, config.model, 16, whole)
        assert found == 6 * weights + of_keys * 2 * 16 * 32
    stages = [{"tokens": 4, "until": 2}, {"tokens": 16}]  # the longest is estimated
    staged = make_config(model__vocab_size=512, model__weight_tying=False, training__length=stages)
    assert lines_of(staged) == lines_of(config)


def test_memory_is_that_of_stored_steps() -> None:
    """Of every size, in bf16, measured step by step on tensors without numbers."""
    rows = json.loads((ROOT / "study/results/others.json").read_text())["scaling"]
    micro_batches = {"20m": 64, "60m": 32, "150m": 16, "300m": 8, "1b": 4}
    for size, micro in micro_batches.items():
        config = load_config(f"c4_{size}_pose.yaml", ["--training.precision=bf16"])
        training = replace(config.training, compile=False)
        sizes = replace(config.model, vocab_size=50280, embedding_size=50304)
        (row,) = [r for r in rows if (r["config"], r["engine"]) == (f"c4_{size}", "single")]
        stated = state_bytes("bf16", row["parameters"])
        stated += activation_bytes(sizes, training, micro, "cuda")
        assert stated == pytest.approx(row["memory"], rel=0.02)


def test_micro_batches_are_as_large_as_memory_allows(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        model__vocab_size=512, training__batch_size=48, training__micro_batch_size="auto"
    )
    sizes, training = config.model, config.training
    for num_sequences, expected in ((48, 48), (17, 16), (15, 12), (0, 1)):
        needed = state_bytes(training.precision, count_parameters(build_model(sizes)))
        needed += activation_bytes(sizes, training, num_sequences, "cuda") + CUDA_CONTEXT_BYTES
        gpu = SimpleNamespace(total_memory=needed / 0.85 + 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
        resolved = for_hardware(config, torch.device("cuda"))
        assert resolved.training.micro_batch_size == expected
    assert config.training.micro_batch_size == 0
    monkeypatch.undo()
    alone = for_hardware(config, torch.device("cpu"), world_size=2)
    assert alone.training.micro_batch_size == 24, "the share of a process"


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
