"""Verdicts on made-up losses, and the error rate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.analysis.verdicts import are_discoveries, are_named, chances, judge, tail
from tests.support.sources import made_up


def test_the_tail_is_that_of_students_t() -> None:
    """From its published tables."""
    for freedom, t, expected in [(1, 1.0, 0.25), (2, 2**0.5, 0.1464466), (7, 1.894579, 0.05),
                                 (8, 3.355387, 0.005), (3, -2.353363, 0.95)]:  # fmt: skip
        assert tail(t, freedom) == pytest.approx(expected, abs=1e-6)


def test_the_error_rate_is_held_where_nothing_is_to_be_found() -> None:
    """Of sources like their decoys, few are found; one that stands out is."""
    generator, found, num = np.random.default_rng(0), 0, 400
    for _ in range(num):
        own, decoys = generator.normal(size=(3, 4, 1)), generator.normal(size=(3, 4, 8))
        found += are_discoveries(chances(own - decoys), 0.05).any()
    assert 0 < found / num < 0.08
    own[1, 3] = 30.0
    assert are_discoveries(chances(own - decoys), 0.05)[1, 3]


@pytest.mark.parametrize("num_real", [2, 3, 6])
def test_the_rate_is_that_of_sources_which_are_tested_twice(num_real: int) -> None:
    """Those that are there are found by both tests, the others by one and by chance."""
    generator, shares = np.random.default_rng(1), []
    for _ in range(4000):
        p_2TS = generator.random((2, 3, 8))
        p_2TS.reshape(2, -1)[:, :num_real] = 1e-12
        named = are_named(p_2TS, 0.05)
        shares.append(1 - num_real / named.sum())
    assert 0.02 < np.mean(shares) < 0.05


def test_what_misleads_is_capped() -> None:
    """Two of eight texts that mislead do not hide what a source gives."""
    losses = made_up([[4.0, 0.0, 3.9]], [[0.0, 0.0, 0.0]], gap=4.0)
    misled = np.where(np.arange(8) < 2, 12.0, 0.0)
    raised = replace(losses, decoys_TD=losses.decoys_TD + misled, among_TSD=losses.among_TSD
                     + misled * np.array([0.0, 1.0, 0.0])[:, None])  # fmt: skip
    assert raised.gap_T == pytest.approx(losses.gap_T)
    np.testing.assert_allclose(raised.gives_TSD[:, [0, 2]], losses.gives_TSD[:, [0, 2]], atol=1e-9)
    assert raised.gives_TSD[0, 1, :2].tolist() == [0.0, 0.0]
    assert judge(raised, 0.05)[1] == judge(losses, 0.05)[1] == [("either", [0, 2])]


@pytest.mark.parametrize(
    ("gives", "lost", "expected"),
    [
        ([8.0, 0.1, 0.0], [7.5, 0.0, 0.1], ("one", [0])),
        ([8.0, 7.9, 0.0], [0.0, 0.1, 0.1], ("either", [0, 1])),
        ([4.0, 0.0, 4.1], [3.9, 0.0, 4.0], ("both", [0, 2])),
        ([0.0, 0.1, 0.0], [0.0, 0.1, 0.05], ("none", [])),
        ([0.1, 0.0, 0.1], [8.0, 0.0, 8.0], ("both", [0, 2])),  # only together
        ([8.0, 7.0, 0.0], [3.0, 4.0, 0.0], ("either", [0, 1])),  # the others replace most of one
        ([5.0, 4.5, 0.0], [4.0, 4.1, 0.0], ("both", [0, 1])),
        ([8.0, 1.5, 0.0], [7.5, 1.0, 0.1], ("one", [0])),  # beyond its decoys, and too little
    ],
)
def test_verdicts(gives: list[float], lost: list[float], expected: Any) -> None:
    assert judge(made_up([gives], [lost]), 0.05)[1] == [expected]


def test_where_sources_give_nothing_no_source_is_named() -> None:
    assert judge(made_up([[0.09, 0.0]], [[0.09, 0.0]], gap=0.09), 0.05)[1] == [("none", [])]
