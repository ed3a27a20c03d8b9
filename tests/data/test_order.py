"""Orders of an epoch that are computed: each sequence once, in no visible pattern."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.data.order import (
    MAX_STORED,
    MAX_STORED_BY_AUTO,
    ComputedOrder,
    choose_order,
    order_epoch,
    stored_order,
)


@given(st.integers(1, 1500), st.integers(0, 2**40), st.integers(0, 100))
def test_a_computed_order_has_each_sequence_once(size: int, seed: int, epoch: int) -> None:
    order = ComputedOrder(size, seed, epoch)
    assert sorted(order[place] for place in range(size)) == list(range(size))


def test_a_computed_order_is_as_mixed_as_a_shuffled_one() -> None:
    """Neighbours are unrelated, every place is as likely, and seeds and epochs differ."""
    size = 20_000
    numbers = np.array([ComputedOrder(size, 3, 0)[place] for place in range(size)])
    expected = 1 / np.sqrt(size)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 * expected
    assert abs(np.corrcoef(numbers, np.arange(size))[0, 1]) < 4 * expected
    counts, *_ = np.histogram2d(numbers, np.arange(size), bins=10)
    # 100 cells of 200 numbers each: chi-squared with 81 degrees of freedom.
    assert ((counts - 200) ** 2 / 200).sum() < 140
    for seed, epoch in ((4, 0), (3, 1)):
        other = np.array([ComputedOrder(size, seed, epoch)[place] for place in range(size)])
        assert (other == numbers).sum() < 10


def test_a_computed_order_stays_what_it_was_for_runs_that_go_on() -> None:
    order = ComputedOrder(50_000_000, 3, 2)
    assert [order[place] for place in range(4)] == [40246393, 19528820, 18023006, 27878401]


def test_a_computed_order_refuses_a_place_beyond_its_end() -> None:
    for place in (-1, 7):
        with pytest.raises(IndexError):
            ComputedOrder(7, 0, 0)[place]


def test_auto_computes_what_would_take_much_memory() -> None:
    assert choose_order("auto", MAX_STORED_BY_AUTO) == "stored"
    assert choose_order("auto", MAX_STORED_BY_AUTO + 1) == "computed"
    assert choose_order("computed", 10) == "computed"
    assert choose_order("stored", MAX_STORED_BY_AUTO + 1) == "stored"
    with pytest.raises(ConfigError, match=r"data\.order=stored holds at most 4,294,967,296"):
        choose_order("stored", MAX_STORED + 1)
    assert list(order_epoch("stored", 9, 5, 1)) == list(stored_order(9, 5, 1))
    assert isinstance(order_epoch("computed", 9, 5, 1), ComputedOrder)
