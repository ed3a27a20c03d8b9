"""One layer: what upstream's block has not. That the rest is upstream's is asked of whole models
(test_olmo.py)."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.models import FIELDS, GAPPED, draw_tokens, tiny_olmo


def test_queries_are_scaled_by_the_log_of_the_keys_they_see() -> None:
    """Against a forward of one layer whose queries were scaled by hand, place by place."""
    scaled = tiny_olmo(n_layers=1, query_scale_length=5.0)
    plain = tiny_olmo(n_layers=1)
    plain.load_state_dict(scaled.state_dict())
    tokens_BL = draw_tokens()
    for place in (0, 3, 11):
        with torch.no_grad():
            by_hand = tiny_olmo(n_layers=1)
            by_hand.load_state_dict(plain.state_dict())
            factor = math.log(place + 2) / math.log(5.0)
            by_hand.transformer.blocks[0].att_proj.weight[: FIELDS["d_model"]] *= factor
            expected = by_hand(tokens_BL, GAPPED)[:, place]
            torch.testing.assert_close(scaled(tokens_BL, GAPPED)[:, place], expected)
    # A query that sees four keys is left as it is; others are not.
    torch.testing.assert_close(scaled(tokens_BL, GAPPED)[:, 3], plain(tokens_BL, GAPPED)[:, 3])
    assert not torch.allclose(scaled(tokens_BL, GAPPED)[:, 11], plain(tokens_BL, GAPPED)[:, 11])


def test_a_compiled_rotation_has_the_gradient_that_the_compiler_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch 2.11 compiles the gradient of our own function as 0, other versions do not."""
    from olmo_sparsity.models import layers

    angles = torch.rand(2, 1, 6, 4)
    tables = angles.cos(), angles.sin()
    x_BHLK, weights = torch.randn(2, 3, 6, 12, requires_grad=True), torch.randn(2, 3, 6, 12)
    (layers.rotate(x_BHLK, *tables) * weights).sum().backward()
    expected, x_BHLK.grad = x_BHLK.grad, None
    monkeypatch.setattr(layers, "_Rotation", None)
    (torch.compile(layers.rotate, backend="aot_eager")(x_BHLK, *tables) * weights).sum().backward()
    assert x_BHLK.grad is not None
    torch.testing.assert_close(x_BHLK.grad, expected)
