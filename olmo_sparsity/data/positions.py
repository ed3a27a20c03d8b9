"""Draw position IDs: contiguous, PoSE and randomized. Pure functions of a generator, no torch.

Place in the flow: token shards + **positions** → batches. A model never computes a position ID.

A draw is seeded by (run seed, epoch, sequence index), so the IDs of a sequence do not depend on the
number of processes or on resuming, and differ between epochs.

Dimension key: L length, T target length (IDs are below it), C number of chunks.
"""

from __future__ import annotations

import numpy as np

from olmo_sparsity.config.text import PositionsConfig


def draw_positions(
    config: PositionsConfig,
    length: int,
    *,
    seed: int,
    epoch: int,
    index: int,
    documents_L: np.ndarray | None = None,
) -> np.ndarray:
    """positions_L for one training sequence, int64, strictly increasing: in the sequence, or, if
    documents' numbers are given, in each of them."""
    generator = np.random.default_rng([seed, epoch, index])
    if documents_L is None:
        return _draw(config, length, generator)
    lengths = np.bincount(documents_L)
    return np.concatenate([_draw(config, int(length), generator) for length in lengths])


def _draw(config: PositionsConfig, length: int, generator: np.random.Generator) -> np.ndarray:
    if config.scheme == "contiguous":
        return np.arange(length)
    target = config.target_length
    assert target is not None
    if config.scheme == "randomized":
        return randomized(generator, length, target)
    return pose(generator, length, target, num_chunks=min(config.num_chunks, max(length, 1)))


def restart(documents_BL: np.ndarray) -> np.ndarray:
    """positions_BL that begin at 0 in each document."""
    places_BL = np.broadcast_to(np.arange(documents_BL.shape[1]), documents_BL.shape)
    begins_BL = np.diff(documents_BL, axis=1, prepend=-1) != 0
    return places_BL - np.maximum.accumulate(places_BL * begins_BL, axis=1)


def randomized(generator: np.random.Generator, length: int, target: int) -> np.ndarray:
    """A sorted sample without replacement (Ruoss et al. 2023)."""
    return np.sort(generator.choice(target, size=length, replace=False))


def pose(
    generator: np.random.Generator, length: int, target: int, *, num_chunks: int = 2
) -> np.ndarray:
    """Positional skip-wise training (PoSE, Zhu et al. 2023): C runs of consecutive IDs below T.

    The numbers of `pose_batch`, without its arrays, which take several times as long for one
    sequence.
    """
    longest = max(1, (length + 1) // num_chunks)
    sizes = generator.integers(1, longest + 1, num_chunks - 1).tolist()
    positions_L, start, skip = np.arange(length), 0, 0
    for size in sizes:
        start, skipped = start + size, skip
        skip = int(generator.integers(skip, target - length + 1))
        positions_L[start:] += skip - skipped
    return positions_L


# --- batches, for tasks that draw millions of short sequences -------------------------------------


def contiguous_batch(num_sequences: int, length: int) -> np.ndarray:
    return np.tile(np.arange(length), (num_sequences, 1))


def randomized_batch(
    generator: np.random.Generator, num_sequences: int, length: int, target: int
) -> np.ndarray:
    """`randomized` for B sequences: positions_BL."""
    keys_BT = generator.random((num_sequences, target), dtype=np.float32)
    return np.sort(keys_BT.argsort(1)[:, :length], axis=1)


def uniform_pose_batch(
    generator: np.random.Generator,
    num_sequences: int,
    length: int,
    target: int,
    *,
    num_chunks: int,
    unit: int = 1,
) -> np.ndarray:
    """A variant of PoSE for B sequences: positions_BL. Cuts are uniform, total skips uniform and
    sorted, and the first chunk is skipped too. Cuts fall only between units of `unit` tokens; if
    there are fewer such places than cuts, all of them are cut."""
    places = np.arange(unit, length, unit)
    num_cuts = min(num_chunks - 1, len(places))
    keys_BP = generator.random((num_sequences, len(places)), dtype=np.float32)
    starts_chunk_BL = np.zeros((num_sequences, length), dtype=np.int64)
    np.put_along_axis(starts_chunk_BL, places[keys_BP.argsort(1)[:, :num_cuts]], 1, axis=1)
    skips_BC = np.sort(generator.integers(0, target - length + 1, (num_sequences, num_cuts + 1)))
    return np.arange(length) + np.take_along_axis(skips_BC, starts_chunk_BL.cumsum(1), axis=1)


def pose_batch(
    generator: np.random.Generator,
    num_sequences: int,
    length: int,
    target: int,
    *,
    num_chunks: int,
) -> np.ndarray:
    """`pose` for B sequences: positions_BL.

    The published sampler: the first chunk starts at 0. Each but the last is U{1 ... (L+1)//C} long,
    and each total skip is uniform between the previous chunk's and T-L.
    """
    longest = max(1, (length + 1) // num_chunks)
    cuts_BC = generator.integers(1, longest + 1, (num_sequences, num_chunks - 1)).cumsum(1)
    skips_BC = np.zeros((num_sequences, num_chunks), dtype=np.int64)
    for chunk in range(1, num_chunks):
        skips_BC[:, chunk] = generator.integers(skips_BC[:, chunk - 1], target - length + 1)
    chunks_BL = (np.arange(length) >= cuts_BC[:, :, None]).sum(1)
    return np.arange(length) + np.take_along_axis(skips_BC, chunks_BL, axis=1)


def spread_ids(ids_BL: np.ndarray, positions_BM: np.ndarray) -> np.ndarray:
    """Map coupled IDs 1 … M to an increasing sequence of M position IDs: tokens with equal IDs
    keep equal ones."""
    return np.take_along_axis(positions_BM, ids_BL - 1, axis=1)
