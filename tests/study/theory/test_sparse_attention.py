"""The sparse functional attention class: relative, differentiable."""

from __future__ import annotations

import math
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from study.theory.sparse_attention import PAD, KeyShape, SparseAttention, build_layout
from tests.study.theory.support import random_model


def by_loop(model: SparseAttention, replica: int, tokens: list[int], ids: list[int]) -> list[float]:
    """Definition 3.3 word for word."""
    shape, values = model.shape, model.values()[replica]
    total, label_sums = 0.0, [0.0, 0.0]
    for places in combinations(range(len(tokens)), shape.num_places):
        row = code = 0
        for place in places:
            code = code * 3 + tokens[place]
        differences = [ids[place] - ids[places[0]] for place in places[1:]]
        for difference in differences:
            row = row * shape.window + difference
        if not shape.relative:
            row = 0
        elif any(difference >= shape.window for difference in differences):
            if shape.distant == "zero":
                continue
            row = None
        key = 1.0 if row is None else math.exp(model.log_key_RPC[replica, row, code])
        total += key
        for label in range(2):
            label_sums[label] += key * float(values[code, label])
    return [s / total for s in label_sums]


SHAPES = [
    KeyShape(1, 1),
    KeyShape(2, 3),
    KeyShape(2, 2, "initial"),
    KeyShape(2, 1, relative=False),
    KeyShape(3, 3),
    KeyShape(3, 2, "initial"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ids", [list(range(7)), [0, 0, 1, 1, 2, 2, 3]])
def test_vectorised_attention_is_the_definition(shape: KeyShape, ids: list[int]) -> None:
    model = random_model(shape)
    tokens_RBL = torch.from_numpy(np.random.default_rng(0).integers(3, size=(2, 4, 7)))
    layout = build_layout(np.array(ids), shape)
    with torch.no_grad():
        probs_RBY = model(tokens_RBL, layout)
        for replica in range(2):
            for string in range(4):
                expected = by_loop(model, replica, tokens_RBL[replica, string].tolist(), ids)
                assert probs_RBY[replica, string].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padding_is_as_if_absent(shape: KeyShape) -> None:
    model = random_model(shape)
    tokens_RBL = torch.from_numpy(np.random.default_rng(0).integers(3, size=(2, 4, 6)))
    padded = torch.cat([tokens_RBL, torch.full((2, 4, 3), PAD)], dim=2)
    short = model(tokens_RBL, build_layout(np.arange(6), shape))
    torch.testing.assert_close(short, model(padded, build_layout(np.arange(9), shape)))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 50), st.integers(0, 9))
@settings(max_examples=25)
def test_relativity(k: int, window: int, shift: int, seed: int) -> None:
    """Assumption 3.2 item 2: shifting all position IDs changes nothing."""
    shape = KeyShape(k, window if k > 1 else 1, "initial")
    model = random_model(shape, seed=seed)
    ids = np.sort(np.random.default_rng(seed).integers(12, size=6))
    tokens_RBL = torch.from_numpy(np.random.default_rng(seed).integers(3, size=(2, 3, 6)))
    here, shifted = build_layout(ids, shape), build_layout(ids + shift, shape)
    torch.testing.assert_close(model(tokens_RBL, here), model(tokens_RBL, shifted))


def test_one_place_is_blind_to_order_and_two_are_not() -> None:
    tokens = torch.tensor(list(permutations([0, 1, 2, 2])))
    tokens_RBL = tokens.expand(2, *tokens.shape)
    spread = []
    for k in (1, 2):
        shape = KeyShape(k, 3 if k > 1 else 1)
        probs_RBY = random_model(shape)(tokens_RBL, build_layout(np.arange(4), shape))
        spread.append(float((probs_RBY - probs_RBY[:, :1]).abs().max().detach()))
    assert spread[0] < 1e-12
    assert spread[1] > 0.01


def test_gradients_agree_with_finite_differences() -> None:
    shape = KeyShape(2, 2, "initial")
    model = random_model(shape, replicas=1)
    layout = build_layout(np.arange(5), shape)
    tokens_RBL = torch.from_numpy(np.random.default_rng(0).integers(3, size=(1, 3, 5)))

    def probabilities(log_key: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        tables = {"log_key_RPC": log_key, "value_logits_RCY": values}
        return torch.func.functional_call(model, tables, (tokens_RBL, layout))

    inputs = (model.log_key_RPC, model.value_logits_RCY)
    assert torch.autograd.gradcheck(probabilities, inputs)
