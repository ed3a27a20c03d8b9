"""Recall the value that followed a key, the needle in a haystack. The answer depends on one place.

A prompt of length n is hay (random words), a needle `key value` at a random place, then `?` and the
key; the response is its value. Hay uses the same words as values, so that only the key before a
value distinguishes it. Coupled IDs: prompt tokens have their place, the response has the ID of the
value it repeats. For example:

    tokens   v3 v7 K5 v2 v9 ? K5 v2
    IDs       1  2  3  4  5 6  7  4

Dimension key: B samples, P prompt length, R = 1 response length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from olmo_sparsity.base.errors import ConfigError
from study.tasks.samples import Ks, Samples, Task, refuse_k

_VALUES = _KEYS = 16


@dataclass(frozen=True)
class Needle(Task):
    vocabulary: ClassVar[tuple[str, ...]] = (
        *(f"{kind}{i}" for kind in "vK" for i in range(_VALUES)),
        "?",
    )

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        refuse_k("needle", k)
        if length < 4:
            raise ConfigError(f"length {length} has no room for a needle and the question; use 4")
        prompt_BP = generator.integers(0, _VALUES, size=(num_samples, length))
        places_B1 = generator.random((num_samples, length - 3)).argsort(1)[:, :1]
        keys_B1 = _VALUES + generator.random((num_samples, _KEYS)).argsort(1)[:, :1]
        np.put_along_axis(prompt_BP, places_B1, keys_B1, axis=1)
        prompt_BP[:, -2] = _VALUES + _KEYS
        prompt_BP[:, -1:] = keys_B1
        answer_B1 = places_B1 + 1
        return Samples(
            prompt_BP=prompt_BP,
            response_BR=np.take_along_axis(prompt_BP, answer_B1, axis=1),
            prompt_ids_BP=np.tile(np.arange(1, length + 1), (num_samples, 1)),
            response_ids_BR=answer_B1 + 1,
        )

    def solve(self, samples: Samples) -> np.ndarray:
        is_key_BP = samples.prompt_BP[:, :-2] == samples.prompt_BP[:, -1:]
        return np.take_along_axis(samples.prompt_BP, is_key_BP.argmax(1)[:, None] + 1, axis=1)

    def largest_id(self, length: int) -> int:
        return length
