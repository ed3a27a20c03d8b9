"""Draw random numbers by name: independent of process, order and of what else is drawn.

    stream(seed, "placebo", document_number, block_start).integers(10)

Two purposes never share numbers, and a resumed or divided measurement draws the same ones.
"""

from __future__ import annotations

import json
from hashlib import sha256

import numpy as np

VERSION = 2
"""The version of this scheme, which results store as a part of their identity. In version 1, seeds
were lists of numbers with the lengths of words, so that two purposes could share a stream."""


def stream(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    """Return a generator of random numbers for one purpose.

    Args:
        purpose: Such as "placebo".
        keys: What the numbers are drawn for, such as the numbers of a document and of a block.
    """
    name = json.dumps([seed, purpose, *keys], default=int)  # numpy's integers as Python's
    digest = sha256(name.encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, np.uint32))
