"""Position IDs: order, bounds, coverage, and draws that depend on nothing but (seed, sequence)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_sparsity.config.text import PositionsConfig
from olmo_sparsity.data.positions import (
    contiguous_batch,
    draw_positions,
    pose,
    randomized,
    randomized_batch,
    uniform_pose_batch,
)


@given(
    length=st.integers(2, 60),
    room=st.integers(0, 100),
    chunks=st.integers(1, 60),
    seed=st.integers(0, 2**31),
)
def test_pose_rises_strictly_stays_below_target_and_has_its_chunks(
    length: int, room: int, chunks: int, seed: int
) -> None:
    chunks = min(chunks, length)
    ids = pose(np.random.default_rng(seed), length, length + room, num_chunks=chunks)
    assert len(ids) == length
    assert (np.diff(ids) >= 1).all()
    assert ids[0] == 0
    assert ids[-1] < length + room
    assert (np.diff(ids) > 1).sum() <= chunks - 1


@given(length=st.integers(1, 40), room=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_randomized_is_a_sorted_sample(length: int, room: int, seed: int) -> None:
    ids = randomized(np.random.default_rng(seed), length, length + room)
    assert (np.diff(ids) >= 1).all()
    assert 0 <= ids[0] <= ids[-1] < length + room


@pytest.mark.parametrize(("length", "chunks"), [(9, 2), (12, 4), (3, 5), (7, 1)])
def test_pose_is_the_published_sampler_draw_for_draw(length: int, chunks: int) -> None:
    """So that runs of earlier versions go on with the same IDs."""
    target = length + 6
    for seed in range(50):
        generator = np.random.default_rng(seed)
        cuts = generator.integers(1, max(1, (length + 1) // chunks) + 1, size=chunks - 1).cumsum()
        skips = [0]
        for _ in cuts:
            skips.append(int(generator.integers(skips[-1], target - length + 1)))
        expected = [place + skips[(cuts <= place).sum()] for place in range(length)]
        drawn = pose(np.random.default_rng(seed), length, target, num_chunks=chunks)
        assert drawn.tolist() == expected


def test_published_two_chunk_sampler_has_the_published_distribution() -> None:
    """First chunk length U{1 … (c+1)//2}, first offset 0, second offset U{0 … target − c}."""
    length, target, draws = 9, 13, 20_000
    generator = np.random.default_rng(0)
    first_lengths, skips = [], []
    for _ in range(draws):
        ids = pose(generator, length, target)
        skip = ids[-1] - (length - 1)
        skips.append(skip)
        if skip:
            first_lengths.append(int(np.argmax(np.diff(ids) > 1)) + 1)
    for values, expected in ((skips, range(target - length + 1)), (first_lengths, range(1, 6))):
        counts = np.array([values.count(value) for value in expected])
        assert counts.sum() == len(values), "nothing outside the published range"
        assert abs(counts / len(values) - 1 / len(expected)).max() < 0.015


@pytest.mark.parametrize("num_chunks", [2, 3, 5])
def test_every_position_is_covered(num_chunks: int) -> None:
    generator, seen = np.random.default_rng(1), set()
    for _ in range(3000):
        seen.update(pose(generator, 10, 40, num_chunks=num_chunks).tolist())
    assert seen == set(range(40))


def test_a_draw_depends_on_seed_epoch_and_index_alone() -> None:
    config = PositionsConfig(scheme="pose", target_length=1000, num_chunks=3)

    def draw(seed: int, epoch: int, index: int) -> tuple:
        return tuple(draw_positions(config, 50, seed=seed, epoch=epoch, index=index))

    forwards = [draw(1, 0, index) for index in range(20)]
    backwards = [draw(1, 0, index) for index in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert len({draw(1, 0, 5), draw(2, 0, 5), draw(1, 1, 5), draw(1, 0, 6)}) == 4


# --- whole batches ------------------------------------------------------------------------------


@given(
    length=st.integers(1, 40),
    room=st.integers(0, 60),
    chunks=st.integers(1, 45),
    unit=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_pose_of_a_batch_rises_strictly_and_is_cut_between_units(
    length: int, room: int, chunks: int, unit: int, seed: int
) -> None:
    ids_BL = uniform_pose_batch(
        np.random.default_rng(seed), 5, length, length + room, num_chunks=chunks, unit=unit
    )
    assert ids_BL.shape == (5, length)
    assert 0 <= ids_BL.min() <= ids_BL.max() < length + room
    steps = np.diff(ids_BL)
    assert (steps >= 1).all()
    assert ((steps > 1).sum(1) <= chunks - 1).all()
    cut_before = np.nonzero(steps > 1)[1] + 1
    assert (cut_before % unit == 0).all()


def test_randomized_and_contiguous_batches_are_their_single_ones() -> None:
    ids_BL = randomized_batch(np.random.default_rng(0), 3000, 4, 9)
    assert (np.diff(ids_BL) >= 1).all()
    counts = np.bincount(ids_BL.flatten(), minlength=9)
    assert abs(counts / counts.sum() - 1 / 9).max() < 0.01
    assert (contiguous_batch(2, 5) == np.arange(5)).all()


def test_uniform_pose_has_uniform_cuts_sorted_skips_and_an_offset() -> None:
    generator = np.random.default_rng(0)
    batch_BL = uniform_pose_batch(generator, 4000, 12, 40, num_chunks=3)
    single_BL = []
    for _ in range(4000):
        cuts = np.sort(generator.choice(11, size=2, replace=False)) + 1
        skips = np.sort(generator.integers(0, 29, size=3))
        single_BL.append(np.arange(12) + np.repeat(skips, np.diff([0, *cuts, 12])))
    assert set(batch_BL.flatten()) == set(range(40))
    # Mean and spread of every place's ID, and how often a chunk begins there.
    np.testing.assert_allclose(batch_BL.mean(0), np.mean(single_BL, 0), atol=1)
    np.testing.assert_allclose(batch_BL.std(0), np.std(single_BL, 0), rtol=0.08)
    np.testing.assert_allclose(
        (np.diff(batch_BL) > 1).mean(0), (np.diff(single_BL) > 1).mean(0), atol=0.05
    )
