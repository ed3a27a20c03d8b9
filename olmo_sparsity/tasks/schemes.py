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
                        counted on from the prompt's largest
    pointers            as pose, with the coupled IDs as text ("index hints"): a label before each
                        token, at the same position, which the model writes as well

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
HAVE_COUPLED_IDS = (*COUPLED, "pointers")
CHUNKED = ("pose", *HAVE_COUPLED_IDS)
SPREAD = (*CHUNKED, "randomized")
"""Schemes whose training draws IDs up to those of the longest test."""

SCHEMES = ("rope", "nope", "alibi", *SPREAD)


@dataclass
class PositionSettings:
    num_ids: int | None = None
    """IDs are drawn below this. None: enough for the longest test."""

    num_chunks: int = number(4, 1)
    """Runs of consecutive IDs that a training sample is cut into (all schemes with chunks)."""

    aligned_cuts: bool = False
    """Whether cuts fall only between a task's units, such as pairs of a mark and its bit."""

    published: bool = False
    """Whether pose draws chunks as in its paper (which has two): the first starts at 0, and all
    but the last have at most (length + 1) // num_chunks tokens. Else cuts and skips are uniform,
    the first skip too."""


@dataclass(frozen=True)
class Sizes:
    """What a scheme needs of a model."""

    num_ids: int
    num_words: int
    num_coupled: int = 0
    """Coupled IDs are below this. Under pointers they are tokens behind the task's words."""


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
    (num_samples, num_places), num_prompt = tokens_BL.shape, samples.prompt_BP.shape[1]
    unit = samples.unit if settings.aligned_cuts else 1
    if scheme in HAVE_COUPLED_IDS:
        assert samples.prompt_ids_BP is not None
        assert samples.response_ids_BR is not None
        coupled_BL = np.concatenate((samples.prompt_ids_BP, samples.response_ids_BR), axis=1)
        if training:
            spread_BM = uniform_pose_batch(
                generator, num_samples, int(coupled_BL.max()), sizes.num_coupled,
                num_chunks=settings.num_chunks, unit=unit,
            )  # fmt: skip
            coupled_BL = spread_ids(coupled_BL, spread_BM)
    if scheme in COUPLED:
        ids_BL = coupled_BL
        if scheme == "auxiliary":
            ids_BL = coupled_BL.copy()
            first_B1 = coupled_BL[:, :num_prompt].max(1, keepdims=True) + 1
            ids_BL[:, num_prompt:] = first_B1 + np.arange(num_places - num_prompt)
        return Placed(tokens_BL, ids_BL, coupled_BL, num_prompt)
    ids_BL = contiguous_batch(num_samples, num_places)
    if scheme == "randomized":
        ids_BL = randomized_batch(generator, num_samples, num_places, sizes.num_ids)
    elif scheme in CHUNKED and training:
        drawn = generator, num_samples, num_places, sizes.num_ids
        if settings.published:
            ids_BL = pose_batch(*drawn, num_chunks=settings.num_chunks)
        else:
            ids_BL = uniform_pose_batch(*drawn, num_chunks=settings.num_chunks, unit=unit)
    if scheme == "pointers":
        labels_BL = sizes.num_words + coupled_BL
        tokens_BL = np.stack((labels_BL, tokens_BL), axis=2).reshape(num_samples, -1)
        ids_BL, num_prompt = ids_BL.repeat(2, axis=1), 2 * num_prompt
    return Placed(tokens_BL, ids_BL, ids_BL, num_prompt)
