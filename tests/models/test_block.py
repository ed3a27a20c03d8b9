"""One layer: what upstream's block has not. That the rest is upstream's is asked of whole models
(test_olmo.py)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from olmo_sparsity.models.document_attention import find_documents
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


@torch.no_grad()
@pytest.mark.parametrize("changes", [{"query_scale_length": 5.0}, {"query_scale_learned": True}])
def test_queries_of_masked_documents_count_the_keys_of_their_own(changes: dict[str, Any]) -> None:
    """Against attention of each query, key by key."""
    block = tiny_olmo(n_layers=1, n_kv_heads=2, rope=False, **changes).transformer.blocks[0]
    documents_BL = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2]])
    x = torch.randn(2, 8, FIELDS["d_model"])
    q, k, v = block._project(block.attn_norm(x), None)
    mixed = torch.empty_like(q)
    for row, head, place in itertools.product(range(2), range(4), range(8)):
        document = documents_BL[row, place]
        visible = [key for key in range(place + 1) if documents_BL[row, key] == document]
        if "query_scale_length" in changes:
            factor = math.log(len(visible) + 1) / math.log(5.0)
        else:
            factor = float(block.query_scale[head]) * math.log(len(visible))
        keys = k[row, head // 2, visible]
        scores = factor * (keys @ q[row, head, place]) / math.sqrt(q.shape[-1])
        mixed[row, head, place] = scores.softmax(-1) @ v[row, head // 2, visible]
    attended = x + block.attn_out(mixed.transpose(1, 2).flatten(2))
    expected = attended + block.ff_out(block.act(block.ff_proj(block.ff_norm(attended))))
    found = block(x, None, None, find_documents(documents_BL, torch.device("cpu")))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


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
    from olmo_sparsity.models.olmo import layers

    angles = torch.rand(2, 1, 6, 4)
    tables = angles.cos(), angles.sin()
    x_BHLK, weights = torch.randn(2, 3, 6, 12, requires_grad=True), torch.randn(2, 3, 6, 12)
    (layers.rotate(x_BHLK, *tables) * weights).sum().backward()
    expected, x_BHLK.grad = x_BHLK.grad, None
    monkeypatch.setattr(layers, "_Rotation", None)
    (torch.compile(layers.rotate, backend="aot_eager")(x_BHLK, *tables) * weights).sum().backward()
    assert x_BHLK.grad is not None
    torch.testing.assert_close(x_BHLK.grad, expected)
