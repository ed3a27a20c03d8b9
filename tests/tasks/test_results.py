"""Intervals of accuracies."""

from __future__ import annotations

from olmo_sparsity.tasks.results import wilson


def test_wilson_is_the_textbook_interval() -> None:
    low, high = wilson(0.5, 100)
    assert (round(low, 4), round(high, 4)) == (0.4038, 0.5962)
    assert wilson(1.0, 500)[1] == 1.0
    assert wilson(0.0, 500)[0] == 0.0
    assert 0.99 < wilson(1.0, 500)[0] < 1.0
