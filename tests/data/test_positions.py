"""Position IDs: order, bounds, coverage, and draws that depend on nothing but (seed, sequence)."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.data.positions import draw_positions, pose, randomized, restart


def law_of_pose(length: int, target: int, num_chunks: int) -> dict[tuple[int, ...], float]:
    """The probability of each draw, by the published definition: every choice of the sizes of all
    chunks but the last, and of the rising skips before them."""
    law: dict[tuple[int, ...], float] = {}
    sizes = range(1, max(1, (length + 1) // num_chunks) + 1)
    for chosen in product(sizes, repeat=num_chunks - 1):
        for skips in combinations_with_replacement(range(target - length + 1), num_chunks - 1):
            chance = len(sizes) ** (1.0 - num_chunks)
            for before in (0, *skips)[: num_chunks - 1]:
                chance /= target - length + 1 - before
            starts = np.cumsum(chosen)
            ids = tuple(n + (0, *skips)[(starts <= n).sum()] for n in range(length))
            law[ids] = law.get(ids, 0.0) + chance
    assert sum(law.values()) == pytest.approx(1)
    return law


@pytest.mark.parametrize(
    ("length", "target", "num_chunks"), [(5, 8, 2), (6, 8, 2), (6, 9, 3), (3, 5, 4), (4, 7, 1)]
)
def test_pose_has_the_published_distribution(length: int, target: int, num_chunks: int) -> None:
    law, draws, generator = law_of_pose(length, target, num_chunks), 6000, np.random.default_rng(0)
    found = Counter(
        tuple(pose(generator, length, target, num_chunks=num_chunks).tolist()) for _ in range(draws)
    )
    assert found.keys() == law.keys(), "every possible draw, and no other"
    for ids, chance in law.items():
        assert abs(found[ids] / draws - chance) < 5 * (chance * (1 - chance) / draws) ** 0.5 + 1e-9


def test_pose_draws_what_it_drew_for_runs_that_go_on() -> None:
    ids = pose(np.random.default_rng(5), 12, 30, num_chunks=4)
    assert ids.tolist() == [0, 1, 2, 18, 19, 20, 22, 24, 25, 26, 27, 28]


def test_randomized_is_every_sample_equally_often() -> None:
    generator, draws = np.random.default_rng(0), 6000
    found = Counter(tuple(randomized(generator, 3, 6).tolist()) for _ in range(draws))
    assert found.keys() == set(combinations(range(6), 3))
    assert max(abs(count / draws - 1 / 20) for count in found.values()) < 0.015


@pytest.mark.parametrize(("scheme", "most"), [("contiguous", 1), ("pose", 3), ("randomized", 99)])
def test_a_sequence_or_each_of_its_documents_has_ids_of_its_scheme(scheme: Any, most: int) -> None:
    target = None if scheme == "contiguous" else 90
    config = PositionsConfig(scheme=scheme, target_length=target, num_chunks=3)
    documents_L = np.repeat([0, 1, 2], [1, 30, 9])
    firsts, runs, largest = set(), set(), 0
    for index in range(300):
        ids = draw_positions(config, 40, seed=1, epoch=0, index=index, documents_L=documents_L)
        assert len(ids) == 40
        for number in range(3):
            own = ids[documents_L == number]
            assert (np.diff(own) >= 1).all()
            firsts.add(int(own[0]))
            runs.add(int((np.diff(own) > 1).sum()) + 1)
            largest = max(largest, int(own[-1]))
        whole = draw_positions(config, 40, seed=1, epoch=0, index=index)
        assert (np.diff(whole) >= 1).all()
        assert 39 <= whole[-1] < (target or 40)
    assert firsts == {0} if scheme != "randomized" else len(firsts) > 80
    assert max(runs) == most if scheme != "randomized" else max(runs) > 3
    assert largest == (89 if target else 29)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 4))
def test_positions_restart_in_each_document(lengths: list[int], num_rows: int) -> None:
    rows = [lengths[row:] + lengths[:row] for row in range(num_rows)]
    documents_BL = np.array([np.repeat(np.arange(len(row)), row) for row in rows])
    expected = [[place for length in row for place in range(length)] for row in rows]
    assert restart(documents_BL).tolist() == expected


def test_a_draw_depends_on_seed_epoch_and_index_alone() -> None:
    config = PositionsConfig(scheme="pose", target_length=1000, num_chunks=3)

    def draw(seed: int, epoch: int, index: int) -> tuple:
        return tuple(draw_positions(config, 50, seed=seed, epoch=epoch, index=index))

    forwards = [draw(1, 0, index) for index in range(20)]
    backwards = [draw(1, 0, index) for index in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert len({draw(1, 0, 5), draw(2, 0, 5), draw(1, 1, 5), draw(1, 0, 6)}) == 4
