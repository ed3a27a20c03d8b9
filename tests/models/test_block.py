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


def test_each_head_learns_by_how_much_its_queries_grow() -> None:
    """Against a forward of one layer whose queries were scaled by hand, place and head by head."""
    scaled = tiny_olmo(n_layers=1, query_scale_learned=True)
    scales = torch.tensor([0.1, 0.2, -0.3, 0.4])
    with torch.no_grad():
        scaled.transformer.blocks[0].query_scale.copy_(scales)
    plain_weights = {k: v for k, v in scaled.state_dict().items() if not k.endswith("query_scale")}
    tokens_BL = draw_tokens()
    num_keys_of = {0: 1, 3: 4, 11: 12}
    for place, num_keys in num_keys_of.items():
        by_hand = tiny_olmo(n_layers=1)
        by_hand.load_state_dict(plain_weights)
        queries = by_hand.transformer.blocks[0].att_proj.weight.data[: FIELDS["d_model"]]
        queries *= scales.repeat_interleave(FIELDS["d_model"] // 4)[:, None] * math.log(num_keys)
        expected = by_hand(tokens_BL, GAPPED)[:, place]
        torch.testing.assert_close(scaled(tokens_BL, GAPPED)[:, place], expected)


def test_learned_scales_begin_at_a_mean_factor_of_one() -> None:
    """The paper's 0.168 for sequences of 1,024 tokens."""
    block = tiny_olmo(max_sequence_length=1024, query_scale_learned=True).transformer.blocks[0]
    factors_1HL = block.query_factors(torch.arange(1, 1025)[None])
    torch.testing.assert_close(factors_1HL.mean(-1), torch.ones(1, 4))
    assert block.query_scale.tolist() == pytest.approx([0.168] * 4, abs=5e-4)


def test_learned_scales_have_gradients() -> None:
    model = tiny_olmo(n_layers=1, query_scale_learned=True)
    model(draw_tokens(), GAPPED).square().mean().backward()
    assert (model.transformer.blocks[0].query_scale.grad.abs() > 1e-8).all()


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
