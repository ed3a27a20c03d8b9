"""The sparse functional attention class: relative, differentiable; its risks agree three ways."""

import math
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_sparsity.errors import ConfigError
from olmo_sparsity.theory import planted as P
from olmo_sparsity.theory.learning import learn, training_lengths
from olmo_sparsity.theory.risks import (
    can_transfer,
    enumerated_risk,
    sampled_risk,
    transfer_risk,
    transfer_risk_of,
)
from olmo_sparsity.theory.settings import LearningConfig
from olmo_sparsity.theory.sparse_attention import (
    PAD,
    KeyShape,
    SparseAttention,
    build_layout,
)
from tests.test_theory_planted import explicit_law, parity


def random_model(shape: KeyShape, *, seed: int = 0, replicas: int = 2) -> SparseAttention:
    generator = torch.Generator().manual_seed(seed)
    model = SparseAttention(shape, vocab_size=3, num_labels=2, num_replicas=replicas).double()
    with torch.no_grad():
        model.log_key_RPC.normal_(0, 2, generator=generator)
        model.value_logits_RCY.normal_(0, 2, generator=generator)
    return model


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
            if shape.far == "zero":
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
    long = model(padded, build_layout(np.arange(9), shape))
    torch.testing.assert_close(short, long)


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


def test_the_gradient_of_the_exact_risk_agrees_with_finite_differences() -> None:
    data = local_data(2, span=2)
    model = random_model(KeyShape(2, 2), replicas=1)

    def risk(log_key: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return transfer_risk_of(log_key[0], values.softmax(-1)[0], model, data, 5)

    assert torch.autograd.gradcheck(risk, (model.log_key_RPC, model.value_logits_RCY), atol=1e-5)


# --- risks ----------------------------------------------------------------------------------------


def local_data(k: int, span: int, rate: float = 0.3) -> P.Planted:
    return parity(P.translated_shapes(P.shapes_within(k, span)), rate=rate)


WIDE = explicit_law({6: {(0, 5): 0.5, (1, 2): 0.2, (2, 5): 0.3}})
"""Plants sets that are wider than the key."""


@pytest.mark.parametrize(
    ("data", "shape", "length"),
    [
        (local_data(1, 1), KeyShape(1, 1), 7),
        (local_data(2, 3), KeyShape(2, 3), 7),
        (local_data(3, 4), KeyShape(3, 4), 7),
        (local_data(2, 2), KeyShape(2, 2), 2),
        (P.Planted(WIDE, *P.order_tokens(), P.marker_background(0.4)), KeyShape(2, 3), 6),
    ],
)
def test_transfer_equals_enumeration_of_all_strings(
    data: P.Planted, shape: KeyShape, length: int
) -> None:
    model = random_model(shape)
    exact = enumerated_risk(model, data, length)
    assert transfer_risk(model, data, length).mean_R == pytest.approx(exact.mean_R, abs=2e-6)


@pytest.mark.parametrize("coupled", [False, True])
def test_the_sampled_interval_covers_the_exact_risk(coupled: bool) -> None:
    data = parity(P.uniform_subsets(2), rate=0.2, coupled=coupled)
    seeds = list(range(40))
    model = random_model(KeyShape(2, 2, "initial"), replicas=1)
    one = enumerated_risk(model, data, 6).mean_R[0]
    many = SparseAttention(model.shape, 3, 2, len(seeds)).double()
    with torch.no_grad():
        many.log_key_RPC.copy_(model.log_key_RPC.expand_as(many.log_key_RPC))
        many.value_logits_RCY.copy_(model.value_logits_RCY.expand_as(many.value_logits_RCY))
    sampled = sampled_risk(many, data, 6, 400, seeds)
    covered = ((sampled.low_R <= one) & (one <= sampled.high_R)).mean()
    assert covered >= 0.85  # 95% expected; below 0.85 once in 300 for 40 seeds


def parity_solver(k: int, window: int, *, relative: bool = True) -> SparseAttention:
    """Key 1 on markers only, value their XOR: the hypothesis that makes no mistake."""
    model = SparseAttention(KeyShape(k, window, relative=relative), 3, 2, 1).double()
    with torch.no_grad():
        model.log_key_RPC.fill_(-math.inf)
        for code, tokens in enumerate(np.ndindex(*([3] * k))):
            if min(tokens) > 0:
                model.log_key_RPC[..., code] = 0
                wrong = 1 - (sum(tokens) - k) % 2
                model.value_logits_RCY[..., code, wrong] = -math.inf
    return model


@pytest.mark.parametrize("k", [1, 2, 3])
def test_zero_risk_stays_zero_when_the_assumptions_hold(k: int) -> None:
    data = local_data(k, span=4 if k > 1 else 1, rate=0.0)
    model = parity_solver(k, 4 if k > 1 else 1)
    for length in (*training_lengths(16), 32, 128):
        assert sampled_risk(model, data, length, 300, [0]).mean_R[0] == 0


@pytest.mark.parametrize("k", [2, 3])
def test_zero_risk_is_lost_without_locality_and_kept_with_coupled_positions(k: int) -> None:
    apart = parity(P.uniform_subsets(k), rate=0)
    # Faultless wherever training looks, and zero beyond: training cannot tell it from the truth.
    model = parity_solver(k, 16)
    assert max(sampled_risk(model, apart, n, 200, [0]).mean_R[0] for n in training_lengths(16)) == 0
    assert sampled_risk(model, apart, 128, 200, [0]).mean_R[0] > 0.3

    together = parity(P.uniform_subsets(k), rate=0, coupled=True)
    model = parity_solver(k, 1)
    for length in (8, 16, 128):
        assert sampled_risk(model, together, length, 200, [0]).mean_R[0] == 0


def test_order_is_beyond_every_hypothesis_of_one_place() -> None:
    """Both labels give the same bag of tokens, so the risk is one half whatever was learned."""
    data = P.Planted(P.translated_shapes([(0, 1)]), *P.order_tokens(), P.marker_background(0.2))
    for seed in range(3):
        risk = enumerated_risk(random_model(KeyShape(1, 1), seed=seed), data, 5)
        assert risk.mean_R == pytest.approx(0.5, abs=1e-12)


# --- learning -------------------------------------------------------------------------------------


def test_learning_finds_the_planted_pair_and_seeds_do_not_share() -> None:
    data, shape = local_data(2, 2, rate=0.01), KeyShape(2, 2)
    config = LearningConfig(num_steps=120, batch_per_length=16)
    both = learn(data, shape, 8, "mixture", config, [3, 4])
    alone = learn(data, shape, 8, "mixture", config, [4])
    # Sums over a longer batch round differently, and Adam carries that on.
    between_runs = (both.log_key_RPC[1] - alone.log_key_RPC[0]).abs().max()
    between_seeds = (both.log_key_RPC[1] - both.log_key_RPC[0]).abs().max()
    assert between_runs < 0.03 < between_seeds
    assert transfer_risk(both, data, 8).mean_R.max() < 0.05


def test_minimax_lowers_the_worst_length() -> None:
    data = parity(P.drifting_shapes([(0, 1), (0, 2)], switch_length=8, rare=0.05), rate=0.1)
    worst = {}
    for objective in ("mixture", "minimax"):
        model = learn(data, KeyShape(2, 3), 8, objective, LearningConfig(num_steps=200), [0])
        worst[objective] = max(transfer_risk(model, data, n).mean_R[0] for n in range(4, 9))
    assert worst["minimax"] < 0.85 * worst["mixture"]


# --- refusals -------------------------------------------------------------------------------------


def test_what_cannot_be_enumerated_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"166,167,000 subsets.*GiB.*local key"):
        build_layout(np.arange(1000), KeyShape(3, 10, "initial"))
    with pytest.raises(ConfigError, match="at least 3, not 2"):
        build_layout(np.arange(2), KeyShape(3, 2))
    with pytest.raises(ConfigError, match=r"key table.*GiB"):
        SparseAttention(KeyShape(4, 400), 3, 2, 1)
    wide, data = random_model(KeyShape(2, 12)), local_data(2, 2)
    assert not can_transfer(wide, data)
    with pytest.raises(ConfigError, match="sampled_risk"):
        transfer_risk(wide, data, 16)
