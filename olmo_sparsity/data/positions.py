"""Draw position IDs: contiguous, PoSE and randomized. Pure functions of a generator, no torch.

A draw is seeded by (run seed, epoch, sequence index), so the IDs of a sequence depend neither on
the number of processes nor on where a run was resumed, and differ between epochs.

Dimension key: B batch, L length, T target length (IDs are below it), C number of chunks.
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
    """Return positions_L of one training sequence, int64. They rise strictly within the sequence,
    or, with `documents_L` (the number of each token's document), within each document."""
    generator = np.random.default_rng([seed, epoch, index])
    if documents_L is None:
        return _draw(config, length, generator)
    document_lengths = np.bincount(documents_L)
    return np.concatenate([_draw(config, int(length), generator) for length in document_lengths])


def _draw(config: PositionsConfig, length: int, generator: np.random.Generator) -> np.ndarray:
    if config.scheme == "contiguous":
        return np.arange(length)
    target = config.target_length
    assert target is not None, "the config requires it for these schemes"
    if config.scheme == "randomized":
        return randomized(generator, length, target)
    # A short document has fewer tokens than chunks are configured.
    num_chunks = min(config.num_chunks, max(length, 1))
    return pose(generator, length, target, num_chunks=num_chunks)


def restart(documents_BL: np.ndarray) -> np.ndarray:
    """Return positions_BL that begin at 0 in each document."""
    places_BL = np.broadcast_to(np.arange(documents_BL.shape[1]), documents_BL.shape)
    begins_document_BL = np.diff(documents_BL, axis=1, prepend=-1) != 0
    # The place of the last beginning at or before each token: places rise, so it is the largest.
    document_starts_BL = np.maximum.accumulate(places_BL * begins_document_BL, axis=1)
    return places_BL - document_starts_BL


def randomized(generator: np.random.Generator, length: int, target: int) -> np.ndarray:
    """Draw a sorted sample of the IDs below `target`, without replacement (Ruoss et al. 2023)."""
    return np.sort(generator.choice(target, size=length, replace=False))


def pose(
    generator: np.random.Generator, length: int, target: int, *, num_chunks: int
) -> np.ndarray:
    """Draw positions for positional skip-wise training (PoSE, Zhu et al. 2023): C chunks of
    consecutive IDs below T.

    The published sampler: the first chunk begins at 0. Each chunk but the last has 1 to
    (L + 1) // C tokens, uniformly. The total skip before a chunk is uniform between that of the
    chunk before and T − L, so that the last ID stays below T."""
    longest = max(1, (length + 1) // num_chunks)
    sizes = generator.integers(1, longest + 1, num_chunks - 1).tolist()
    positions_L = np.arange(length)
    chunk_start = 0
    total_skip = 0
    # Each chunk of a drawn size is followed by one that skips further ahead.
    for size in sizes:
        chunk_start += size
        previous_skip = total_skip
        total_skip = int(generator.integers(previous_skip, target - length + 1))
        # All later tokens move up; the chunks after this one add to it.
        positions_L[chunk_start:] += total_skip - previous_skip
    return positions_L
