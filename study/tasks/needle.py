"""The needle-in-a-haystack task: recall the value that followed a key. It depends on one place.

Place in the flow: a task → samples.

A prompt of length n is hay (random words), needles `key value` at random places without overlap,
then `?` and one of the keys; the response is that key's value. Hay uses the same words as values,
so that only the key before a value distinguishes it. Coupled IDs: prompt tokens have their place,
the response has the ID of the value it repeats.

Dimension key: B samples, N needles, P prompt length, R = 1 response length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.errors import ConfigError
from study.tasks.samples import Ks, Samples, Task, refuse_k


@dataclass(frozen=True)
class Needle(Task):
    num_keys: int = 16
    num_values: int = 16
    num_needles: int = 1
    """Needles in each prompt, with different keys."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_needles <= self.num_keys:
            raise ConfigError(
                f"task.num_needles={self.num_needles} must lie between 1 and "
                f"task.num_keys={self.num_keys}"
            )
        if self.num_values < 2:
            raise ConfigError(f"task.num_values={self.num_values} must be at least 2")

    @property
    def vocabulary(self) -> tuple[str, ...]:
        values = tuple(f"v{i}" for i in range(self.num_values))
        return (*values, *(f"K{i}" for i in range(self.num_keys)), "?")

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        refuse_k("needle", k)
        num_hay = length - 2 - 2 * self.num_needles
        if num_hay < 0:
            raise ConfigError(
                f"length {length} has no room for {self.num_needles} needles and the question; "
                f"use at least {2 + 2 * self.num_needles}"
            )
        prompt_BP = generator.integers(0, self.num_values, size=(num_samples, length))
        # N of the N + hay slots are needles; a needle fills two places and shifts what follows.
        slots_BN = generator.random((num_samples, self.num_needles + num_hay)).argsort(1)
        slots_BN = np.sort(slots_BN[:, : self.num_needles], axis=1)
        places_BN = slots_BN + np.arange(self.num_needles)
        keys_BN = generator.random((num_samples, self.num_keys)).argsort(1)[:, : self.num_needles]
        keys_BN = keys_BN + self.num_values
        np.put_along_axis(prompt_BP, places_BN, keys_BN, axis=1)
        rows_B, queried_B = (
            np.arange(num_samples),
            generator.integers(0, self.num_needles, num_samples),
        )
        prompt_BP[:, -2] = self.num_values + self.num_keys
        prompt_BP[:, -1] = keys_BN[rows_B, queried_B]
        answer_B1 = places_BN[rows_B, queried_B][:, None] + 1
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
