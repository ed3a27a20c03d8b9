"""Position IDs of whole batches: order, bounds, and the distributions of single sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from olmo_sparsity.data.positions import pose
from study.tasks.positions import (
    contiguous_batch,
    pose_batch,
    randomized_batch,
    uniform_pose_batch,
)


def test_pose_of_a_batch_is_distributed_as_of_single_sequences() -> None:
    batch_BL = pose_batch(np.random.default_rng(0), 4000, 12, 40, num_chunks=3)
    generator = np.random.default_rng(1)
    single_BL = np.array([pose(generator, 12, 40, num_chunks=3) for _ in range(4000)])
    np.testing.assert_allclose(batch_BL.mean(0), single_BL.mean(0), atol=1)
    np.testing.assert_allclose(batch_BL.std(0)[1:], single_BL.std(0)[1:], rtol=0.1)


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
