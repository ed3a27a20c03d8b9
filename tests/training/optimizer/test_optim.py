"""Parameter groups and the schedule."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from olmo_sparsity.config.sections import EngineConfig, OptimizerConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.estimate.device_memory import bytes_of_state
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.optimizer.jump_detector import JumpDetector
from olmo_sparsity.training.optimizer.learning_rate import learning_rate
from olmo_sparsity.training.optimizer.muon import Muon
from olmo_sparsity.training.optimizer.optim import (
    MuonAndAdamW,
    build_optimizer,
    matrices_of_layers,
)
from tests.conftest import MakeConfig


def test_decay_groups(make_config: MakeConfig) -> None:
    model = build_model(make_config(model__vocab_size=300, model__weight_tying=False).model)

    def decayed(**settings: bool) -> int:
        groups = build_optimizer(model, OptimizerConfig(**settings), "fp32").param_groups
        return sum(p.numel() for g in groups if g["weight_decay"] for p in g["params"])

    everything = count_parameters(model)
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    embedding = model.transformer.wte.weight.numel()
    assert decayed() == everything
    assert decayed(decay_norm_and_bias=False) == everything - norms
    assert decayed(decay_embeddings=False) == everything - embedding


def test_adamw_is_that_of_pytorch() -> None:
    """Ours calls its methods without the wrappers that import the compiler."""
    config, ends = OptimizerConfig(weight_decay=0.3), []

    def upstream_of(model: nn.Module) -> torch.optim.AdamW:
        betas = (config.beta1, config.beta2)
        groups = [{"params": list(model.parameters()), "weight_decay": 0.3}]
        return torch.optim.AdamW(groups, config.learning_rate, betas, config.eps, fused=True)

    for build in (lambda model: build_optimizer(model, config, "fp32"), upstream_of):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = build(model)
        for _ in range(3):
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            assert model.weight.grad is None
        assert not any(parameter.grad_fn for parameter in model.parameters())
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        ends.append([model.state_dict(), states])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def muon_engine(make_config: MakeConfig) -> Engine:
    config = make_config(model__vocab_size=300, optimizer__name="muon", training__batch_size=4)
    torch.manual_seed(0)
    return Engine(build_model(config.model), config.training, config.optimizer)


def draw_batches(number: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(number):
        tokens_BL = torch.randint(2, 300, (4, 16), generator=generator)
        positions_BL = torch.arange(16).expand(4, 16)
        batches.append(Batch(tokens_BL, positions_BL, tokens_BL.roll(-1, 1)))
    return batches


def test_muon_updates_the_matrices_of_layers_and_adamw_the_rest(make_config: MakeConfig) -> None:
    """Against the two optimizers, which are given the parameters by name."""
    engine = muon_engine(make_config)
    bare = copy.deepcopy(engine.model)
    named = dict(bare.named_parameters())
    matrices = [p for name, p in named.items() if ".blocks." in name and name.endswith("weight")]
    matrices = [matrix for matrix in matrices if matrix.ndim == 2]
    rest = [p for p in named.values() if not any(p is matrix for matrix in matrices)]
    assert len(matrices) == 4 * bare.config.n_layers
    muon = Muon(matrices, torch.float32, lr=1e-2, weight_decay=0.1, momentum=0.95)
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for batch in draw_batches(3):
        engine.step(batch, 1e-2)
        logits = bare(batch.tokens_BL, batch.positions_BL)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BL.flatten())
        bare.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        muon.step()
        adamw.step()
    for ours, theirs in zip(engine.model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def draw_matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(48, 16), (16, 48), (32, 32)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def test_muon_in_bf16_is_that_of_pytorch_to_the_bit() -> None:
    ours = draw_matrices()
    theirs = draw_matrices()
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}
    optimizers = [
        Muon(ours, torch.bfloat16, **options),
        torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for of_ours, of_theirs in zip(ours, theirs, strict=True):
            of_ours.grad = torch.randn(of_ours.shape, generator=generator)
            of_theirs.grad = of_ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_muon_in_fp32_computes_nothing_in_bf16_and_makes_updates_orthogonal() -> None:
    """In bf16, rounding would turn the singular vectors by more than the 1e-5 allowed here."""
    for weight in draw_matrices():
        before = weight.detach().clone()
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
        Muon([weight], torch.float32, lr=1.0, weight_decay=0.0, momentum=0.95).step()
        update = (before - weight.detach()) / (0.2 * max(weight.shape) ** 0.5)
        u, _, vt = torch.linalg.svd(weight.grad, full_matrices=False)
        in_its_vectors = u.T @ update @ vt.T
        singular_values = in_its_vectors.diagonal()
        assert float(singular_values.min()) > 0.6
        assert float(singular_values.max()) < 1.3
        torch.testing.assert_close(in_its_vectors, singular_values.diag(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_muon_takes_the_precision_of_the_run(
    make_config: MakeConfig, precision: str, dtype: torch.dtype
) -> None:
    config = make_config(
        model__vocab_size=300, optimizer__name="muon", training__precision=precision
    )
    engine = Engine(build_model(config.model), config.training, config.optimizer)
    assert isinstance(engine.optimizer, MuonAndAdamW)
    assert engine.optimizer.muon.dtype == dtype


def test_muon_goes_on_to_the_bit(make_config: MakeConfig, tmp_path: Path) -> None:
    whole = muon_engine(make_config)
    first = muon_engine(make_config)
    batches = draw_batches(4)
    for batch in batches:
        whole.step(batch, 1e-2)
    for batch in batches[:2]:
        first.step(batch, 1e-2)
    first.copy_moments()(tmp_path)
    resumed = muon_engine(make_config)
    resumed.model.load_state_dict(first.copy_weights(), strict=False)  # tied ones are there once
    resumed.load_moments(tmp_path, step=2)
    for batch in batches[2:]:
        resumed.step(batch, 1e-2)
    weights = [list(engine.model.parameters()) for engine in (resumed, whole)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_muon_holds_one_moment_of_a_matrix(make_config: MakeConfig) -> None:
    config = make_config(model__vocab_size=300)
    with_muon = make_config(optimizer__name="muon")
    matrices = matrices_of_layers(build_model(config.model))
    hardware = Hardware.of("h100", 1, 1)
    on_one = EngineConfig("single")
    of_adamw = bytes_of_state(replace(config, engine=on_one), hardware)
    of_muon = bytes_of_state(replace(with_muon, engine=on_one), hardware)
    saved = of_adamw - of_muon
    assert saved == 4 * sum(matrix.numel() for matrix in matrices)


def test_the_linear_schedule_is_that_of_transformers() -> None:
    from transformers import get_linear_schedule_with_warmup

    config = OptimizerConfig()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    theirs = get_linear_schedule_with_warmup(optimizer, 300, 1000)
    for step in range(1, 1001):
        optimizer.step()
        theirs.step()
        assert learning_rate(config, step, 1000) == pytest.approx(theirs.get_last_lr()[0])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_warm_up_and_end_where_they_should(schedule: str) -> None:
    config = OptimizerConfig(schedule=schedule, warmup_steps=10, final_lr_share=0.1)
    rates = [learning_rate(config, step, 100) for step in range(1, 101)]
    assert rates[0] == pytest.approx(5e-6)
    assert max(rates) == rates[9] == 5e-5
    assert rates[-1] == learning_rate(config, 120, 100) == pytest.approx(5e-6)
    for step, passed in ((40, 1 / 3), (55, 1 / 2), (70, 2 / 3)):  # 90 steps after 10
        left = (1 + math.cos(math.pi * passed)) / 2 if schedule == "cosine" else 1 - passed
        assert rates[step - 1] == pytest.approx(5e-6 + 4.5e-5 * left)
    assert learning_rate(OptimizerConfig(warmup_steps=0), 1, 1) == 0.0


@pytest.mark.parametrize(("schedule", "share"), [("constant", 0.0), ("wsd", 0.1)])
def test_a_stable_rate_falls_in_its_cooldown(schedule: Any, share: float) -> None:
    config = OptimizerConfig(
        schedule=schedule, warmup_steps=10, cooldown_steps=20, final_lr_share=share
    )
    rates = [learning_rate(config, step, 100) for step in range(1, 101)]
    assert rates[9:80] == [5e-5] * 71
    falling = [share + (1 - share) * left / 20 for left in range(20, -1, -1)]
    assert rates[79:] == pytest.approx([5e-5 * part for part in falling])


def test_a_jump_is_beyond_the_deviations_of_the_last_steps() -> None:
    values = np.random.default_rng(0).normal((3.0, 1.0), (0.1, 0.3), (400, 2))
    jumps, found = JumpDetector(2.0, [], 0), []
    for step, value in enumerate(values):
        before = values[max(0, step - 128) : step]
        limits = before.mean(0) + 2 * before.std(0) if step >= 32 else np.inf
        found.append(jumps.is_jump(*value))
        assert found[-1] == bool((value > limits).any()), step
        jumps = JumpDetector(2.0, jumps.recent, 0)  # as a resumed run
        assert jumps.is_jump(3.0, math.inf), "which later steps are not compared with"
        assert jumps.is_jump(math.nan, 1.0)
    assert 0 < sum(found) < 50


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_decay_is_olmos(schedule: Literal["linear", "cosine"]) -> None:
    from olmo.optim import CosWithWarmup, LinearWithWarmup

    config = OptimizerConfig(schedule=schedule, final_lr_share=0.1, warmup_steps=300)
    kind = LinearWithWarmup if schedule == "linear" else CosWithWarmup
    common = {"grad_clip_warmup_steps": None, "grad_clip_warmup_factor": None, "warmup_min_lr": 0.0}
    olmo = kind(warmup_steps=300, alpha_f=0.1, **common)
    for step in range(1, 20_001):
        expected = olmo.get_lr(config.learning_rate, step, 20_000)
        assert learning_rate(config, step, 20_000) == pytest.approx(expected, rel=1e-12)
