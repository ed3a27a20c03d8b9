"""Tokens and position IDs under each scheme."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_sparsity.data.positions import pose
from study.tasks.parity import ScratchpadParity, SparseParity
from study.tasks.samples import Samples
from study.tasks.schemes import (
    SCHEMES,
    Placed,
    PositionSettings,
    Sizes,
    place,
    pose_batch,
    uniform_pose_batch,
)
from study.tasks.variable_assignment import VariableAssignment


def ids(scheme: str, samples: Samples, *, training: bool, **given: Any) -> np.ndarray:
    return placed(scheme, samples, training=training, **given).ids_BL


def placed(scheme: str, samples: Samples, *, training: bool, **given: Any) -> Placed:
    sizes, generator = Sizes(64, 3, 32), np.random.default_rng(0)
    return place(scheme, samples, generator, PositionSettings(**given), sizes, training=training)


def cut_places(scheme: str, samples: Samples, num_places: int, *, aligned: bool) -> set[int]:
    """Which of the first places have an ID that is not one more than that before."""
    drawn_BL = ids(scheme, samples, training=True, num_chunks=5, aligned_cuts=aligned)
    assert (np.diff(drawn_BL[:, :num_places]) > 1).sum(1).max() == 4
    return set(np.nonzero(np.diff(drawn_BL[:, :num_places]) > 1)[1] + 1)


def test_at_test_ids_are_counted_or_the_tasks_own() -> None:
    samples = ScratchpadParity().sample(np.random.default_rng(0), 20, 9)
    given_BL = np.concatenate((samples.prompt_ids_BP, samples.response_ids_BR), axis=1)
    for scheme in set(SCHEMES) - {"randomized", "auxiliary", "pointers"}:
        wanted_BL = given_BL if scheme in ("coupled", "ppc") else np.tile(np.arange(19), (20, 1))
        np.testing.assert_array_equal(ids(scheme, samples, training=False), wanted_BL)
    random_BL = ids("randomized", samples, training=False)
    assert (np.diff(random_BL) > 0).all()
    assert len(np.unique(random_BL, axis=0)) == 20


def test_aligned_cuts_leave_units_together() -> None:
    pairs = SparseParity().sample(np.random.default_rng(0), 4000, 20)
    assert cut_places("pose", pairs, 21, aligned=False) == set(range(1, 21))
    assert cut_places("pose", pairs, 21, aligned=True) == set(range(2, 21, 2))
    statements = VariableAssignment().sample(np.random.default_rng(0), 500, 6)
    # The IDs of a prompt count its places.
    assert cut_places("ppc", statements, 14, aligned=False) == set(range(1, 14))
    assert cut_places("ppc", statements, 14, aligned=True) == set(range(2, 14, 2))


def test_coupled_ids_are_spread_as_they_are_coupled() -> None:
    samples = ScratchpadParity().sample(np.random.default_rng(0), 3000, 9)
    spread_BL = ids("ppc", samples, training=True, num_chunks=3)
    bits_Bn, equals_B, response_Bn = spread_BL[:, :9], spread_BL[:, 9], spread_BL[:, 10:]
    np.testing.assert_array_equal(bits_Bn, response_Bn)
    assert (np.diff(bits_Bn) >= 1).all()
    assert (equals_B < bits_Bn[:, 0]).all()
    assert set(np.unique(spread_BL)) == set(range(64))


@pytest.mark.parametrize("training", [False, True])
def test_auxiliary_ids_are_those_of_the_coupled_prompt_token(training: bool) -> None:
    samples = ScratchpadParity().sample(np.random.default_rng(0), 200, 9)
    own, pose = (
        placed(scheme, samples, training=training, num_chunks=3) for scheme in ("auxiliary", "pose")
    )
    np.testing.assert_array_equal(own.ids_BL, pose.ids_BL)
    np.testing.assert_array_equal(own.target_ids_BL[:, 10:], own.ids_BL[:, :9])


def test_pointers_are_the_coupled_ids_as_tokens() -> None:
    samples = ScratchpadParity().sample(np.random.default_rng(0), 200, 9)
    for training in (False, True):
        drawn = placed("pointers", samples, training=training, num_chunks=3)
        assert drawn.num_prompt == 20
        labels_BL = drawn.tokens_BL[:, ::2] - 3  # behind the task's three words
        np.testing.assert_array_equal(drawn.tokens_BL[:, 1:20:2], samples.prompt_BP)
        np.testing.assert_array_equal(drawn.tokens_BL[:, 21::2], samples.response_BR)
        np.testing.assert_array_equal(labels_BL[:, 10:], labels_BL[:, :9])
        assert (np.diff(labels_BL[:, :9]) >= 1).all()
        assert set(np.unique(labels_BL)) == set(range(32) if training else range(1, 11))
        np.testing.assert_array_equal(drawn.ids_BL[:, ::2], drawn.ids_BL[:, 1::2])
        assert (np.diff(drawn.ids_BL[:, ::2]) > 1).any() == training


def test_published_chunks_start_at_0_and_are_short() -> None:
    samples = SparseParity().sample(np.random.default_rng(0), 4000, 20)
    drawn_BL = ids("pose", samples, training=True, num_chunks=2, published=True)
    assert not drawn_BL[:, 0].any()
    cuts = np.nonzero(np.diff(drawn_BL) > 1)[1] + 1
    assert set(cuts) == set(range(1, 12))  # 21 tokens: at most 22 // 2 in the first chunk
    assert set(np.unique(drawn_BL)) == set(range(64))


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
