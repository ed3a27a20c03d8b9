"""Rows that attend to the same distant states compute what they compute alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from tests.support.families import (
    COPIES_FAR,
    COUNTED,
    CPU,
    LENGTH,
    NUM_FAR,
    SUPPORTED,
    TOKENS,
    check_close,
    each,
    find,
    own_logits,
    wrap,
)

LOCAL = (TOKENS[:, NUM_FAR:], COUNTED[:, NUM_FAR:])
CHOSEN = [1, 4, 5]


def states_of(model: HuggingFaceLM) -> DistantStates:
    return model.distant_states(TOKENS[:, :NUM_FAR], COUNTED[:, :NUM_FAR])


def bias_without_others() -> torch.Tensor:
    """A causal bias that hides all distant tokens but the chosen ones from local places."""
    hidden = [place for place in range(NUM_FAR) if place not in CHOSEN]
    bias = causal_bias(LENGTH, CPU).clone()
    bias[..., NUM_FAR:, hidden] = bias[0, 0, 0, 1]
    return bias


@torch.no_grad()
@each
def test_distant_states_replace_distant_places(index: int) -> None:
    model = wrap(index)
    distant = states_of(model)
    plain = model.model(input_ids=TOKENS).logits
    check_close(model.unembed(model.hidden(*LOCAL, distant=distant)), plain[:, NUM_FAR:])
    check_close(model.unembed(model.hidden(*LOCAL, distant=distant, num_last=2)), plain[:, -2:])


@torch.no_grad()
@each
def test_places_that_are_left_out_are_hidden_as_by_a_mask(index: int) -> None:
    model = wrap(index)
    distant = states_of(model)
    bias = bias_without_others()
    expected = own_logits(model, COUNTED, bias)[:, NUM_FAR:]
    chosen = distant.choose(torch.tensor([CHOSEN]))
    check_close(model.unembed(model.hidden(*LOCAL, distant=chosen)), expected)
    others_hidden = distant.expand(1, bias[0, :, NUM_FAR, :NUM_FAR])
    check_close(model.unembed(model.hidden(*LOCAL, distant=others_hidden)), expected)


@torch.no_grad()
@each
def test_rows_share_distant_states_that_each_sees_in_part(index: int) -> None:
    model = wrap(index)
    bias = bias_without_others()
    all_seen = model.model(input_ids=TOKENS).logits[:, NUM_FAR:]
    some_seen = own_logits(model, COUNTED, bias)[:, NUM_FAR:]
    assert float((some_seen - all_seen).abs().max()) > 1e-3
    bias_BF = torch.cat((torch.zeros(1, NUM_FAR), bias[0, :, NUM_FAR, :NUM_FAR]))
    rows = (LOCAL[0].expand(2, -1), LOCAL[1].expand(2, -1))
    shared = states_of(model).expand(2, bias_BF)
    found = model.unembed(model.hidden(*rows, distant=shared))
    check_close(found, torch.cat((all_seen, some_seen)))


@each
def test_only_families_with_attention_of_their_own_copy_distant_states(index: int) -> None:
    copies = SUPPORTED[index].class_name.split("For")[0] in COPIES_FAR
    with torch.no_grad():
        assert wrap(index).shares_distant(NUM_FAR, LENGTH - NUM_FAR) == (not copies)


@torch.no_grad()
def test_other_threads_and_types_are_not_affected_by_sharing() -> None:
    # Imports all of transformers.
    from olmo_sparsity.models.huggingface.layer_views import LayerView
    from olmo_sparsity.models.huggingface.own_attention import attending_to

    model = wrap(find("Llama 1, 2, 3"))
    distant = states_of(model)
    alone = model.hidden(*LOCAL)
    views = [LayerView(torch.zeros(1))]
    with attending_to(distant, views, model._usual_configs), ThreadPoolExecutor() as pool:
        assert torch.equal(pool.submit(torch.no_grad()(model.hidden), *LOCAL).result(), alone)
        with pytest.raises(NotImplementedError, match="another mask"):
            model.hidden(*LOCAL)
    shared = model.hidden(*LOCAL, distant=distant)
    with torch.autocast("cpu", torch.bfloat16):  # its kernels are not those that share
        torch.testing.assert_close(
            model.hidden(*LOCAL, distant=distant).float(), shared, atol=0.1, rtol=0.1
        )


# --- selecting and joining ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> DistantStates:
    """Five places of one layer, with two heads of three coordinates."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 5, 2, 3, generator=generator)
    v = torch.randn(1, 5, 2, 3, generator=generator)
    hidden_BFD = torch.randn(1, 5, 4, generator=generator)
    return DistantStates(torch.arange(5)[None], [(k, v)], hidden_BFD=hidden_BFD)


