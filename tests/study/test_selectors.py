"""Rules of the study against brute force; relevance by AttnLRP is conserved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from olmo_sparsity.analysis.inputs.windows import Windows
from olmo_sparsity.analysis.kernels import attention
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.settings import Reading
from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model.build import build_model
from study import selectors
from study.selectors import attn_lrp
from tests.support.brute import (
    CPU,
    OF_KINDS,
    READINGS,
    VOCAB,
    Brute,
    assert_ranked,
    question,
    tiny,
    units_of,
)

LENGTH = 9
TOKENS = torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.tensor([[0, 1, 2, 5, 6, 9, 10, 11, 12]])

SIZES = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_sequence_length": 64, "init_std": 0.2}
OLMO: dict[str, dict[str, Any]] = {
    "olmo": {"layer_norm_type": "rms"},
    "olmo, query-key norm, norm after": {
        "layer_norm_type": "rms",
        "attention_layer_norm": True,
        "norm_after": True,
        "n_kv_heads": 2,
        "weight_tying": False,
    },
    "olmo, norm of each head": {
        "layer_norm_type": "rms",
        "attention_layer_norm": True,
        "attention_norm_per_head": True,
        "head_width": 12,
        "n_kv_heads": 2,
        "qkv_bias": True,
    },
    "olmo, LayerNorm": {"attention_layer_norm": True, "scale_logits": True},
    "olmo, GELU and ALiBi": {"activation_type": "gelu", "rope": False, "alibi": True},
    "olmo, ReLU": {"activation_type": "relu", "query_scale_length": 32.0, "clip_qkv": 100.0},
}


def model_of(name: str) -> Any:
    """Without biases, which would take relevance; weights of norms differ from 1."""
    torch.manual_seed(0)
    model: Any = build_model(ModelConfig(**SIZES, vocab_size=VOCAB, **OLMO[name]))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("bias"):
                weight.zero_()
            elif weight.dim() == 1:
                weight.add_(0.3 * torch.randn(len(weight)))
    return model.eval()


class Softmaxes:
    """Attention written out, in place of the kernels of PyTorch; keeps scores and outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scores: list[Tensor] = []
        self.outputs: list[Tensor] = []
        monkeypatch.setattr(attention, "matmul_is_faster", lambda *_: False)
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", self.attend)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        bias = 0.0 if attn_mask is None else attn_mask
        if is_causal:
            bias = torch.full(scores.shape[-2:], float("-inf")).triu(1)
        elif getattr(bias, "dtype", None) == torch.bool:
            bias = torch.where(bias, 0.0, float("-inf"))
        output = (scores + bias).softmax(-1) @ v
        self.scores.append(scores)
        self.outputs.append(output)
        return output


def explain(model: Any, also: Any = ()) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A logit of the last place, the relevance of each place for it, and input × gradient of what
    `also` holds after the forward pass."""
    kept = []

    def keep(module: Any, inputs: Any, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[0]

    hook = model.embedding.register_forward_hook(keep)
    with attn_lrp(model):
        logit = model(TOKENS, POSITIONS)[0, -1, 7]
        inputs = [kept[0], *(x for group in also for x in group)]
        gradients = torch.autograd.grad(logit, inputs)
    hook.remove()
    products = [(x * g).detach() for x, g in zip(inputs, gradients, strict=True)]
    return logit.detach(), products[0][0].sum(-1), products[1:]


def lost(model: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """What part of the relevance neither the tokens get nor the softmaxes keep."""
    with monkeypatch.context() as patch:
        softmaxes = Softmaxes(patch)
        logit, relevance_L, found = explain(model, (softmaxes.outputs, softmaxes.scores))
    num_layers = len(softmaxes.scores)
    assert num_layers == 2
    of_outputs = sum(float(x.sum()) for x in found[:num_layers])
    of_scores = sum(float(x.sum()) for x in found[num_layers:])
    rest = float(logit) - float(relevance_L.sum()) - (of_outputs - of_scores) / 2
    return abs(rest) / float(relevance_L.abs().sum())


@pytest.mark.parametrize("name", OLMO)
def test_relevance_is_conserved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost(model_of(name), monkeypatch) < 2e-5


@pytest.mark.parametrize("kind", ["rms", "default"])
def test_a_bias_takes_relevance_from_no_token(kind: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig(**SIZES, vocab_size=VOCAB, layer_norm_type=kind, bias_for_layer_norm=True)
    model: Any = build_model(config).eval()
    logit, relevance_L, _ = explain(model)
    torch.nn.init.normal_(model.transformer.ln_f.bias)
    other_logit, found_L, _ = explain(model)
    assert abs(float(other_logit - logit)) > 0.1
    torch.testing.assert_close(found_L, relevance_L)


def test_families_without_rules_are_refused() -> None:
    model = build_model(ModelConfig(**SIZES, vocab_size=VOCAB, architecture="gpt_neox"))
    with pytest.raises(ConfigError, match="lrp"), attn_lrp(model):
        pass


@READINGS
@pytest.mark.parametrize(("windows", "kind"), OF_KINDS)
@pytest.mark.parametrize("rule", ["drop_one", "divergence"])
def test_rules_against_brute_force(
    windows: Windows, kind: str, rule: str, far_states: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors, "PLACES_AT_ONCE", 30)  # of drop_one: its rows in parts
    model, document = tiny("olmo"), np.random.default_rng(1).integers(0, VOCAB, 40)
    scorer = Scorer(model, CPU, far_states=far_states, batch_tokens=128)
    block = list(windows.blocks(document))[2]
    targets = list(range(block.num_targets))[-3:]
    units, by_hand = units_of(kind, block.num_far)
    k = min(4, len(by_hand))
    choice = getattr(selectors, rule)(scorer, question(scorer, block, targets, k, units))
    for row, target in enumerate(targets):
        brute = Brute(model, document, windows, block.start + target, far_states)
        expected = brute.influences(rule, by_hand)
        np.testing.assert_allclose(choice.score_TU[row], expected, atol=2e-5)
        assert_ranked(choice, row, expected, k)
