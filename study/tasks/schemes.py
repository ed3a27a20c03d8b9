"""Place samples under each scheme: the tokens a model reads, and their position IDs.

    rope, nope, alibi   IDs counted from 0; the model rotates by them, ignores them, or subtracts
                        their distance
    pose                counted from 0 at test; in training cut into chunks that skip ahead, over
                        all IDs up to the largest of the longest test
    randomized          a sorted random sample of those IDs, in training and at test
    coupled, ppc        the task's own coupled IDs; in training spread like PoSE's chunks. Given for
                        the response as well (coupled), or predicted there (ppc)
    auxiliary           as pose; the model also learns to predict the ID of the prompt token that a
                        response token is coupled with, which is not fed back
    pointers            as pose, with the coupled IDs as text ("index hints"): a label before each
                        token, at the same position, which the model writes as well

Dimension key: B samples, P prompt length, R response length, L = P + R.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.config.schema import option
from study.tasks.samples import Samples

COUPLED = ("coupled", "ppc")
"""Schemes that feed a task's coupled IDs."""

PREDICTED = ("ppc", "auxiliary")
"""Schemes whose model predicts IDs."""

EMBEDDED = (*COUPLED, "auxiliary")
"""Schemes with an embedding of IDs."""

HAVE_COUPLED_IDS = (*COUPLED, "auxiliary", "pointers")
"""Schemes that need a task with coupled IDs."""

POSE = ("pose", "auxiliary", "pointers")
"""Schemes whose fed IDs are PoSE's."""

CHUNKED = (*COUPLED, *POSE)
"""Schemes that cut a training sample into chunks."""

SCHEMES = ("rope", "nope", "alibi", *CHUNKED, "randomized")


@dataclass
class PositionSettings:
    num_chunks: int = option(4, least=1)
    """Runs of consecutive IDs that a training sample is cut into (all schemes with chunks)."""

    aligned_cuts: bool = False
    """Whether cuts fall only between a task's units, such as pairs of a mark and its bit."""

    published: bool = False
    """Whether pose, auxiliary and pointers draw chunks as in the PoSE paper (which has two): the
    first starts at 0, and all but the last have at most (length + 1) // num_chunks tokens. Else
    cuts and skips are uniform, the first skip too."""


@dataclass(frozen=True)
class Sizes:
    """How many IDs and tokens a model needs for a scheme."""

    num_ids: int
    num_words: int
    num_labels: int = 0
    """Number of tokens after the task's words that are labels (pointers)."""


@dataclass(frozen=True)
class Placed:
    """Samples as a model reads them."""

    tokens_BL: np.ndarray
    ids_BL: np.ndarray
    """Position IDs that are fed, where they are given."""

    target_ids_BL: np.ndarray
    """Position IDs that are to be predicted, where the scheme predicts any."""

    num_prompt: int
    """Number of tokens of the prompt."""


def place(
    scheme: str,
    samples: Samples,
    generator: np.random.Generator,
    settings: PositionSettings,
    sizes: Sizes,
    *,
    training: bool,
) -> Placed:
    """Return samples as a model of this scheme reads them.

    generator: Draws chunks and random IDs.
    training: Whether IDs are drawn for training; at test most schemes count them.
    """
    tokens_BL = np.concatenate((samples.prompt_BP, samples.response_BR), axis=1)
    num_samples, num_places = tokens_BL.shape
    num_prompt = samples.prompt_BP.shape[1]
    unit = samples.unit if settings.aligned_cuts else 1

    def spread(coupled_BL: np.ndarray, num_ids: int) -> np.ndarray:
        """Return coupled IDs; in training, spread like PoSE's chunks over `num_ids`."""
        if not training:
            return coupled_BL
        positions_BM = uniform_pose_batch(
            generator,
            num_samples,
            int(coupled_BL.max()),
            num_ids,
            num_chunks=settings.num_chunks,
            unit=unit,
        )
        return spread_ids(coupled_BL, positions_BM)

    if scheme in COUPLED:
        ids_BL = spread(samples.coupled_ids_BL, sizes.num_ids)
        return Placed(tokens_BL, ids_BL, ids_BL, num_prompt)
    if scheme == "pointers":
        # Drawn before the position IDs, whose random numbers come after these.
        labels_BL = sizes.num_words + spread(samples.coupled_ids_BL, sizes.num_labels)
        tokens_BL = np.stack((labels_BL, tokens_BL), axis=2).reshape(num_samples, -1)

    ids_BL = contiguous_batch(num_samples, num_places)
    shape = (num_samples, num_places, sizes.num_ids)
    if scheme == "randomized":
        ids_BL = randomized_batch(generator, *shape)
    elif scheme in POSE and training:
        if settings.published:
            ids_BL = pose_batch(generator, *shape, num_chunks=settings.num_chunks)
        else:
            num_chunks = settings.num_chunks
            ids_BL = uniform_pose_batch(generator, *shape, num_chunks=num_chunks, unit=unit)

    if scheme == "auxiliary":
        partner_ids_BL = np.take_along_axis(ids_BL, samples.partners_BL, axis=1)
        return Placed(tokens_BL, ids_BL, partner_ids_BL, num_prompt)
    if scheme == "pointers":
        # A label has the position of its token.
        ids_BL = ids_BL.repeat(2, axis=1)
        num_prompt = 2 * num_prompt
    return Placed(tokens_BL, ids_BL, ids_BL, num_prompt)


# --- position IDs of whole batches ----------------------------------------------------------------
#
# Dimension key: T target length (IDs are below it), C chunks, P places of a cut, M coupled IDs.


def contiguous_batch(num_sequences: int, length: int) -> np.ndarray:
    """Return positions_BL, counted from 0."""
    return np.tile(np.arange(length), (num_sequences, 1))


def randomized_batch(
    generator: np.random.Generator, num_sequences: int, length: int, target: int
) -> np.ndarray:
    """Return positions_BL: `randomized` of `olmo_sparsity.data.positions` for B sequences."""
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
    """Return positions_BL of a variant of PoSE for B sequences.

    Cuts are uniform, total skips uniform and sorted, and the first chunk is skipped too. Cuts fall
    only between units of `unit` tokens; if there are fewer such places than cuts, all of them are
    cut."""
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
    """Return positions_BL: `pose` of `olmo_sparsity.data.positions` for B sequences.

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
