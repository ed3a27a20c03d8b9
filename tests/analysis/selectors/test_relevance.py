"""AttnLRP: relevance is conserved, agrees with an explicit propagation, and leaves no trace.

What a softmax takes for itself is computed here from its scores: it gets half the relevance of the
attention's output (the values get the other half), and hands on score × gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from olmo_sparsity.analysis.inputs.windows import Units, Windows
from olmo_sparsity.analysis.kernels import attention
from olmo_sparsity.analysis.models.huggingface import HuggingFaceLM
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.influence import SELECTORS
from olmo_sparsity.analysis.selectors.relevance import LIKE_LLAMA, attn_lrp
from olmo_sparsity.analysis.selectors.selector import Question
from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model.build import build_model
from tests.support.families import SUPPORTED, build, find

VOCAB, LENGTH = 61, 9
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
    "GPT-NeoX": {"architecture": "gpt_neox", "rotary_fraction": 0.5},
}
LLAMAS = [
    family.name
    for family in SUPPORTED
    if family.class_name.lower().removesuffix("forcausallm") in LIKE_LLAMA
]


def model_of(name: str) -> Any:
    """Without biases, which would take relevance; weights of norms differ from 1."""
    torch.manual_seed(0)
    if name in OLMO:
        model: Any = build_model(ModelConfig(**SIZES, vocab_size=VOCAB, **OLMO[name]))
    else:
        model = HuggingFaceLM(build(SUPPORTED[find(name)]))
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


@pytest.mark.parametrize("name", [*OLMO, *LLAMAS])
def test_relevance_is_conserved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost(model_of(name), monkeypatch) < 2e-5


def test_each_family_with_rules_is_tested() -> None:
    types = {model_of(name).model.config.model_type for name in LLAMAS}
    assert types == set(LIKE_LLAMA)


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


# --- explicit propagation -------------------------------------------------------------------------


class Linear:
    """y = W x, and relevance of x in proportion to its shares of y."""

    def __init__(self, module: Any, x: Tensor) -> None:
        self.weight, self.x = module.weight.detach().double(), x
        self.y = x @ self.weight.T

    def back(self, relevance: Tensor) -> Tensor:
        shares = self.x[:, None] * self.weight / self.y[..., None]  # place, output, input
        return torch.einsum("lo,loi->li", relevance, shares)


def rms(module: Any, x: Tensor) -> Tensor:
    scale = (x.square().mean(-1, keepdim=True) + module.variance_epsilon) ** -0.5
    return x * scale * module.weight.detach().double()


def rotation(position: int, width: int) -> Tensor:
    """The matrix of RoPE at a position."""
    half = width // 2
    matrix = torch.zeros(width, width, dtype=torch.double)
    for i in range(half):
        angle = torch.tensor(position * 10000.0 ** (-i / half), dtype=torch.double)
        matrix[i, i] = matrix[i + half, i + half] = angle.cos()
        matrix[i, i + half], matrix[i + half, i] = -angle.sin(), angle.sin()
    return matrix


def propagated(theirs: Any, target: int) -> Tensor:
    """relevance_L by the rules, from the last layer to the first. Norms hand it on as it is."""
    layer, width = theirs.model.layers[0], 8
    attention, mlp = layer.self_attn, layer.mlp
    embedded = theirs.model.embed_tokens.weight.detach().double()[TOKENS[0]]
    normed = rms(layer.input_layernorm, embedded)
    q, k, v = (Linear(getattr(attention, f"{name}_proj"), normed) for name in "qkv")
    turns = torch.stack([rotation(position, width) for position in POSITIONS[0].tolist()])
    turned_k = torch.einsum("loi,li->lo", turns, k.y)
    future = torch.ones(LENGTH, LENGTH).triu(1).bool()
    heads, mixed = [], []
    for head in range(2):
        own_q = q.y[:, head * width : (head + 1) * width]
        turned_q = torch.einsum("loi,li->lo", turns, own_q)
        scores = (turned_q @ turned_k.T / width**0.5).masked_fill(future, 0.0)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        heads.append((own_q, turned_q, scores, weights))
        mixed.append(weights @ v.y)
    o = Linear(attention.o_proj, torch.cat(mixed, -1))
    middle = embedded + o.y
    normed = rms(layer.post_attention_layernorm, middle)
    gate, up = Linear(mlp.gate_proj, normed), Linear(mlp.up_proj, normed)
    down = Linear(mlp.down_proj, gate.y * gate.y.sigmoid() * up.y)
    last = middle + down.y
    head_map = Linear(theirs.lm_head, rms(theirs.model.norm, last))

    found = torch.zeros(LENGTH, VOCAB, dtype=torch.double)
    found[-1, target] = head_map.y[-1, target]
    of_last = head_map.back(found)
    half = down.back(of_last * down.y / last) / 2
    of_middle = of_last * middle / last + gate.back(half) + up.back(half)
    of_mixed = o.back(of_middle * o.y / middle)
    of_q, of_k, of_v = (torch.zeros_like(x.y) for x in (q, k, v))
    for head, (own_q, turned_q, scores, weights) in enumerate(heads):
        part = slice(head * width, (head + 1) * width)
        # Each product of a weight and a value is a share of the output; both get half of it.
        shares = weights[:, :, None] * v.y[None] / mixed[head][:, None]
        products = of_mixed[:, None, part] * shares / 2  # query, key, coordinate
        of_v += products.sum(0)
        of_weights = products.sum(-1)
        of_scores = scores * (of_weights - weights * of_weights.sum(-1, keepdim=True))
        shares = turned_q[:, None] * turned_k[None] / width**0.5
        shares = shares / torch.where(future, 1.0, scores)[..., None]
        products = of_scores[..., None] * shares / 2
        for of_x, x, turned, relevance_LD in (
            (of_q[:, part], own_q, turned_q, products.sum(1)),
            (of_k, k.y, turned_k, products.sum(0)),
        ):
            of_x += x * torch.einsum("lo,loi->li", relevance_LD / turned, turns)
    of_normed = q.back(of_q) + k.back(of_k) + v.back(of_v)
    return (of_middle * embedded / middle + of_normed).sum(-1)


def test_relevance_is_that_of_an_explicit_propagation() -> None:
    theirs = build(
        SUPPORTED[find("Llama 1, 2, 3")],
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        initializer_range=0.3,
    )
    _, relevance_L, _ = explain(HuggingFaceLM(theirs))
    expected_L = propagated(theirs, 7)
    torch.testing.assert_close(relevance_L.double(), expected_L, rtol=0, atol=1e-5)
    assert float(expected_L.abs().min()) > 1e-3


# --- around it ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's calls of transformers
def test_adapters_are_part_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    names = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(target_modules=names, init_lora_weights=False)
    adapted = peft.get_peft_model(build(SUPPORTED[find("Llama 1, 2, 3")]), config).eval()
    assert lost(HuggingFaceLM(adapted), monkeypatch) < 2e-5


def asked(scorer: Scorer) -> Question:
    tokens = np.random.default_rng(0).integers(0, VOCAB, 30)
    block = next(iter(Windows(16, 6, 4).blocks(tokens)))
    units, generator = Units.of_tokens(10), np.random.default_rng(0)
    return Question(scorer.context(block), units, [(0, 1), (1, 2)], 10, generator)


@pytest.mark.parametrize("name", ["olmo", "GPT-NeoX", "Llama 1, 2, 3"])
def test_nothing_stays_behind(name: str) -> None:
    model = model_of(name)

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    scorer, num_hooks = Scorer(model), hooks()
    question, logits = asked(scorer), model(TOKENS, POSITIONS)
    (loss_W,) = scorer.losses([question.context.long_row()])
    with attn_lrp(model):
        assert hooks() > num_hooks
        assert torch.equal(model(TOKENS, POSITIONS), logits)  # only the gradient is another
    SELECTORS["lrp"](scorer, question)
    assert hooks() == num_hooks
    assert torch.equal(model(TOKENS, POSITIONS), logits)
    np.testing.assert_array_equal(scorer.losses([question.context.long_row()])[0], loss_W)
    with pytest.raises(KeyboardInterrupt), attn_lrp(model):
        raise KeyboardInterrupt
    assert hooks() == num_hooks


def test_a_span_is_explained_by_the_sum_of_its_logits() -> None:
    scorer = Scorer(model_of("olmo"))
    question = asked(scorer)
    relevance_TU = np.zeros((2, 10))
    found = SELECTORS["lrp"](scorer, question)
    np.put_along_axis(relevance_TU, found.unit_TK, found.influence_TK, axis=1)
    before = scorer.token_forwards
    found = SELECTORS["lrp"](scorer, replace(question, spans=[(0, 2)]))
    assert scorer.token_forwards - before == 3 * (16 + 1)
    np.testing.assert_allclose(
        found.influence_TK[0], relevance_TU.sum(0)[found.unit_TK[0]], atol=1e-5
    )


@pytest.mark.parametrize("name", ["olmo", "GPT-NeoX", "Llama 1, 2, 3"])
@pytest.mark.parametrize("selector", ["gradient", "lrp"])
def test_a_long_text_is_computed_again_in_place_of_kept(
    name: str, selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers keep their inputs alone: no weight wants a gradient, in a model that is being
    trained either, and each stays as it was."""
    model = model_of(name)
    model.embedding.requires_grad_(False)
    before = [weight.requires_grad for weight in model.parameters()]
    scorer = Scorer(model)
    question = asked(scorer)
    runs: list[bool] = []

    def see(*_: Any) -> None:
        if torch.is_grad_enabled():
            runs.append(any(weight.requires_grad for weight in model.parameters()))

    def found() -> tuple[np.ndarray, int, int]:
        paid, _ = scorer.token_forwards, runs.clear()
        influence_TK = SELECTORS[selector](scorer, question).influence_TK
        return influence_TK, scorer.token_forwards - paid, len(runs)

    activations = ("SwiGLU", "SiLUActivation", "GELUActivation")
    first = next(part for part in model.modules() if type(part).__name__ in activations)
    with first.register_forward_pre_hook(see):
        kept, kept_forwards, kept_runs = found()
        monkeypatch.setattr(attention, "MAX_ACTIVATIONS_B", 0)
        again, forwards, again_runs = found()
    np.testing.assert_array_equal(again, kept)
    assert again_runs == 2 * kept_runs > 0
    assert 3 * forwards == 4 * kept_forwards
    assert not any(runs), "a weight wants a gradient"
    assert [weight.requires_grad for weight in model.parameters()] == before


@pytest.mark.parametrize("name", ["Mixtral", "Gemma 2", "Phi 3, 4", "OLMo", "GPT-2"])
def test_other_families_are_refused_by_name(name: str) -> None:
    model = HuggingFaceLM(build(SUPPORTED[find(name)]))
    scorer = Scorer(model)
    said = rf"selector=lrp has no rules for {SUPPORTED[find(name)].class_name}, .*; take gradient"
    with pytest.raises(ConfigError, match=said):
        SELECTORS["lrp"](scorer, asked(scorer))


def test_other_modules_are_refused_by_name() -> None:
    with (
        pytest.raises(ConfigError, match=r"no rules for Linear, .*; take gradient"),
        attn_lrp(nn.Linear(2, 2)),
    ):
        pass
