"""A causal model of transformers behind one call computes what transformers computes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_sparsity.analysis.kernels.losses import mean_loss
from olmo_sparsity.analysis.models import huggingface
from olmo_sparsity.analysis.models.huggingface import HuggingFaceLM
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.model.layers import causal_bias
from tests.support.families import (
    COUNTED,
    CPU,
    GAPPED,
    LENGTH,
    NUM_FAR,
    SUPPORTED,
    TOKENS,
    Family,
    build,
    check_close,
    each,
    find,
    own_logits,
    quantize,
    wrap,
)


@torch.no_grad()
@each
def test_logits_are_its_own_and_gaps_are_gaps(index: int) -> None:
    model = wrap(index)
    assert model.vocab_size == 61
    check_close(model(TOKENS, COUNTED), model.model(input_ids=TOKENS).logits)
    gapped = model(TOKENS, GAPPED)
    check_close(gapped, own_logits(model, GAPPED, causal_bias(LENGTH, CPU)))
    assert float((gapped - model(TOKENS, COUNTED))[:, 4:].abs().max()) > 1e-3


@torch.no_grad()
def test_kept_states_are_given_under_the_name_that_the_model_has_for_them() -> None:
    """`cache` from transformers 5.24 on."""
    from transformers import LlamaModel

    class Renamed(LlamaModel):
        def forward(self, *given: Any, position_ids: Any, cache: Any = None, **more: Any) -> Any:
            more["past_key_values"] = cache
            return LlamaModel.forward(self, *given, position_ids=position_ids, **more)

    model = build(SUPPORTED[find("Llama 1, 2, 3")])
    before = HuggingFaceLM(model)
    if before._cache_name == "cache":
        pytest.skip("this transformers has the new name")
    far = before.far_states(TOKENS[:, :NUM_FAR], COUNTED[:, :NUM_FAR])
    rest = TOKENS[:, NUM_FAR:], COUNTED[:, NUM_FAR:]
    expected = before.hidden(*rest, far=far)
    model.model.__class__ = Renamed
    after = HuggingFaceLM(model)
    assert after._cache_name == "cache"
    far = after.far_states(TOKENS[:, :NUM_FAR], COUNTED[:, :NUM_FAR])
    torch.testing.assert_close(after.hidden(*rest, far=far), expected)


@torch.no_grad()
def test_states_of_a_long_text_are_computed_with_small_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = wrap(find("Llama 1, 2, 3"))
    expected = model.far_states(TOKENS[:1], COUNTED[:, :LENGTH])
    lengths, hidden = list[int](), model.hidden

    def counted(tokens_BL: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        lengths.append(tokens_BL.shape[1])
        return hidden(tokens_BL, *given, **named)

    monkeypatch.setattr(huggingface, "MASKED_AT_ONCE", 3 * LENGTH)
    monkeypatch.setattr(model, "hidden", counted)
    found = model.far_states(TOKENS[:1], COUNTED[:, :LENGTH])
    assert max(lengths) == 3
    assert sum(lengths) == LENGTH
    check_close(found.hidden_BFD, expected.hidden_BFD)
    check_close(found.layers[-1][0], expected.layers[-1][0])


def test_a_model_in_memory_keeps_its_settings() -> None:
    model = build(SUPPORTED[find("Gemma 3 (with images)")])
    model.config._attn_implementation = {"text_config": "sdpa", "vision_config": "eager"}
    parts = (model.config, model.config.text_config, model.config.vision_config)
    before = [part._attn_implementation for part in parts]
    HuggingFaceLM(model)
    assert [part._attn_implementation for part in parts] == before


@torch.no_grad()
@each
def test_last_attention_is_that_of_its_own_layers(index: int) -> None:
    model = wrap(index)
    before = model.model.config._attn_implementation
    far = model.far_states(TOKENS[:, :NUM_FAR], COUNTED[:, :NUM_FAR])
    weights_BHK = model.last_attention(TOKENS[:, NUM_FAR:], COUNTED[:, NUM_FAR:], far)
    assert model.model.config._attn_implementation == before
    model.model.set_attn_implementation("eager")
    try:
        theirs = model.body(
            input_ids=TOKENS,
            position_ids=COUNTED,
            attention_mask=causal_bias(LENGTH, CPU),
            output_attentions=True,
            use_cache=False,
        ).attentions
    finally:  # all tests of this family take this model
        model.model.set_attn_implementation(before)
    check_close(weights_BHK, torch.cat([weights[:, :, -1] for weights in theirs], 1))
    # gpt-oss has a place to attend to that is no token.
    sums_H = weights_BHK[0].sum(-1)
    assert float(sums_H.mean()) > 0.5
    assert float(sums_H.max()) <= 1 + 1e-5


def test_scaled_logits_train_and_capped_ones_do_not() -> None:
    labels_BL = TOKENS.roll(-1, 1)
    scaled = HuggingFaceLM(build(SUPPORTED[find("Granite")]))
    loss = mean_loss(scaled, TOKENS, COUNTED, labels_BL, LENGTH)
    logits_BLV = scaled.model(input_ids=TOKENS).logits
    expected = F.cross_entropy(logits_BLV.transpose(1, 2), labels_BL)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    ours = scaled.embedding.weight.grad.clone()
    scaled.zero_grad()
    expected.backward()
    torch.testing.assert_close(ours, scaled.embedding.weight.grad)
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM caps its logits at 30.0"):
        mean_loss(wrap(find("Gemma 2")), TOKENS, COUNTED, labels_BL, LENGTH)


ROUGH: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {}),
    ("GPTNeoXForCausalLM", {}),
    ("MixtralForCausalLM", {"num_local_experts": 4}),
]


@pytest.fixture
def _kernels_that_round_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the causal kernel is another one than the one that takes a mask."""
    attend = F.scaled_dot_product_attention

    def causal_in_fp64(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **more: Any) -> Any:
        if attn_mask is not None:
            return attend(q, k, v, attn_mask=attn_mask, **more)
        return attend(q.double(), k.double(), v.double(), **more).to(q.dtype)

    monkeypatch.setattr(F, "scaled_dot_product_attention", causal_in_fp64)


@pytest.mark.usefixtures("_kernels_that_round_differently")
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("class_name", "settings"), ROUGH)
def test_rounding_to_8_bits_is_told_from_a_gap_that_hides(
    class_name: str,
    settings: dict[str, Any],
    dtype: torch.dtype,
    hides: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(Family("", class_name, {"num_hidden_layers": 16, **settings}))
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    quantize(model).to(dtype)
    if not hides:
        HuggingFaceLM(model)
        return
    forward = model.base_model.forward

    @functools.wraps(forward)  # with its signature
    def without_ones(*args: Any, attention_mask: Any = None, **more: Any) -> Any:
        """Without a mask transformers takes a gap for the start of another text."""
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = None
        return forward(*args, attention_mask=attention_mask, **more)

    monkeypatch.setattr(model.base_model, "forward", without_ones)
    with pytest.raises(ConfigError, match="a gap in its position IDs changes who may attend"):
        HuggingFaceLM(model)


def test_a_kernel_that_packs_texts_is_refused_with_the_remedy() -> None:
    model = build(SUPPORTED[0])
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r'flash_attention_2.*set_attn_implementation\("sdpa"\)'):
        HuggingFaceLM(model)


def test_construction_draws_nothing_and_leaves_the_mode() -> None:
    model = build(SUPPORTED[0]).train()
    state = torch.get_rng_state()
    HuggingFaceLM(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
