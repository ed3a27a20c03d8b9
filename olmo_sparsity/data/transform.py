"""Change training sequences with a function of the user (`data.transform`).

    def make(tokenizer, shortest):                 # data.transform: reverse.py:make
        def reverse_some(tokens_L, seeds):
            rng = np.random.default_rng([*seeds, 1])
            return Changed(tokens_L[::-1]) if rng.random() < 0.1 else None
        return reverse_some

`load_transform` calls `make` once for a run. `apply` calls what it returned for each sequence,
before position IDs and labels are made (batches.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.base.extend import find_added, fingerprint_of_files, is_in_file
from olmo_sparsity.config.text import DataConfig

ENTRY_POINTS = "olmo_sparsity.transforms"
"""Group of the entry points by which packages offer transforms."""


@dataclass(frozen=True)
class Changed:
    """A changed sequence. It counts as one document, so that attention reaches all of it."""

    tokens_L: np.ndarray

    labels_L: np.ndarray | None = None
    """Token IDs to predict after each token, or IGNORED. None: the next token of the sequence."""


Transform = Callable[[np.ndarray, list[int]], Changed | None]
"""A function of the tokens of a sequence, and of numbers that identify it (run seed, epoch, index
of the sequence). It returns None to leave the sequence as it is. It must depend on its arguments
alone: draw from `numpy.random.default_rng([*seeds, a number of your own])`."""


def load_transform(data: DataConfig, tokenizer: Tokenizer, shortest: int) -> Transform | None:
    """Return the transform of a run; None if it has none. `data.transform` names a function that
    makes it, from the tokenizer, `shortest`, and `data.transform_options` as keywords.

    Args:
        shortest: The number of tokens of the shortest training sequence.
    """
    if data.transform is None:
        return None
    make = _find_maker(data.transform)
    # Checked before the call, as a TypeError inside the user's function is an error of that
    # function.
    try:
        inspect.signature(make).bind(tokenizer, shortest, **data.transform_options)
    except TypeError as error:
        raise ConfigError(
            f"data.transform_options does not fit {data.transform}: {error}"
        ) from None
    transform: Transform = make(tokenizer, shortest, **data.transform_options)
    return transform


def apply(
    transform: Transform, tokens_L: np.ndarray, seeds: list[int], vocab_size: int
) -> Changed | None:
    """Return the changed sequence, or None if the transform leaves it as it is. Raise DataError if
    the changed sequence cannot be trained on.

    Args:
        seeds: The numbers that identify the sequence.
        vocab_size: One more than the largest token ID.
    """
    changed = transform(tokens_L, seeds)
    if changed is None:
        return None
    labels_L = changed.tokens_L if changed.labels_L is None else changed.labels_L
    # numpy would repeat a single token over the whole row, and its error for another length would
    # not name the user's function.
    if not changed.tokens_L.shape == labels_L.shape == tokens_L.shape:
        shapes = f"{changed.tokens_L.shape} tokens and {labels_L.shape} labels"
        raise DataError(f"data.transform returned {shapes}; return {tokens_L.shape} of each")
    # A GPU would fail in the embedding, with an assertion that names no function.
    smallest_id = int(changed.tokens_L.min())
    largest_id = int(changed.tokens_L.max())
    if smallest_id < 0 or largest_id >= vocab_size:
        wrong_id = smallest_id if smallest_id < 0 else largest_id
        raise DataError(f"data.transform returned token {wrong_id}; IDs are 0 to {vocab_size - 1}")
    return changed


def with_fingerprint(data: DataConfig) -> DataConfig:
    """Return a copy of the settings with the SHA-256 of the transform's file, because a run with
    another transform is another run. Raise ConfigError if they have another SHA-256 already."""
    if data.transform is None or not is_in_file(data.transform):
        return data
    _find_maker(data.transform)  # raises if the file or the function does not exist
    (sha256,) = fingerprint_of_files([data.transform]).values()
    if data.transform_sha256 not in (None, sha256):
        remedy = "restore it, or take a new run_folder and leave data.transform_sha256 out"
        raise ConfigError(f"{data.transform} is not the file the config was saved with; {remedy}")
    return replace(data, transform_sha256=sha256)


def _find_maker(name: str) -> Callable[..., Transform]:
    """Return the function that makes the transform."""
    make: Callable[..., Transform] | None = find_added(name, ENTRY_POINTS, "data.transform")
    if make is None:
        kinds = f"FILE.py:NAME, or an entry point of {ENTRY_POINTS}"
        raise ConfigError(f"data.transform={name} does not exist; give {kinds}")
    return make
