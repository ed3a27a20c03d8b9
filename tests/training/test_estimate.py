"""Parameters, FLOPs and memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from olmo_sparsity.base.devices import find_gpu
from olmo_sparsity.command.cli import main
from olmo_sparsity.config.run import load_config
from olmo_sparsity.config.schema import CONFIGS
from olmo_sparsity.models.build import build_model
from olmo_sparsity.training.choose_engine import check_engine
from olmo_sparsity.training.estimate import (
    Hardware,
    activation_bytes,
    count_parameters,
    estimate,
    flops_per_token,
    refuse_too_large,
    state_bytes,
    state_of,
)
from olmo_sparsity.training.start import cost_of, for_hardware
from tests.conftest import MakeConfig

ROOT = Path(__file__).parents[2]


def test_estimates_count_what_is_built(make_config: MakeConfig) -> None:
    config = make_config(model__vocab_size=512, model__weight_tying=False)
    model, here = build_model(config.model), Hardware.here(torch.device("cpu"))
    assert estimate(config, here)["parameters"] == f"{count_parameters(model):,}"
    names = [name for name, _ in model.named_parameters() if "proj" in name or "out" in name]
    weights = sum(model.get_parameter(name).numel() for name in names)
    for whole, of_keys in ((False, 6), (True, 12)):
        found = flops_per_token(model, config.model, 16, whole)
        assert found == 6 * weights + of_keys * 2 * 16 * 32
    stages = [{"tokens": 4, "until": 2}, {"tokens": 16}]  # the longest is estimated
    staged = make_config(model__vocab_size=512, model__weight_tying=False, training__length=stages)
    assert estimate(staged, here) == estimate(config, here)


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


@pytest.mark.parametrize("engine", ["ddp", "zero1", "zero3"])
def test_micro_batches_are_as_large_as_memory_allows(make_config: MakeConfig, engine: str) -> None:
    config = make_config(
        model__vocab_size=512,
        training__batch_size=96,
        training__micro_batch_size="auto",
        engine__name=engine,
    )
    cpu = torch.device("cpu")
    for num_sequences, expected in ((48, 48), (17, 16), (15, 12), (0, 1)):
        room = Hardware(2, 1, 1e30, find_gpu("h100"))
        state = state_of(config, room)
        needed = state + activation_bytes(config.model, config.training, num_sequences, "cuda")
        resolved = for_hardware(config, cpu, replace(room, memory=needed + 1))
        assert resolved.training.micro_batch_size == expected
    assert config.training.micro_batch_size == 0
    config.training.micro_batch_size = 20
    assert for_hardware(config, cpu, room).training.micro_batch_size == 16, "at most"


def test_the_cost_is_the_same_before_and_after_the_text_is_prepared(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the named hardware: this machine has hardly memory."""
    monkeypatch.setattr(Hardware, "here", lambda *_: Hardware(1, 1, 1.0, None))
    config = make_config(training__batch_size=96, training__micro_batch_size="auto")
    missing = replace(config, data=replace(config.data, folder="missing"))
    for one in (config, missing):
        found, _, lines = cost_of(one, Hardware(2, 1, 80e9, find_gpu("h100")))
        assert found.training.micro_batch_size == 48
        assert lines["batch"] == "96 = 2 processes × 48"
        assert ("text" in lines) == (one is missing)


def test_state_is_what_the_table_says() -> None:
    for engine, bf16, fp32 in (
        ("ddp", 18, 16),
        ("zero1", 2 + 4 + 3 + 2, 4 + 4 + 3 + 4),
        ("zero2", 2 + 1 + 3 + 0.3, 4 + 1 + 3 + 0.6),
        ("zero3", 0.5 + 1 + 3 + 2**27 / 1e9, 1 + 1 + 3 + 2**28 / 1e9),
    ):
        found = [state_bytes(name, 10**9, engine, 4) for name in ("bf16", "fp32")]  # type: ignore[arg-type]
        assert found == pytest.approx([1e9 * bf16, 1e9 * fp32]), engine
    sizes = {"ddp": 18, "zero1": 11, "zero2": 6 + 2 * 101, "zero3": 4.5 + 2 * 4}
    for engine, size in sizes.items():
        assert state_bytes("bf16", 10**6, engine, 4) == size * 10**6, engine


def test_buckets_are_those_of_the_shipped_files() -> None:
    for stage, num in ((1, 0), (2, 3), (3, 4)):
        path = CONFIGS / f"deepspeed/zero{stage}.json"
        size = json.loads(path.read_text())["zero_optimization"]["reduce_bucket_size"]
        small, large = (state_bytes("bf16", n, f"zero{stage}", 4) for n in (10**9, 2 * 10**9))
        assert 2 * small - large == 2 * num * size


@pytest.mark.parametrize("count", [1, 8, 16, 64])
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("c4_*.yaml")), ids=lambda path: path.stem)
def test_the_ladder_needs_no_option_on_any_number_of_gpus(path: Path, count: int) -> None:
    config, hardware = load_config(path), Hardware.of("h100", count, None)
    config.model.vocab_size, config.model.embedding_size = 50280, 50304
    check_engine(config.engine, config.training, count)
    resolved = for_hardware(config, torch.device("cpu"), hardware)
    assert 512 // count % resolved.training.micro_batch_size == 0
    refuse_too_large(resolved, hardware)


def test_a_dry_run_names_what_does_not_divide_or_fit(capsys: pytest.CaptureFixture) -> None:
    words = ["train", "configs/c4_1b_pose.yaml", "--dry-run"]
    assert main([*words, "--gpus=24", "--gpu=a100"]) == 0
    assert "24 processes do not divide it; 504 and 528 do" in capsys.readouterr().out
    seven = ["--model.d_model=4096", "--model.n_heads=32", "--model.n_layers=32"]
    assert main([*words, *seven, "--gpus=8", "--engine.name=ddp"]) == 2
    assert "engine.name=ddp needs 155.0" in capsys.readouterr().err
    zero3 = ["--engine.name=zero3", "--training.compile=false"]
    assert main([*words, *seven, *zero3, "--gpus=64"]) == 0
    assert "batch: 512 = 64 processes × 8" in capsys.readouterr().out
    for wrong in (["--gpu=h101"], ["--nodes=3"]):
        assert main([*words, "--gpus=8", *wrong]) == 2


def test_stated_peaks_go_by_the_device_name() -> None:
    for name, tflops in {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "h200": 989,
    }.items():
        assert find_gpu(name).tflops == tflops
    for name in ("cpu", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert find_gpu(name) is None
