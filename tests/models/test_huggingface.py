"""A causal model of transformers behind one call computes what transformers computes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.models.huggingface import model as huggingface
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.identity.known_identities import forget
from tests.support.families import (
    COUNTED,
    CPU,
    GAPPED,
    LENGTH,
    NUM_FAR,
    SUPPORTED,
    TOKENS,
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
    check_close(model(TOKENS, COUNTED), model.model(input_ids=TOKENS).logits)
    gapped = model(TOKENS, GAPPED)
    check_close(gapped, own_logits(model, GAPPED, causal_bias(LENGTH, CPU)))
    assert float((gapped - model(TOKENS, COUNTED))[:, 4:].abs().max()) > 1e-3


def test_kept_states_are_given_under_the_name_that_the_model_has_for_them() -> None:
    """`cache` from transformers 5.24 on."""

    class Renamed(transformers.LlamaModel):
        def forward(self, *given: Any, position_ids: Any, cache: Any = None, **more: Any) -> Any:
            more["past_key_values"] = cache
            own = transformers.LlamaModel.forward
            return own(self, *given, position_ids=position_ids, **more)

    model = build(SUPPORTED[find("Llama 1, 2, 3")])
    model.model.__class__ = Renamed
    assert HuggingFaceLM(model)._cache_name == "cache"  # and passes its checks


@torch.no_grad()
def test_states_of_a_long_text_are_computed_with_small_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = wrap(find("Llama 1, 2, 3"))
    expected = model.distant_states(TOKENS[:1], COUNTED[:, :LENGTH])
    lengths, run = list[int](), model._run_body

    def counted(tokens_BL: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        lengths.append(tokens_BL.shape[1])
        return run(tokens_BL, *given, **named)

    monkeypatch.setattr(huggingface, "MAX_MASK_ENTRIES", 3 * LENGTH)
    monkeypatch.setattr(model, "_run_body", counted)
    found = model.distant_states(TOKENS[:1], COUNTED[:, :LENGTH])
    assert max(lengths) == 3
    assert sum(lengths) == LENGTH
    check_close(found.hidden_BFD, expected.hidden_BFD)
    check_close(found.layers[-1][0], expected.layers[-1][0])


@torch.no_grad()
@each
def test_last_attention_is_that_of_its_own_layers(index: int) -> None:
    model = wrap(index)
    before = model.model.config._attn_implementation
    distant = model.distant_states(TOKENS[:, :NUM_FAR], COUNTED[:, :NUM_FAR])
    if SUPPORTED[index].name in ("Falcon (RoPE)", "GPT-J", "GPT-Neo", "CodeGen"):
        with pytest.raises(ConfigError, match="does not return its attention weights"):
            model.last_attention(TOKENS[:, NUM_FAR:], COUNTED[:, NUM_FAR:], distant)
        return
    weights_BHS = model.last_attention(TOKENS[:, NUM_FAR:], COUNTED[:, NUM_FAR:], distant)
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
    check_close(weights_BHS, torch.cat([weights[:, :, -1] for weights in theirs], 1))


@pytest.mark.parametrize("name", ["Llama 1, 2, 3", "Mixtral"])
def test_rounding_to_8_bits_is_told_from_a_gap_that_hides(name: str) -> None:
    model = quantize(build(SUPPORTED[find(name)], num_hidden_layers=16).to(torch.bfloat16))
    HuggingFaceLM(model)
    forward = model.base_model.forward

    @functools.wraps(forward)  # with its signature
    def without_ones(*args: Any, attention_mask: Tensor, **more: Any) -> Any:
        """Without a mask transformers takes a gap for the start of another text."""
        given = None if attention_mask.dim() == 2 else attention_mask
        return forward(*args, attention_mask=given, **more)

    model.base_model.forward = without_ones
    forget(model)
    with pytest.raises(ConfigError, match="a gap in position IDs changes it"):
        HuggingFaceLM(model)


def test_a_kernel_that_packs_texts_is_refused_with_the_remedy() -> None:
    model = build(SUPPORTED[0])
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r'flash_attention_2.*set_attn_implementation\("sdpa"\)'):
        HuggingFaceLM(model)
