"""Position coupling: generation that equals recomputing, a joint loss that equals its parts, and
settings that cannot work refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.config import ModelConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model.coupling import PositionCoupling, Response, score
from olmo_sparsity.model.load import build_model
from olmo_sparsity.tasks.experiment import run_settings
from olmo_sparsity.tasks.schemes import SCHEMES
from olmo_sparsity.tasks.settings import build_task, load_settings

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
    return PositionCoupling(model, NUM_IDS, **settings)


def draw_tokens(length: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


# --- generation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("predict_ids", [True, False], ids=["predicted", "given"])
@torch.no_grad()
def test_generating_with_a_cache_equals_recomputing(
    changes: dict[str, Any], predict_ids: bool
) -> None:
    coupling = build(changes, predict_ids=predict_ids)
    prompt_BP = draw_tokens(NUM_PROMPT)
    found = coupling.generate(prompt_BP, PROMPT_IDS, 5, None if predict_ids else RESPONSE_IDS)

    tokens_BL, ids_BL = prompt_BP, PROMPT_IDS
    for place in range(5):
        logits_BLV, id_logits_BLI = coupling(tokens_BL, ids_BL)
        if predict_ids:
            assert id_logits_BLI is not None
            next_ids_B = id_logits_BLI[:, -1].argmax(-1)
        else:
            next_ids_B = RESPONSE_IDS[:, place]
        tokens_BL = torch.cat([tokens_BL, logits_BLV[:, -1].argmax(-1)[:, None]], dim=1)
        ids_BL = torch.cat([ids_BL, next_ids_B[:, None]], dim=1)
    assert torch.equal(found.tokens_BR, tokens_BL[:, NUM_PROMPT:])
    assert torch.equal(found.ids_BR, ids_BL[:, NUM_PROMPT:])


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_a_cache_changes_no_hidden_state(changes: dict[str, Any]) -> None:
    model = build(changes).model
    tokens_BL, ids_BL = draw_tokens(12), torch.cat([PROMPT_IDS, RESPONSE_IDS], dim=1)
    added_BLD = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2))
    whole = model.hidden(tokens_BL, ids_BL, added_BLD=added_BLD)
    cache = model.new_cache()
    parts = [slice(0, NUM_PROMPT), *(slice(i, i + 1) for i in range(NUM_PROMPT, 12))]
    piecewise = [
        model.hidden(tokens_BL[:, p], ids_BL[:, p], added_BLD=added_BLD[:, p], cache=cache)
        for p in parts
    ]
    torch.testing.assert_close(torch.cat(piecewise, dim=1), whole, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_generation_feeds_back_what_it_predicted() -> None:
    """With an ID head that always names one ID, every later step must have been given that ID."""
    coupling = build()
    assert coupling.id_head is not None
    coupling.id_head.weight.zero_()
    coupling.id_head.bias.copy_(F.one_hot(torch.tensor(41), NUM_IDS).float())
    found = coupling.generate(draw_tokens(NUM_PROMPT), PROMPT_IDS, 5)
    assert (found.ids_BR == 41).all()
    coupling.id_head = None
    given = coupling.generate(
        draw_tokens(NUM_PROMPT), PROMPT_IDS, 5, torch.full_like(RESPONSE_IDS, 41)
    )
    assert torch.equal(found.tokens_BR, given.tokens_BR)
    other = coupling.generate(
        draw_tokens(NUM_PROMPT), PROMPT_IDS, 5, torch.full_like(RESPONSE_IDS, 2)
    )
    assert not torch.equal(found.tokens_BR, other.tokens_BR)


@torch.no_grad()
def test_teacher_forcing_gives_the_true_past() -> None:
    coupling = build()
    tokens_BL, ids_BL = draw_tokens(12), torch.cat([PROMPT_IDS, RESPONSE_IDS], dim=1)
    found = coupling.predict(tokens_BL, ids_BL, 5)
    logits_BLV, id_logits_BLI = coupling(tokens_BL, ids_BL)
    assert id_logits_BLI is not None
    assert torch.equal(found.tokens_BR, logits_BLV[:, 6:11].argmax(-1))
    assert torch.equal(found.ids_BR, id_logits_BLI[:, 6:11].argmax(-1))


def test_a_wrong_id_is_an_error() -> None:
    tokens_BR, ids_BR = torch.tensor([[1, 2], [1, 2], [1, 2]]), torch.tensor([[5, 6]] * 3)
    found = Response(torch.tensor([[1, 2], [1, 2], [1, 3]]), torch.tensor([[5, 6], [5, 7], [5, 6]]))
    scored = score(found, tokens_BR, ids_BR)
    assert scored.exact_B.tolist() == [True, False, False]
    assert scored.token_BR.tolist() == [[True, True], [True, True], [True, False]]
    assert scored.id_BR.tolist() == [[True, True], [True, False], [True, True]]


# --- what a prediction depends on ---------------------------------------------------------------


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
    assert coupling.id_embedding is not None
    coupling.id_embedding.register_forward_hook(keep("ids"))
    tokens_BL, ids_BL = draw_tokens(12), torch.cat([PROMPT_IDS, RESPONSE_IDS], dim=1)
    logits_BLV, id_logits_BLI = coupling(tokens_BL, ids_BL)
    assert id_logits_BLI is not None
    for logits in (logits_BLV, id_logits_BLI):
        for place in range(12):
            value = logits[:, place].square().sum()
            for grad in torch.autograd.grad(value, list(embedded.values()), retain_graph=True):
                assert not grad[:, place + 1 :].any()
                assert (grad[:, : place + 1].abs().sum(-1) > 0).all()


def test_ids_enter_by_rope_and_by_the_embedding() -> None:
    tokens_BL, ids_BL = draw_tokens(12), torch.cat([PROMPT_IDS, RESPONSE_IDS], dim=1)
    rope_only = build(embed_ids=False, predict_ids=False)
    torch.testing.assert_close(  # differences of IDs only: this is why it cannot predict them
        rope_only(tokens_BL, ids_BL + 0)[0], rope_only(tokens_BL, ids_BL - 2)[0],
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip
    embedded_only = build({"rope": False})
    for coupling in (embedded_only, build()):
        here, there = coupling(tokens_BL, ids_BL), coupling(tokens_BL, ids_BL - 2)
        assert not torch.allclose(here[0], there[0], atol=1e-2)


# --- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["olmo", "gpt_neox"])
def test_the_joint_loss_is_the_weighted_sum_of_its_parts(architecture: str) -> None:
    coupling = build({"architecture": architecture}, id_loss_weight=0.3)
    tokens_BL, ids_BL = draw_tokens(12), torch.cat([PROMPT_IDS, RESPONSE_IDS], dim=1)
    response_BL = torch.arange(12).expand(2, 12) >= NUM_PROMPT
    response_BL = response_BL.clone()
    response_BL[1, -2:] = False  # a shorter response, padded
    found = coupling.loss(tokens_BL, ids_BL, response_BL)

    with torch.no_grad():
        logits_BLV, id_logits_BLI = coupling(tokens_BL, ids_BL)
    assert id_logits_BLI is not None
    token_nll, id_nll, count = 0.0, 0.0, 0
    for row in range(2):
        for place in range(1, 12):
            if response_BL[row, place]:
                before = (row, place - 1)
                token_nll -= float(logits_BLV[before].log_softmax(-1)[tokens_BL[row, place]])
                id_nll -= float(id_logits_BLI[before].log_softmax(-1)[ids_BL[row, place]])
                count += 1
    assert count == 8
    assert float(found.token.detach()) == pytest.approx(token_nll / count, rel=1e-5)
    assert float(found.id.detach()) == pytest.approx(id_nll / count, rel=1e-5)
    expected = (token_nll + 0.3 * id_nll) / count
    assert float(found.total.detach()) == pytest.approx(expected, rel=1e-5)

    found.total.backward()
    assert all(p.grad is not None and p.grad.any() for p in coupling.parameters())


def test_given_ids_add_nothing_to_the_loss() -> None:
    coupling = build(predict_ids=False)
    tokens_BL, ids_BL = draw_tokens(12), torch.cat([PROMPT_IDS, RESPONSE_IDS], dim=1)
    found = coupling.loss(tokens_BL, ids_BL, torch.arange(12).expand(2, 12) >= NUM_PROMPT)
    assert float(found.id) == 0.0
    assert torch.equal(found.total, found.token)


# --- refusals -----------------------------------------------------------------------------------


def test_settings_that_cannot_work_are_refused() -> None:
    for settings, problem in (
        ({"embed_ids": False}, "RoPE sees differences of IDs only"),
        ({"id_loss_weight": 0.0}, "predict_ids=False"),
        ({"id_loss_weight": -1.0}, "id_loss_weight=-1.0"),
    ):
        with pytest.raises(ConfigError, match=problem):
            build(**settings)
    with pytest.raises(ConfigError, match="num_ids=0"):
        PositionCoupling(build().model, 0)


def test_batches_that_do_not_fit_are_refused() -> None:
    coupling, tokens_BL = build(), draw_tokens(12)
    ids_BL = torch.cat([PROMPT_IDS, RESPONSE_IDS], dim=1)
    response_BL = torch.arange(12).expand(2, 12) >= NUM_PROMPT
    with pytest.raises(ConfigError, match="give every token one ID"):
        coupling.loss(tokens_BL, ids_BL[:, :-1], response_BL)
    with pytest.raises(ConfigError, match="raise num_ids"):
        coupling.loss(tokens_BL, ids_BL + NUM_IDS, response_BL)
    with pytest.raises(ConfigError, match="from -1 to"):
        coupling.generate(tokens_BL, ids_BL - 3, 2)
    with pytest.raises(ConfigError, match="which has no context"):
        coupling.loss(tokens_BL, ids_BL, torch.ones_like(response_BL))
    with pytest.raises(ConfigError, match="response_BL has shape"):
        coupling.loss(tokens_BL, ids_BL, response_BL[:, :-1])
    with pytest.raises(ConfigError, match="leave out response_ids_BR"):
        coupling.generate(tokens_BL, ids_BL, 5, RESPONSE_IDS)
    given = build(predict_ids=False)
    with pytest.raises(ConfigError, match="must be given"):
        given.generate(tokens_BL, ids_BL, 5)
    with pytest.raises(ConfigError, match="give every token one ID"):
        given.generate(tokens_BL, ids_BL, 4, RESPONSE_IDS)


# --- the examples -------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
OWN_TASK = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tasks.md").read_text(), re.DOTALL)


def test_the_example_of_an_own_task_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = OWN_TASK
    assert len(code.splitlines()) < 60
    for long, short in (("= 3000, 160", "= 40, 40"), ("(20, 40, 60, 100)", "(3, 30)")):
        assert long in code
        code = code.replace(long, short)
    names: dict[str, Any] = {}
    exec(code, names)
    assert float(names["loss"].id.detach()) < 2.5  # far below the ln 40 of guessing
    assert re.findall(r"^(\d+): exact [01]\.\d\d", capsys.readouterr().out, re.M) == ["3", "30"]
    assert names["found"].tokens_BR.shape == (50, 30)


def test_the_same_task_runs_under_every_scheme(tmp_path: Path) -> None:
    _, code = OWN_TASK
    (tmp_path / "backwards_task.py").write_text(code)
    settings = load_settings(
        ROOT / "configs/tasks/scratchpad_parity_quick.yaml",
        [
            f"--task.name={tmp_path}/backwards_task.py:Backwards",
            f"--output={tmp_path}/out",
            "--seeds=[1]",
            "--num_workers=1",
            "--test_lengths=[6]",
            "--num_test_samples=20",
            "--training.num_steps=2",
        ],
    )
    task = build_task(settings)
    samples = task.sample(np.random.default_rng(0), 20, 6)
    np.testing.assert_array_equal(task.solve(samples), samples.response_BR)
    rows = run_settings(settings)
    assert {row.scheme for row in rows} == set(settings.schemes) == set(SCHEMES)
    assert all(0 <= row.token_accuracy <= 1 for row in rows)
