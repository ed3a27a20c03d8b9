"""Draw the position IDs of training sequences: L tokens with IDs below T, which may be larger.

    contiguous   0 1 2 3 4 5 6 7
    PoSE         0 1 2 3 | 9 10 11 12          chunks of consecutive IDs, with skips between them
    randomized   0 2 3 7 8 11 12 14            a sorted sample of all IDs

(L = 8 tokens, T = 16 position IDs, 2 chunks.) A draw is seeded by (run seed, epoch, sequence
index). So the IDs of a sequence depend neither on the number of processes nor on where a run was
resumed, and differ between epochs. Nothing here needs torch.

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
    """Return positions_L of one training sequence, int64, which rise strictly.

    Args:
        config: How they are drawn.
        seed, epoch, index: The run's seed, the epoch, and the index of the sequence in the text.
        documents_L: The number of each token's document. Each document then has a draw of its own,
            and IDs rise strictly within it.
    """
    generator = np.random.default_rng([seed, epoch, index])
    if documents_L is None:
        return _draw(config, length, generator)
    # Documents are numbered from 0 in the order of their tokens, so lengths are in this order, too.
    document_lengths = np.bincount(documents_L)
    return np.concatenate([_draw(config, int(length), generator) for length in document_lengths])


def _draw(config: PositionsConfig, length: int, generator: np.random.Generator) -> np.ndarray:
    """Return the position IDs of `length` tokens, drawn as the config says."""
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
    """Return positions_BL that count from 0 in each document, by the number of each token's
    document: documents 0 0 0 1 1 get the position IDs 0 1 2 0 1."""
    indices_BL = np.broadcast_to(np.arange(documents_BL.shape[1]), documents_BL.shape)
    begins_document_BL = np.diff(documents_BL, axis=1, prepend=-1) != 0
    # The index at which each token's document begins: the largest so far, as indices rise.
    document_starts_BL = np.maximum.accumulate(indices_BL * begins_document_BL, axis=1)
    return indices_BL - document_starts_BL


def randomized(generator: np.random.Generator, length: int, target: int) -> np.ndarray:
    """Return a sorted sample of the IDs below `target`, without replacement (Ruoss et al. 2023)."""
    return np.sort(generator.choice(target, size=length, replace=False))


def pose(
    generator: np.random.Generator, length: int, target: int, *, num_chunks: int
) -> np.ndarray:
    """Return positions_L for positional skip-wise training (PoSE, Zhu et al. 2023): C chunks of
    consecutive IDs below T.

    Token i of chunk c has the ID i + skip_c, with 0 = skip_1 ≤ skip_2 ≤ … ≤ skip_C ≤ T − L, so that
    the last ID stays below T. As in the published sampler, the size of each chunk but the last is
    uniform in 1 … (L + 1) // C, and skip_c is uniform in skip_(c−1) … T − L."""
    max_size = max(1, (length + 1) // num_chunks)
    sizes = generator.integers(1, max_size + 1, num_chunks - 1).tolist()
    positions_L = np.arange(length)
    chunk_start = 0
    total_skip = 0
    # A size is that of the chunk before the one whose skip is drawn here.
    for size in sizes:
        chunk_start += size
        previous_skip = total_skip
        total_skip = int(generator.integers(previous_skip, target - length + 1))
        # All later tokens move up; the chunks after this one add to their skip.
        positions_L[chunk_start:] += total_skip - previous_skip
    return positions_L
