"""One model, trained and tested under one scheme."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from study.tasks.schemes import SCHEMES, Sizes
from study.tasks.settings import ExperimentSettings
from study.tasks.trial import (
    Bench,
    Trial,
    _draw_batch,
    build,
    measure,
    train,
)
from tests.study.tasks.support import make


def bench_of(settings: ExperimentSettings, scheme: str, train_k: int | None = None) -> Bench:
    return Bench(settings, Trial(scheme, train_k, 0), torch.device("cpu"))


def test_sizes_are_those_of_the_longest_test(tmp_path: Path) -> None:
    """Eight bits: 17 places, coupled IDs up to 9; the end token adds a place."""
    for end_token in (False, True):
        settings = make(tmp_path, schemes=list(SCHEMES), end_token=end_token)
        words, places = 3 + end_token, 17 + end_token
        for scheme, expected in {
            "rope": (places, words),
            "pose": (places, words),
            "coupled": (10, words),
            "ppc": (10, words),
            "auxiliary": (places, words),
            "pointers": (places, words, 10),
        }.items():
            assert bench_of(settings, scheme).sizes == Sizes(*expected), scheme


@pytest.mark.parametrize("num_lengths", [1, 4])
def test_a_batch_mixes_so_many_lengths(tmp_path: Path, num_lengths: int) -> None:
    training = {"batch_size": 8, "lengths_per_batch": num_lengths}
    settings = make(tmp_path, schemes=["rope"], train_lengths=[1, 90], training=training)
    bench, generator = bench_of(settings, "rope"), np.random.default_rng(0)
    num_drawn = []
    for _ in range(20):
        _, _, response_BL, _ = _draw_batch(bench, generator)
        num_drawn.append(len(response_BL.sum(1).unique()))
    assert max(num_drawn) == num_lengths


def test_what_a_scheme_is_told_about_positions(tmp_path: Path) -> None:
    """RoPE sees differences only, NoPE nothing; ALiBi distances."""
    settings = make(tmp_path, schemes=["rope", "nope", "alibi"])
    tokens = torch.randint(0, 3, (2, 8), generator=torch.Generator().manual_seed(0))
    near = torch.arange(8).expand(2, 8)
    shifted, spread = near + 4, near + 5 * (near > 3)
    for scheme, sees_gaps in (("rope", True), ("nope", False), ("alibi", True)):
        torch.manual_seed(0)
        model = build(bench_of(settings, scheme)).eval()
        here, there, apart = (model(tokens, p)[0] for p in (near, shifted, spread))
        torch.testing.assert_close(here, there)
        assert torch.allclose(here, apart, atol=1e-5) != sees_gaps, scheme


@pytest.mark.parametrize("scheme", ["ppc", "auxiliary", "pointers"])
def test_what_is_learnt_is_done_freely(tmp_path: Path, scheme: str) -> None:
    """Copying the bits' own IDs, parity and the end at the training length, in seconds."""
    settings = make(
        tmp_path,
        schemes=[scheme],
        end_token=True,
        train_lengths=[2, 3],
        test_lengths=[2, 3],
        model={"d_model": 32, "n_heads": 2, "n_layers": 2, "mlp_ratio": 2, "init_std": 0.1},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 20},
        training={"num_steps": 200, "batch_size": 64},
    )
    bench = bench_of(settings, scheme)
    model, losses = train(bench, lambda step, loss: None)
    assert losses[-1][1] < losses[0][1] / 4
    for row in measure(bench, model):
        assert row.exact_match > 0.95
        assert row.id_accuracy is not None
        assert row.id_accuracy > 0.95
        assert min(row.token_accuracy, row.teacher_forced) >= row.exact_match
