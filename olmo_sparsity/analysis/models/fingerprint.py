"""Identify the weights of a model in files; identity.py does so in memory.

Place in the flow: below `load_model`; independent of the architecture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from olmo_sparsity.errors import DataError, one_line
from olmo_sparsity.io import sha256_of

_WHOLE_BYTES = 2**30  # above this a fingerprint samples the file instead of reading all of it
_BLOCK_BYTES, _NUM_BLOCKS = 2**16, 1024


def unreadable(path: str | Path, error: Exception) -> DataError:
    return DataError(f"'{path}' cannot be read ({one_line(error)}); write or download it again")


def fingerprint(paths: Collection[Path]) -> str:
    """Identifies weights: the SHA-256 of the file, or of the files' SHA-256s in order of name.

    Of a file above 1 GiB, its size and 1024 evenly spread blocks of 64 KiB are hashed, header
    included: enough to distinguish models, in seconds instead of minutes.
    """
    return joined_sha256(
        [_fingerprint_file(path) for path in sorted(paths, key=lambda path: path.name)]
    )


def joined_sha256(digests: list[str]) -> str:
    """Return the digest of one file, or the SHA-256 of the digests of several."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _fingerprint_file(path: Path) -> str:
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        return sha256_of(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for block in range(_NUM_BLOCKS):
            file.seek(block * (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
