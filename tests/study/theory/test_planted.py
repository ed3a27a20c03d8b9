"""Planted distributions: sampling is enumeration, locality and regularity are what they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_sparsity.base.errors import ConfigError
from study.theory import planted as P
from tests.study.theory.support import enumerate_strings, explicit_law, parity


def planted(tokens: tuple, background: list[float]) -> P.Planted:
    return P.Planted(P.uniform_subsets(1), *tokens, np.array(background))


LAWS = {
    "local": P.translated_shapes([(0, 1), (0, 2)], [0.25, 0.75]),
    "anywhere": P.uniform_subsets(2),
    "one": P.uniform_subsets(1),
    "three": P.uniform_subsets(3),
    "explicit": explicit_law({4: {(0, 1): 0.1, (0, 3): 0.6, (2, 3): 0.3}}),
}


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("name", LAWS)
def test_sampling_matches_enumeration(name: str, coupled: bool) -> None:
    data = parity(LAWS[name], coupled=coupled)
    tokens_XL, labels_X, mass_X = enumerate_strings(data, 4)
    assert mass_X.sum() == pytest.approx(1, abs=1e-12)

    num_strings = 20_000
    sample = data.sample(4, num_strings, np.random.default_rng(0))
    powers = 3 ** np.arange(4)
    cells = {key: i for i, key in enumerate(zip(tokens_XL @ powers, labels_X, strict=True))}
    drawn = zip(sample.in_id_order() @ powers, sample.labels_B, strict=True)
    seen_X = np.bincount([cells[key] for key in drawn], minlength=len(cells))

    # Cells that expect fewer than five strings are counted as one, as the test asks.
    expected_X = mass_X * num_strings
    rare_X = expected_X < 5
    expected = np.append(expected_X[~rare_X], expected_X[rare_X].sum() or 1e-9)
    seen = np.append(seen_X[~rare_X], seen_X[rare_X].sum())
    statistic = ((seen - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Chi-square at four standard deviations: one run in 30,000 would fail by chance.
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@given(st.integers(1, 3), st.integers(4, 20), st.integers(0, 99))
@settings(max_examples=30)
def test_coupled_ids_bring_the_planted_tokens_together(k: int, length: int, seed: int) -> None:
    data = parity(P.uniform_subsets(k), coupled=True)
    sample = data.sample(length, 20, np.random.default_rng(seed))
    planted_ids = np.take_along_axis(sample.ids_BL, sample.places_BJ, axis=1)
    assert (planted_ids == planted_ids[:, :1]).all()
    # Nothing else tells the planted tokens apart: sorted, the IDs of all strings are the same,
    # and every ID but perhaps the last is shared by k tokens.
    assert (np.sort(sample.ids_BL, axis=1) == data.ids(length)).all()
    assert (np.bincount(data.ids(length))[: length // k] == k).all()


@given(st.integers(1, 3), st.integers(3, 6), st.integers(6, 30))
@settings(max_examples=30)
def test_locality_is_the_widest_planted_span(k: int, span: int, length: int) -> None:
    law = P.translated_shapes(P.shapes_within(k, span))
    assert P.locality(law, [length]) == (span if k > 1 else 1)
    assert P.locality(P.uniform_subsets(k), [length]) == (length if k > 1 else 1)


@given(
    st.lists(st.floats(0.05, 1), min_size=3, max_size=3),
    st.integers(4, 5),
    st.integers(0, 3),
    st.integers(16, 24),
)
@settings(max_examples=30)
def test_regularity_has_its_closed_form(
    weights: list[float], span: int, more: int, length: int
) -> None:
    """Remark C.1 as we read it: exact η equals the closed form, and is at most L."""
    total = sum(weights)
    shapes = [(0, 1), (0, 2), (0, span - 1)]
    law = P.translated_shapes(shapes, [w / total for w in weights])
    exact = P.regularity(law, length, span + more)
    # A shape of this span has length − span + 1 places, and the shortest strings are twice as long
    # as the local span.
    assert exact == pytest.approx((length - span + 1) / (2 * (span + more) - span + 1))
    assert 1 <= exact <= length


def test_regularity_by_brute_force() -> None:
    tables = {}
    rng = np.random.default_rng(3)
    for length in range(4, 8):
        mass = rng.dirichlet(np.ones(length - 1))
        tables[length] = {(i, i + 1): mass[i] for i in range(length - 1)}
    law = explicit_law(tables)
    expected = max(
        max(a / b, b / a)
        for shorter in range(4, 8)
        for a in tables[7].values()
        for b in tables[shorter].values()
    )
    assert P.regularity(law, 7, 2) == pytest.approx(expected)


def test_a_place_that_longer_strings_never_use_is_irregular() -> None:
    """Always the last pair: no place of one length is like that of another."""
    law = explicit_law({n: {(n - 2, n - 1): 1.0} for n in range(4, 9)})
    assert P.regularity(law, 8, 2) == math.inf


def test_every_shape_is_listed_once() -> None:
    assert P.shapes_within(3, 4) == [(0, 1, 2), (0, 1, 3), (0, 2, 3)]
    places_NJ, mass_N = P.uniform_subsets(2).table(5)
    assert [tuple(p) for p in places_NJ] == list(combinations(range(5), 2))
    assert mass_N.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: P.translated_shapes([(0, 1)], [0.9]),
        lambda: P.translated_shapes([(0, 1), (0, 2)], [1.5, -0.5]),
        lambda: P.translated_shapes([(1, 2)], [1.0]),
        lambda: P.translated_shapes([(0, 1), (0, 1)], [0.5, 0.5]),
        lambda: P.translated_shapes([(0, 9)], [1.0]).table(5),
        lambda: explicit_law({4: {(0, 1): 0.7}}).table(4),
        lambda: explicit_law({4: {(0, 5): 1.0}}).table(4),
        lambda: explicit_law({4: {(1, 0): 1.0}}).table(4),
        lambda: P.uniform_subsets(5).table(4),
        lambda: P.uniform_subsets(4).table(2000),
        lambda: parity(P.uniform_subsets(2), rate=1.2),
        lambda: P.shapes_within(3, 2),
        lambda: P.regularity(P.uniform_subsets(1), 5, 3),
        lambda: planted(P.parity_tokens(2), [1.0, 0.0, 0.0]),
        lambda: planted(P.parity_tokens(1), [0.5, 0.5]),
        lambda: planted(P.parity_tokens(1), [0.9, 0.05, 0]),
    ],
)
def test_bad_input_is_refused(build: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        build()
