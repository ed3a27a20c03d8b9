"""Draw the position IDs of samples under each scheme.

Place in the flow: samples → **schemes** (data/positions.py draws) → model.

    rope, nope, alibi   IDs counted from 0; the model rotates by them, ignores them, or subtracts
                        their distance
    pose                counted from 0 at test; in training cut into chunks that skip ahead, over
                        all IDs up to those of the longest test
    randomized          a sorted random sample of those IDs, in training and at test
    coupled, ppc        the task's own coupled IDs; in training spread like PoSE's chunks. Given for
                        the response as well (coupled), or predicted there (ppc)

Dimension key: B samples, P prompt length, R response length, L = P + R.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.config import number
from olmo_sparsity.data.positions import (
    contiguous_batch,
    randomized_batch,
    spread_ids,
    uniform_pose_batch,
)
from olmo_sparsity.tasks.samples import Samples

COUPLED = ("coupled", "ppc")
CHUNKED = ("pose", *COUPLED)
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


def place(
    scheme: str,
    samples: Samples,
    generator: np.random.Generator,
    settings: PositionSettings,
    num_ids: int,
    *,
    training: bool,
) -> np.ndarray:
    """positions_BL of prompt and response."""
    num_samples, num_prompt = samples.prompt_BP.shape
    num_places = num_prompt + samples.response_BR.shape[1]
    if scheme == "randomized":
        return randomized_batch(generator, num_samples, num_places, num_ids)
    ids_BL = contiguous_batch(num_samples, num_places)
    if scheme in COUPLED:
        assert samples.prompt_ids_BP is not None
        assert samples.response_ids_BR is not None
        ids_BL = np.concatenate((samples.prompt_ids_BP, samples.response_ids_BR), axis=1)
        num_places = int(ids_BL.max())
    if not training or scheme not in CHUNKED:
        return ids_BL
    unit = samples.unit if settings.aligned_cuts else 1
    spread_BM = uniform_pose_batch(
        generator, num_samples, num_places, num_ids, num_chunks=settings.num_chunks, unit=unit
    )
    return spread_ids(ids_BL, spread_BM) if scheme in COUPLED else spread_BM
