"""Losses, unembedded a few rows at a time, equal plain cross-entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.models import losses, training_loss
from olmo_sparsity.models.losses import token_losses
from olmo_sparsity.models.training_loss import (
    ChunkFunction,
    LossSum,
    compilable_chunk_losses,
    mean_loss,
)
from olmo_sparsity.text.vocabulary import IGNORED
from tests.support.models import GAPPED, draw_tokens, tiny_olmo

LOSS_CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"weight_tying": False},
    "untied with bias": {"weight_tying": False, "include_bias": True},
    "scaled": {"scale_logits": True},
    "scaled, untied with bias": {"scale_logits": True, "weight_tying": False, "include_bias": True},
    "GPT-NeoX": {"architecture": "gpt_neox"},
    "GPT-NeoX, untied": {"architecture": "gpt_neox", "weight_tying": False},
}


@pytest.fixture(params=[5, 1000], ids=["many chunks", "one chunk"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (losses, training_loss):
        monkeypatch.setattr(module, "rows_per_chunk", lambda *_: request.param)


def draw_labels(tokens_BL: Tensor) -> Tensor:
    labels_BL = tokens_BL.roll(-1, dims=1)
    labels_BL[:, -1] = IGNORED
    labels_BL[0, 3:8] = IGNORED
    return labels_BL


def plain_loss(model: nn.Module, tokens: Tensor, labels: Tensor, num_labels: int) -> Tensor:
    logits = model(tokens, GAPPED).float().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_labels


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("compiled", [None, compilable_chunk_losses], ids=["", "to be compiled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", LOSS_CASES.values(), ids=LOSS_CASES)
def test_mean_loss_and_its_gradients_equal_cross_entropy(
    changes: dict[str, Any], precision: str, compiled: ChunkFunction | None
) -> None:
    model, tokens_BL = tiny_olmo(**changes), draw_tokens()
    labels_BL = draw_labels(tokens_BL)
    found = []
    for compute in (
        lambda: mean_loss(model, tokens_BL, GAPPED, labels_BL, 40, None, compiled),
        lambda: plain_loss(model, tokens_BL, labels_BL, 40),
    ):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = compute()
        (3 * loss).backward()  # the gradient that comes from above is used too
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append((loss.detach(), grads))
    (ours, our_grads), (plain, plain_grads) = found
    assert len(our_grads) == len(plain_grads) == len(list(model.parameters()))
    if precision == "fp32":
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
        for a, b in zip(our_grads, plain_grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    else:
        torch.testing.assert_close(ours, plain, atol=0, rtol=1e-2)
        for a, b in zip(our_grads, plain_grads, strict=True):
            assert float((a - b).norm()) <= 0.05 * float(b.norm())


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("compiled", [None, compilable_chunk_losses], ids=["", "to be compiled"])
@pytest.mark.parametrize("changes", LOSS_CASES.values(), ids=LOSS_CASES)
def test_z_loss_changes_the_gradient_and_not_the_loss(
    changes: dict[str, Any], compiled: ChunkFunction | None
) -> None:
    """Against autograd of the formula, on all logits at once."""
    model = tiny_olmo(**changes)
    tokens_BL = draw_tokens()
    labels_BL = draw_labels(tokens_BL)
    num_labels = 40
    z_loss = 0.03

    ours = mean_loss(model, tokens_BL, GAPPED, labels_BL, num_labels, None, compiled, z_loss)
    ours.backward()
    our_grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    plain = plain_loss(model, tokens_BL, labels_BL, num_labels)
    log_sum_BL = model(tokens_BL, GAPPED).float().logsumexp(-1)
    squared = log_sum_BL.square()[labels_BL != IGNORED].sum()
    (plain + z_loss * squared / num_labels).backward()

    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
    for ours_of, parameter in zip(our_grads, model.parameters(), strict=True):
        torch.testing.assert_close(ours_of, parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-7), (torch.bfloat16, 4e-3)])
def test_a_chunk_is_as_exact_as_its_dtype(dtype: torch.dtype, tolerance: float) -> None:
    """Against fp64. Logits reach from 50 to 150, and some labels are nearly certain."""
    logits_CV = (100 + 12 * torch.randn(64, 500)).to(dtype)
    labels_C = torch.cat((logits_CV.argmax(-1)[:32], torch.randint(500, (32,))))
    log_p_CV = logits_CV.double().log_softmax(-1)
    expected_C = -log_p_CV.gather(1, labels_C[:, None])[:, 0]
    expected_CV = log_p_CV.exp() - F.one_hot(labels_C, 500)
    one = torch.eye(500, dtype=dtype)  # the logits are exact
    nll_C, grad_CV = compilable_chunk_losses(logits_CV, one, None, labels_C, 1.0, 0.0)
    assert (nll_C - expected_C).norm() <= 2e-7 * expected_C.norm()
    assert (grad_CV - expected_CV).norm() <= tolerance * expected_CV.norm()


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("changes", LOSS_CASES.values(), ids=LOSS_CASES)
def test_token_losses_equal_cross_entropy(changes: dict[str, Any]) -> None:
    model, tokens_BL = tiny_olmo(**changes), draw_tokens()
    labels_BL = draw_labels(tokens_BL)
    logits_BLV = model(tokens_BL, GAPPED)
    expected = F.cross_entropy(
        logits_BLV.transpose(1, 2), labels_BL, ignore_index=IGNORED, reduction="none"
    )
    nll_BL = token_losses(model, tokens_BL, GAPPED, labels_BL)
    torch.testing.assert_close(nll_BL, expected.detach(), atol=1e-6, rtol=1e-5)
    assert not nll_BL[labels_BL == IGNORED].any()
    assert nll_BL.dtype == torch.float32


def test_many_chunks_are_as_exact_as_one_with_weights_in_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient of the unembedding, of 100 chunks, against that of fp32 weights."""
    torch.manual_seed(0)
    hidden_ND = torch.randn(400, 32).bfloat16()
    weight_VD = (0.1 * torch.randn(64, 32)).bfloat16()
    labels_N = torch.randint(0, 64, (400,))

    def gradient(dtype: torch.dtype, chunk: int) -> Tensor:
        monkeypatch.setattr(training_loss, "rows_per_chunk", lambda *_: chunk)
        weight = weight_VD.clone().to(dtype).requires_grad_()
        loss_sum = LossSum(factor=1 / 400)
        inputs = hidden_ND.to(dtype), weight, None, labels_N, loss_sum
        training_loss._ChunkedLoss.apply(*inputs).backward()
        assert weight.grad is not None
        assert weight.grad.dtype == dtype
        return weight.grad.float()

    exact = gradient(torch.float32, 400)
    one, many = (
        float((gradient(torch.bfloat16, chunk) - exact).norm() / exact.norm()) for chunk in (400, 4)
    )
    assert many < 1.3 * one
