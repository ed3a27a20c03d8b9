"""Rows that attend to the same distant states compute what they compute alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from olmo_sparsity.models.attention import causal_bias
from olmo_sparsity.models.distant_states import DistantStates
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


@torch.no_grad()
@each
def test_distant_states_stand_for_distant_places(index: int) -> None:
    model = wrap(index)
    distant = model.distant_states(TOKENS[:, :NUM_FAR], COUNTED[:, :NUM_FAR])
    near = (TOKENS[:, NUM_FAR:], COUNTED[:, NUM_FAR:])
    plain = model.model(input_ids=TOKENS).logits
    check_close(model.unembed(model.hidden(*near, distant=distant)), plain[:, NUM_FAR:])
    check_close(model.unembed(model.hidden(*near, distant=distant, last=2)), plain[:, -2:])
    chosen = [1, 4, 5]
    hidden_from = [place for place in range(NUM_FAR) if place not in chosen]
    bias = causal_bias(LENGTH, CPU).clone()
    bias[..., NUM_FAR:, hidden_from] = bias[0, 0, 0, 1]
    expected = own_logits(model, COUNTED, bias)[:, NUM_FAR:]
    some = distant.choose(torch.tensor([chosen]))
    check_close(model.unembed(model.hidden(*near, distant=some)), expected)
    others_hidden = distant.expand(1, bias[0, :, NUM_FAR, :NUM_FAR])
    check_close(model.unembed(model.hidden(*near, distant=others_hidden)), expected)
    copies = SUPPORTED[index].class_name.split("For")[0] in COPIES_FAR
    assert model.shares_distant(NUM_FAR, LENGTH - NUM_FAR) == (not copies)
    rows = (near[0].expand(2, -1), near[1].expand(2, -1))
    none_and_others = torch.cat((torch.zeros(1, NUM_FAR), bias[0, :, NUM_FAR, :NUM_FAR]))
    two = model.unembed(model.hidden(*rows, distant=distant.expand(2, none_and_others)))
    check_close(two, torch.cat((plain[:, NUM_FAR:], expected)))
    assert float((expected - plain[:, NUM_FAR:]).abs().max()) > 1e-3


@torch.no_grad()
def test_other_threads_and_types_are_not_affected_by_sharing() -> None:
    # Imports all of transformers.
    from olmo_sparsity.models.shared_states import LayerView, attending_to

    model, near = wrap(find("Llama 1, 2, 3")), (TOKENS[:, NUM_FAR:], COUNTED[:, NUM_FAR:])
    distant = model.distant_states(TOKENS[:, :NUM_FAR], COUNTED[:, :NUM_FAR])
    alone, views = model.hidden(*near), [LayerView(torch.zeros(1))]
    with attending_to(distant, views, model._usual_configs), ThreadPoolExecutor() as pool:
        assert torch.equal(pool.submit(torch.no_grad()(model.hidden), *near).result(), alone)
        with pytest.raises(NotImplementedError, match="another mask"):
            model.hidden(*near)
    shared = model.hidden(*near, distant=distant)
    with torch.autocast("cpu", torch.bfloat16):  # its kernels are not those that share
        torch.testing.assert_close(
            model.hidden(*near, distant=distant).float(), shared, atol=0.1, rtol=0.1
        )


def test_distant_states_are_chosen_cut_and_joined_by_place() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 5, 2, 3, generator=generator) for _ in range(2))
    whole = DistantStates(torch.arange(5)[None], [(k, v)], hidden_BFD=torch.randn(1, 5, 4))
    assert (whole.num_places, whole.num_heads, whole.window_bias(3)) == (5, 2, None)
    part = whole.first(2)
    assert part.positions_BF.tolist() == [[0, 1]]
    assert torch.equal(part.layers[0][1], v[:, :2])
    assert torch.equal(part.hidden_BFD, whole.hidden_BFD[:, :2])
    chosen = whole.choose(torch.tensor([[4, 0], [1, 2]]))
    assert chosen.positions_BF.tolist() == [[4, 0], [1, 2]]
    assert torch.equal(chosen.layers[0][0], k[0, [[4, 0], [1, 2]]])
    assert whole.choose(torch.arange(5)[None]) is whole
    bias = torch.tensor([[0.0, -1.0], [-2.0, 0.0], [0.0, 0.0]])
    of_rows = part.expand(3, bias)
    assert of_rows.layers[0][0].shape == (3, 2, 2, 3)
    (window,) = of_rows.window_bias(3).unbind(1)
    assert torch.equal(window[:, :, :2], bias[:, None].expand(3, 3, 2))
    assert torch.equal(window[:, :, 2:], causal_bias(3, CPU)[0].expand(3, 3, 3))
    # Rows of the same two first places and one more each, in two batches.
    rows = [
        DistantStates(r, [(k[0, r], v[0, r])]) for r in torch.tensor([[[0, 1, 4]], [[0, 1, 3]]])
    ]
    places = torch.cat([row.positions_BF for row in rows])
    two = DistantStates(places, [(k[0, places], v[0, places])])
    joined = DistantStates.behind_prefix([two, rows[1]], 2)
    assert joined.positions_BF.tolist() == [[0, 1, 4, 3, 3]]
    assert torch.equal(joined.layers[0][1], v[:, [0, 1, 4, 3, 3]])
    more = torch.ones(1, 3, 4)
    assert torch.equal(whole.predicting(more, None).hidden_BFD, more)
    both = torch.cat([whole.hidden_BFD[:, :2], more], 1)
    assert torch.equal(whole.predicting(more, part).hidden_BFD, both)
    assert whole.predicting(more, chosen).hidden_BFD is None
