"""Draw position IDs: contiguous, PoSE and randomized. Pure functions of a generator, no torch.

A draw is seeded by (run seed, epoch, sequence index). Dimension key: L length, T target length (IDs
are below it), C number of chunks."""

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
    generator: np.random.Generator, length: int, target: int, *, num_chunks: int
) -> np.ndarray:
    """Positional skip-wise training (PoSE, Zhu et al. 2023): C runs of consecutive IDs below T. The
    first begins at 0. Each but the last has 1 to (L + 1) // C tokens, uniformly; the total skip
    before a run is uniform between that of the run before and T − L."""
    longest = max(1, (length + 1) // num_chunks)
    sizes = generator.integers(1, longest + 1, num_chunks - 1).tolist()
    positions_L, start, skip = np.arange(length), 0, 0
    for size in sizes:
        start, skipped = start + size, skip
        skip = int(generator.integers(skip, target - length + 1))
        positions_L[start:] += skip - skipped
    return positions_L
