"""The bounds: their arithmetic, and what they refuse."""

import math
from functools import partial

import pytest

from olmo_sparsity.base.errors import ConfigError
from study.theory.bounds import Lengths, improved_bound, stated_bound

GOOD = Lengths(train=16, test=64, local=4)


improved = partial(improved_bound, uniform_placement=True)


def test_arithmetic() -> None:
    assert stated_bound(GOOD, 1e-6, 2.0, 3.0) == pytest.approx(2 * 3 * 16 * 64**2 * 1e-6)
    assert improved(GOOD, 0.01) == pytest.approx(16 * 0.01)


def test_the_improved_bound_does_not_grow_with_the_training_length() -> None:
    assert len({improved(Lengths(n, 8 * n, n // 4), 0.01) for n in (16, 64, 256)}) == 1


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ((16, 64, 5), r"L_local=5 exceeds L/4=4.*at least 20"),
        ((16, 15, 4), "below L=16"),
        ((0, 15, 4), "at least 1"),
    ],
)
def test_lengths_that_the_theorem_does_not_cover(lengths: tuple[int, int, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Lengths(*lengths)


@pytest.mark.parametrize("risk", [-0.1, 1.1, math.nan])
def test_a_risk_is_a_probability(risk: float) -> None:
    with pytest.raises(ConfigError, match="must lie in"):
        stated_bound(GOOD, risk, 1, 1)
    with pytest.raises(ConfigError, match="must lie in"):
        improved(GOOD, risk)


@pytest.mark.parametrize("eta", [0.5, math.inf, math.nan])
def test_an_irregular_law_has_no_stated_bound(eta: float) -> None:
    with pytest.raises(ConfigError, match=r"η_L̄.*Assumption 4.2"):
        stated_bound(GOOD, 0.1, 1, eta)
    with pytest.raises(ConfigError, match=r"Remark C.1"):
        improved_bound(GOOD, 0.1, uniform_placement=False)
