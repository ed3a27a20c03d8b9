"""Sampled risks agree with the enumeration of all strings, and are 0 where they should be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from olmo_sparsity.base.errors import ConfigError
from study.theory import planted as P
from study.theory.learning import training_lengths
from study.theory.sparse_attention import KeyShape, SparseAttention, build_layout, sampled_risk
from tests.study.theory.support import enumerated_risk, parity, random_model


@pytest.mark.parametrize("coupled", [False, True])
def test_the_sampled_interval_covers_the_exact_risk(coupled: bool) -> None:
    data = parity(P.uniform_subsets(2), rate=0.2, coupled=coupled)
    seeds = list(range(40))
    model = random_model(KeyShape(2, 2, "initial"), replicas=1)
    one = enumerated_risk(model, data, 6)[0]
    many = SparseAttention(model.shape, 3, 2, len(seeds)).double()
    with torch.no_grad():
        many.log_key_RPC.copy_(model.log_key_RPC.expand_as(many.log_key_RPC))
        many.value_logits_RCY.copy_(model.value_logits_RCY.expand_as(many.value_logits_RCY))
    sampled = sampled_risk(many, data, 6, 400, seeds)
    covered = ((sampled.low_R <= one) & (one <= sampled.high_R)).mean()
    assert covered >= 0.85  # 95% expected; below 0.85 once in 300 for 40 seeds


def parity_solver(k: int, window: int, *, relative: bool = True) -> SparseAttention:
    """Key 1 on markers only, value their XOR: the hypothesis that makes no mistake."""
    model = SparseAttention(KeyShape(k, window, relative=relative), 3, 2, 1).double()
    with torch.no_grad():
        model.log_key_RPC.fill_(-math.inf)
        for code, tokens in enumerate(np.ndindex(*([3] * k))):
            if min(tokens) > 0:
                model.log_key_RPC[..., code] = 0
                model.value_logits_RCY[..., code, 1 - (sum(tokens) - k) % 2] = -math.inf
    return model


@pytest.mark.parametrize("k", [1, 2, 3])
def test_zero_risk_stays_zero_when_the_assumptions_hold(k: int) -> None:
    span = 4 if k > 1 else 1
    data = parity(P.translated_shapes(P.shapes_within(k, span)), rate=0)
    model = parity_solver(k, span)
    for length in (*training_lengths(16), 32, 128):
        assert sampled_risk(model, data, length, 300, [0]).mean_R[0] == 0


@pytest.mark.parametrize("k", [2, 3])
def test_zero_risk_is_lost_without_locality_and_kept_with_coupled_positions(k: int) -> None:
    apart = parity(P.uniform_subsets(k), rate=0)
    # Faultless wherever training looks, and zero beyond: training cannot tell it from the truth.
    model = parity_solver(k, 16)
    assert max(sampled_risk(model, apart, n, 200, [0]).mean_R[0] for n in training_lengths(16)) == 0
    assert sampled_risk(model, apart, 128, 200, [0]).mean_R[0] > 0.3

    together = parity(P.uniform_subsets(k), rate=0, coupled=True)
    model = parity_solver(k, 1)
    for length in (8, 16, 128):
        assert sampled_risk(model, together, length, 200, [0]).mean_R[0] == 0


def test_order_is_beyond_every_hypothesis_of_one_place() -> None:
    """Both labels give the same bag of tokens, so the risk is one half whatever was learned."""
    data = P.Planted(P.translated_shapes([(0, 1)]), *P.order_tokens(), P.marker_background(0.2))
    for seed in range(3):
        risk = enumerated_risk(random_model(KeyShape(1, 1), seed=seed), data, 5)
        assert risk == pytest.approx(0.5, abs=1e-12)


def test_what_cannot_be_enumerated_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"166,167,000 subsets.*GiB.*local key"):
        build_layout(np.arange(1000), KeyShape(3, 10, "initial"))
    with pytest.raises(ConfigError, match="at least 3, not 2"):
        build_layout(np.arange(2), KeyShape(3, 2))
    with pytest.raises(ConfigError, match=r"key table.*GiB"):
        SparseAttention(KeyShape(4, 400), 3, 2, 1)
