"""Draw position IDs of whole batches, for tasks that draw millions of short sequences.

Dimension key: B batch, L length, T target length (IDs are below it), C chunks, P places of a cut,
M coupled IDs.
"""

from __future__ import annotations

import numpy as np


def contiguous_batch(num_sequences: int, length: int) -> np.ndarray:
    return np.tile(np.arange(length), (num_sequences, 1))


def randomized_batch(
    generator: np.random.Generator, num_sequences: int, length: int, target: int
) -> np.ndarray:
    """`randomized` of `olmo_sparsity.data.positions` for B sequences: positions_BL."""
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
    """`pose` of `olmo_sparsity.data.positions` for B sequences: positions_BL.

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
