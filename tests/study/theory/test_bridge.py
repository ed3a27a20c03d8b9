"""A small transformer on the same strings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from study.theory.bridge import build_transformer, draw_batch, label_logits
from study.theory.cases import build_planted
from study.theory.settings import CaseConfig, TheoryConfig


@pytest.mark.parametrize("setting", ["local", "nonlocal", "coupled"])
def test_the_transformer_is_given_the_ids_of_the_data(setting: str) -> None:
    planted = build_planted(TheoryConfig(), CaseConfig(setting, 3))
    plain = draw_batch(planted, 11, 6, np.random.default_rng(0))
    spread = draw_batch(planted, 11, 6, np.random.default_rng(0), spread_over=88, num_chunks=4)
    assert (plain[0] == spread[0]).all()
    target = int(planted.ids(88)[-1]) + 2
    for plain_L, spread_L in zip(plain[1], spread[1], strict=True):
        # Spreading keeps what shares an ID together and the order of the others.
        _, plain_rank = plain_L.unique(return_inverse=True)
        _, spread_rank = spread_L.unique(return_inverse=True)
        assert (plain_rank == spread_rank).all()
        assert spread_L.max() < target
        assert plain_L[-1] > plain_L[:-1].max()


def test_the_label_is_read_at_the_query() -> None:
    config = TheoryConfig()
    planted = build_planted(config, CaseConfig("local", 2))
    model = build_transformer(config.bridge, planted, 128)
    tokens_BL, positions_BL, _ = draw_batch(planted, 9, 2, np.random.default_rng(0))
    logits_BY = label_logits(model, tokens_BL, positions_BL, 2)
    assert logits_BY.shape == (2, 2)
    # RoPE knows differences only: the same relativity as Assumption 3.2 asks of keys.
    shifted = label_logits(model, tokens_BL, positions_BL + 40, 2)
    torch.testing.assert_close(logits_BY, shifted, atol=1e-4, rtol=1e-3)
