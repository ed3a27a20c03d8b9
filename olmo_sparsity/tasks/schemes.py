"""Place samples under each scheme: the tokens a model reads, and their position IDs.

Place in the flow: samples → **schemes** (data/positions.py draws) → model.

    rope, nope, alibi   IDs counted from 0; the model rotates by them, ignores them, or subtracts
                        their distance
    pose                counted from 0 at test; in training cut into chunks that skip ahead, over
                        all IDs up to those of the longest test
    randomized          a sorted random sample of those IDs, in training and at test
    coupled, ppc        the task's own coupled IDs; in training spread like PoSE's chunks. Given for
                        the response as well (coupled), or predicted there (ppc)
    auxiliary           as ppc, but what is predicted is not fed back: the response's IDs are
                        counted on from the prompt's
    pointers            as pose, with the coupled IDs as text: a label before each token, which the
                        model writes as well

Dimension key: B samples, P prompt length, R response length, L = P + R.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.config import number
from olmo_sparsity.data.positions import (
    contiguous_batch,
    pose_batch,
    randomized_batch,
    spread_ids,
    uniform_pose_batch,
)
from olmo_sparsity.tasks.samples import Samples

PREDICTED = ("ppc", "auxiliary")
COUPLED = ("coupled", *PREDICTED)
CHUNKED = ("pose", *COUPLED, "pointers")
SPREAD = (*CHUNKED, "randomized")
"""Schemes whose training draws IDs up to those of the longest test."""

SCHEMES = ("rope", "nope", "alibi", *SPREAD)


@dataclass
class PositionSettings:
    num_ids: int | None = None
    """IDs are drawn below this. None: enough for the longest test."""

    num_chunks: int = number(4, 1)
    """Runs of consecutive IDs that a training sample is cut into (pose, coupled, ppc)."""

    aligned_cuts: bool = False
    """Whether cuts fall only between a task's units, such as pairs of a mark and its bit."""

    published: bool = False
    """Whether chunks are drawn as in the PoSE paper: the first starts at 0, and all but the last
    have at most (length + 1) // num_chunks tokens. Else cuts and skips are uniform, the first skip
    too."""


@dataclass(frozen=True)
class Sizes:
    """What a scheme needs of a model."""

    num_ids: int
    num_words: int
    num_labels: int = 0
    """Tokens behind the task's words (pointers)."""


@dataclass(frozen=True)
class Placed:
    tokens_BL: np.ndarray
    ids_BL: np.ndarray
    """Position IDs as they are fed, where they are given."""

    target_ids_BL: np.ndarray
    """Position IDs as they are to be predicted, where they are."""

    num_prompt: int


def place(
    scheme: str,
    samples: Samples,
    generator: np.random.Generator,
    settings: PositionSettings,
    sizes: Sizes,
    *,
    training: bool,
) -> Placed:
    tokens_BL = np.concatenate((samples.prompt_BP, samples.response_BR), axis=1)
    num_samples, num_prompt = samples.prompt_BP.shape
    unit = samples.unit

    def spread(num_ids: int, *ids: np.ndarray) -> list[np.ndarray]:
        """IDs from 1 on, spread in training over 0 … num_ids - 1, all alike."""
        if not training:
            return list(ids)
        positions_BM = _draw(
            generator, num_samples, max(int(i.max()) for i in ids), num_ids, settings, unit
        )
        return [spread_ids(i, positions_BM) for i in ids]

    if scheme == "pointers":
        (labels_BL,) = spread(sizes.num_labels, _coupled_ids(samples))
        tokens_BL = np.stack((sizes.num_words + labels_BL, tokens_BL), axis=2)
        tokens_BL = tokens_BL.reshape(num_samples, -1)
        num_prompt, unit = 2 * num_prompt, 2 * unit
    num_places = tokens_BL.shape[1]
    if scheme in COUPLED:
        target_ids_BL = ids_BL = _coupled_ids(samples)
        if scheme == "auxiliary":
            counted_BL = ids_BL[:, :num_prompt].max(1, keepdims=True) + np.arange(
                1, num_places - num_prompt + 1
            )
            ids_BL = np.concatenate((ids_BL[:, :num_prompt], counted_BL), axis=1)
        ids_BL, target_ids_BL = spread(sizes.num_ids, ids_BL, target_ids_BL)
        return Placed(tokens_BL, ids_BL, target_ids_BL, num_prompt)
    if scheme == "randomized":
        ids_BL = randomized_batch(generator, num_samples, num_places, sizes.num_ids)
    elif scheme in CHUNKED and training:
        ids_BL = _draw(generator, num_samples, num_places, sizes.num_ids, settings, unit)
    else:
        ids_BL = contiguous_batch(num_samples, num_places)
    return Placed(tokens_BL, ids_BL, ids_BL, num_prompt)


def _coupled_ids(samples: Samples) -> np.ndarray:
    assert samples.prompt_ids_BP is not None
    assert samples.response_ids_BR is not None
    return np.concatenate((samples.prompt_ids_BP, samples.response_ids_BR), axis=1)


def _draw(
    generator: np.random.Generator,
    num_samples: int,
    num_places: int,
    num_ids: int,
    settings: PositionSettings,
    unit: int,
) -> np.ndarray:
    chunks = settings.num_chunks
    if settings.published:
        return pose_batch(generator, num_samples, num_places, num_ids, num_chunks=chunks)
    if not settings.aligned_cuts:
        unit = 1
    return uniform_pose_batch(
        generator, num_samples, num_places, num_ids, num_chunks=chunks, unit=unit
    )
