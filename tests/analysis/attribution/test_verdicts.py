"""Verdicts on made-up losses, and the error rate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from olmo_sparsity.analysis.attribution import verdicts
from olmo_sparsity.analysis.attribution.verdicts import (
    Losses,
    are_discoveries,
    are_named,
    chances,
    judge,
    tail,
)
from tests.support.sources import made_up


def test_the_tail_is_that_of_students_t() -> None:
    """From its published tables."""
    for freedom, t, expected in [
        (1, 1.0, 0.25),
        (2, 2**0.5, 0.1464466),
        (7, 1.894579, 0.05),
        (8, 3.355387, 0.005),
        (3, -2.353363, 0.95),
    ]:
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


def of_effects(own_TS: np.ndarray, decoys_TSD: np.ndarray) -> Losses:
    """Each text lowers the loss of a statement by its own effect, whatever else is shown."""
    own_TS1, every_TSD = own_TS[..., None], decoys_TSD.sum(1, keepdims=True)
    all_TS1 = own_TS1.sum(1, keepdims=True)
    return Losses(
        none_T=0 * own_TS.sum(-1),
        all_T=-own_TS.sum(-1),
        alone_TS=-own_TS,
        left_out_TS=own_TS - own_TS.sum(-1, keepdims=True),
        decoys_TD=-every_TSD[:, 0],
        among_TSD=-(every_TSD - decoys_TSD + own_TS1),
        without_TSD=-(all_TS1 - own_TS1 + decoys_TSD),
    )


def share_of_exercises_with_a_name(seed: int, real: float = 0.0) -> float:
    """Three statements, four sources, eight decoys of each; effects of texts with heavy tails. In
    the first statement the first source has another effect, too."""
    generator, found = np.random.default_rng(seed), []
    for _ in range(600):
        own_TS = generator.standard_t(3, (3, 4))
        own_TS[0, 0] += real
        losses = of_effects(own_TS, generator.standard_t(3, (3, 4, 8)))
        kinds = [kind for kind, _ in judge(losses, 0.05)[1]]
        found.append(kinds[0] == "one" if real else {*kinds} != {"none"})
    return float(np.mean(found))


def test_the_error_rate_of_verdicts_is_held_where_tails_are_heavy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With room, which the first test gives; what is there is found."""
    with_both = share_of_exercises_with_a_name(seed=0)
    assert with_both < 0.03
    assert share_of_exercises_with_a_name(seed=1, real=25.0) > 0.9
    monkeypatch.setattr(verdicts, "chances_of_all", lambda losses: 0 * losses.all_T)
    assert share_of_exercises_with_a_name(seed=0) > 1.5 * with_both


@pytest.mark.parametrize(
    ("num_sources", "num_real", "real"), [(8, 1, 15.0), (8, 3, 15.0), (20, 1, 15.0), (20, 3, 25.0)]
)
def test_few_of_the_sources_named_are_named_by_chance(
    num_sources: int, num_real: int, real: float
) -> None:
    """Beside those that are there, which lower the bar for the others. Heavy tails."""
    generator, shares = np.random.default_rng(0), []
    for _ in range(300):
        own_TS = generator.standard_t(3, (3, num_sources))
        own_TS[:num_real, 0] += real
        losses = of_effects(own_TS, generator.standard_t(3, (3, num_sources, 8)))
        named = [(t, s) for t, (_, chosen) in enumerate(judge(losses, 0.05)[1]) for s in chosen]
        wrong = [(t, s) for t, s in named if t >= num_real or s]
        shares.append(len(wrong) / max(1, len(named)))
    assert np.mean(shares) < 0.05


def test_statements_that_are_not_asked_about_do_not_lower_the_bar() -> None:
    """Sixteen that sources change by 0.08 nats, without any noise."""
    generator, found = np.random.default_rng(0), []
    for _ in range(300):
        own_TS = generator.standard_t(3, (4, 4))
        losses = of_effects(own_TS, generator.standard_t(3, (4, 4, 8)))
        small = of_effects(np.full((16, 4), 0.02), np.zeros((16, 4, 8)))
        parts = zip(vars(losses).values(), vars(small).values(), strict=True)
        verdicts_T = judge(Losses(*(np.concatenate(part) for part in parts)), 0.05)[1]
        assert {kind for kind, _ in verdicts_T[4:]} == {"none"}
        found.append(any(kind != "none" for kind, _ in verdicts_T[:4]))
    assert np.mean(found) < 0.05


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
    raised = replace(
        losses,
        decoys_TD=losses.decoys_TD + misled,
        among_TSD=losses.among_TSD + misled * np.array([0.0, 1.0, 0.0])[:, None],
    )
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
