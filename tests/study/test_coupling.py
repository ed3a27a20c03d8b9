"""Position coupling: generation that equals recomputing, a joint loss that equals its parts, and
settings that cannot work refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.build import build_model
from study.coupling import PositionCoupling, Response, score

VOCAB, NUM_IDS, NUM_PROMPT = 13, 60, 7

MODELS: dict[str, dict[str, Any]] = {
    "OLMo": {},
    "OLMo, half rotated, queries scaled": {"rotary_fraction": 0.5, "query_scale_length": 20.0},
    "OLMo, ALiBi": {"rope": False, "alibi": True},
    "OLMo, NoPE": {"rope": False},
    "OLMo, grouped queries": {"n_kv_heads": 1},
    "GPT-NeoX": {"architecture": "gpt_neox", "rotary_fraction": 0.25},
}

# Coupled IDs as they come: with gaps, going back, repeated, and other ones in each row.
PROMPT_IDS = torch.tensor([[3, 4, 5, 20, 21, 22, 2], [8, 9, 30, 31, 50, 51, 7]])
RESPONSE_IDS = torch.tensor([[3, 4, 5, 20, 21], [50, 8, 8, 31, 59]])
IDS_BL = torch.cat([PROMPT_IDS, RESPONSE_IDS], dim=1)
TOKENS_BL = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
PROMPT_BP = TOKENS_BL[:, :NUM_PROMPT]
RESPONSE_BL = torch.arange(12).expand(2, 12) >= NUM_PROMPT


def build(changes: dict[str, Any] | None = None, **settings: Any) -> PositionCoupling:
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "d_model": 32,
        "n_heads": 2,
        "n_layers": 2,
        "vocab_size": VOCAB,
        "max_sequence_length": 64,
        "init_std": 0.3,  # so that random weights have opinions, and small differences show
    }
    model = build_model(ModelConfig(**(fields | (changes or {}))))
    return PositionCoupling(model, **{"num_ids": NUM_IDS} | settings)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("predict_ids", [True, False], ids=["predicted", "given"])
@torch.no_grad()
def test_generating_is_predicting_again_and_again(
    changes: dict[str, Any], predict_ids: bool
) -> None:
    coupling = build(changes, predict_ids=predict_ids)
    found = coupling.generate(PROMPT_BP, PROMPT_IDS, 5, None if predict_ids else RESPONSE_IDS)

    tokens_BL, ids_BL = PROMPT_BP, PROMPT_IDS
    for place in range(5):
        logits_BLV, id_logits_BLI = coupling(tokens_BL, ids_BL)
        next_ids_B = id_logits_BLI[:, -1].argmax(-1) if predict_ids else RESPONSE_IDS[:, place]
        tokens_BL = torch.cat([tokens_BL, logits_BLV[:, -1].argmax(-1)[:, None]], dim=1)
        ids_BL = torch.cat([ids_BL, next_ids_B[:, None]], dim=1)
    assert torch.equal(found.tokens_BR, tokens_BL[:, NUM_PROMPT:])
    assert torch.equal(found.ids_BR, ids_BL[:, NUM_PROMPT:])


@torch.no_grad()
def test_ids_that_are_predicted_need_not_be_fed() -> None:
    coupling, given = build(feed_ids=False), build(predict_ids=False)
    given.load_state_dict(coupling.state_dict(), strict=False)
    found = coupling.generate(PROMPT_BP, PROMPT_IDS, 5, RESPONSE_IDS)
    expected = given.generate(PROMPT_BP, PROMPT_IDS, 5, RESPONSE_IDS)
    assert torch.equal(found.tokens_BR, expected.tokens_BR)
    assert not torch.equal(found.ids_BR, RESPONSE_IDS)
    tokens_BL = torch.cat([PROMPT_BP, found.tokens_BR], dim=1)
    assert torch.equal(found.ids_BR, coupling(tokens_BL, IDS_BL)[1][:, 6:11].argmax(-1))


@torch.no_grad()
def test_teacher_forcing_gives_the_true_past() -> None:
    coupling = build()
    found = coupling.predict(TOKENS_BL, IDS_BL, 5)
    logits_BLV, id_logits_BLI = coupling(TOKENS_BL, IDS_BL)
    assert torch.equal(found.tokens_BR, logits_BLV[:, 6:11].argmax(-1))
    assert torch.equal(found.ids_BR, id_logits_BLI[:, 6:11].argmax(-1))


def test_a_wrong_id_is_an_error() -> None:
    tokens_BR, ids_BR = torch.tensor([[1, 2], [1, 2], [1, 2]]), torch.tensor([[5, 6]] * 3)
    found = Response(torch.tensor([[1, 2], [1, 2], [1, 3]]), torch.tensor([[5, 6], [5, 7], [5, 6]]))
    scored = score(found, tokens_BR, ids_BR)
    assert scored.exact_B.tolist() == [True, False, False]
    assert scored.token_BR.tolist() == [[True, True], [True, True], [True, False]]
    assert scored.id_BR.tolist() == [[True, True], [True, False], [True, True]]


@pytest.mark.parametrize("architecture", ["olmo", "gpt_neox"])
def test_a_prediction_depends_on_no_later_token_or_id(architecture: str) -> None:
    coupling = build({"architecture": architecture})
    embedded: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
            embedded[name] = output.detach().requires_grad_()
            return embedded[name]

        return hook

    coupling.model.embedding.register_forward_hook(keep("tokens"))
    coupling.id_embedding.register_forward_hook(keep("ids"))
    logits_BLV, id_logits_BLI = coupling(TOKENS_BL, IDS_BL)
    for logits in (logits_BLV, id_logits_BLI):
        for place in range(12):
            value = logits[:, place].square().sum()
            for grad in torch.autograd.grad(value, list(embedded.values()), retain_graph=True):
                assert not grad[:, place + 1 :].any()
                assert (grad[:, : place + 1].abs().sum(-1) > 0).all()


def test_ids_enter_by_rope_and_by_the_embedding() -> None:
    rope_only = build(embed_ids=False, predict_ids=False)
    torch.testing.assert_close(  # differences of IDs only: this is why it cannot predict them
        rope_only(TOKENS_BL, IDS_BL + 0)[0],
        rope_only(TOKENS_BL, IDS_BL - 2)[0],
        atol=1e-4,
        rtol=1e-4,
    )
    embedded_only = build({"rope": False})
    for coupling in (embedded_only, build()):
        here, there = coupling(TOKENS_BL, IDS_BL), coupling(TOKENS_BL, IDS_BL - 2)
        assert not torch.allclose(here[0], there[0], atol=1e-2)


@pytest.mark.parametrize("architecture", ["olmo", "gpt_neox"])
def test_the_joint_loss_is_the_sum_of_its_parts(architecture: str) -> None:
    coupling = build({"architecture": architecture})
    response_BL = RESPONSE_BL.clone()
    response_BL[1, -2:] = False  # a shorter response, padded
    found = coupling.loss(TOKENS_BL, IDS_BL, response_BL)

    with torch.no_grad():
        logits_BLV, id_logits_BLI = coupling(TOKENS_BL, IDS_BL)
    token_nll, id_nll, count = 0.0, 0.0, 0
    for row in range(2):
        for place in range(1, 12):
            if response_BL[row, place]:
                before = (row, place - 1)
                token_nll -= float(logits_BLV[before].log_softmax(-1)[TOKENS_BL[row, place]])
                id_nll -= float(id_logits_BLI[before].log_softmax(-1)[IDS_BL[row, place]])
                count += 1
    assert count == 8
    assert float(found.detach()) == pytest.approx((token_nll + id_nll) / count, rel=1e-5)

    found.backward()
    assert all(p.grad is not None and p.grad.any() for p in coupling.parameters())


def test_text_before_the_response_has_a_loss_if_it_has_a_weight() -> None:
    response_BL = RESPONSE_BL.clone()
    response_BL[1, -2:] = False  # padding, which is no text
    plain, weighted = (
        build(predict_ids=False, text_weight=weight).loss(TOKENS_BL, IDS_BL, response_BL)
        for weight in (0.0, 0.5)
    )
    before_BL = torch.arange(12).expand(2, 12) < NUM_PROMPT
    text = build(predict_ids=False).loss(TOKENS_BL, IDS_BL, before_BL)
    torch.testing.assert_close(weighted, plain + 0.5 * text)