def test_whole_states_count_their_places_and_heads(whole: DistantStates) -> None:
    assert whole.num_tokens == 5
    assert whole.num_heads == 2


def test_the_first_places_keep_their_states(whole: DistantStates) -> None:
    part = whole.first(2)
    assert part.positions_BF.tolist() == [[0, 1]]
    assert torch.equal(part.layers[0][1], whole.layers[0][1][:, :2])
    assert torch.equal(part.hidden_BFD, whole.hidden_BFD[:, :2])


def test_each_row_chooses_places_of_its_own(whole: DistantStates) -> None:
    places = [[4, 0], [1, 2]]
    chosen = whole.choose(torch.tensor(places))
    assert chosen.positions_BF.tolist() == places
    assert torch.equal(chosen.layers[0][0], whole.layers[0][0][0, places])


def test_choosing_all_places_copies_nothing(whole: DistantStates) -> None:
    assert whole.choose(torch.arange(5)[None]) is whole


def test_rows_have_the_same_states_and_a_bias_each(whole: DistantStates) -> None:
    bias = torch.tensor([[0.0, -1.0], [-2.0, 0.0], [0.0, 0.0]])
    of_rows = whole.first(2).expand(3, bias)
    assert of_rows.layers[0][0].shape == (3, 2, 2, 3)
    (window,) = of_rows.window_bias(3).unbind(1)
    assert torch.equal(window[:, :, :2], bias[:, None].expand(3, 3, 2))
    assert torch.equal(window[:, :, 2:], causal_bias(3, CPU)[0].expand(3, 3, 3))


def test_a_window_that_sees_all_places_needs_no_bias(whole: DistantStates) -> None:
    assert whole.window_bias(3) is None


def test_rows_after_one_prefix_are_joined_into_one_text(whole: DistantStates) -> None:
    k, v = whole.layers[0]
    # Rows of the same two first places and one more each, in two batches.
    first_batch = torch.tensor([[0, 1, 4], [0, 1, 3]])
    second_batch = torch.tensor([[0, 1, 3]])
    batches = [DistantStates(b, [(k[0, b], v[0, b])]) for b in (first_batch, second_batch)]
    joined = DistantStates.after_prefix(batches, 2)
    assert joined.positions_BF.tolist() == [[0, 1, 4, 3, 3]]
    assert torch.equal(joined.layers[0][1], v[:, [0, 1, 4, 3, 3]])


def test_hidden_states_continue_those_of_earlier_places(whole: DistantStates) -> None:
    later = torch.ones(1, 3, 4)
    assert torch.equal(whole.with_hidden_after(None, later).hidden_BFD, later)
    expected = torch.cat([whole.hidden_BFD[:, :2], later], 1)
    assert torch.equal(whole.with_hidden_after(whole.first(2), later).hidden_BFD, expected)


def test_without_earlier_hidden_states_there_are_none(whole: DistantStates) -> None:
    chosen = whole.choose(torch.tensor([[4, 0], [1, 2]]))
    assert whole.with_hidden_after(chosen, torch.ones(1, 3, 4)).hidden_BFD is None
