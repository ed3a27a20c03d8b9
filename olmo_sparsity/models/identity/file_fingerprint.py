"""Identify the files of a model by their bytes, for results and caches that are stored.

    fingerprint([Path("model.safetensors")])     "3f1c…", the same on each machine

load.py calls it for a model that is read from files. A model that was changed in memory is
identified by its tensors instead (model_identity.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from olmo_sparsity.base.files import sha256_of

_WHOLE_BYTES = 2**30
"""Files above this size are sampled instead of read completely."""

_SAMPLE_BYTES = 2**16
_NUM_SAMPLES = 1024
"""How much of a larger file is read: 64 MiB in all."""


def fingerprint(paths: Collection[Path]) -> str:
    """Return a hash that identifies the weights in some files. For one file it is the SHA-256; for
    several it is the SHA-256 of their SHA-256s, in the order of their names.

    For a file above 1 GiB, its size and 1,024 evenly spread blocks of 64 KiB are hashed, header
    included. That distinguishes models, in seconds instead of minutes.
    """
    digests = [_fingerprint_file(path) for path in sorted(paths, key=lambda path: path.name)]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _fingerprint_file(path: Path) -> str:
    """Return the SHA-256 of a file, or of its size and samples of it if it is larger than 1 GiB."""
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        return sha256_of(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        # The first sample is the beginning of the file, and the last one its end.
        for sample_index in range(_NUM_SAMPLES):
            file.seek(sample_index * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
