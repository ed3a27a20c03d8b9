"""End every response of a task with a token of its own, so that a model must find its length.

Place in the flow: a task → **EndToken(task)** → samples.

The end is coupled with the last token of the prompt.

Dimension key: B samples, P prompt length, R response length, the end not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from study.tasks.samples import Ks, Samples, Task

_WORD = "<end>"


@dataclass(frozen=True)
class EndToken(Task):
    task: Task

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return (*self.task.vocabulary, _WORD)

    @property
    def length_step(self) -> int:
        return self.task.length_step

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        samples = self.task.sample(generator, num_samples, length, k)
        ids_BP, ids_BR = samples.prompt_ids_BP, samples.response_ids_BR
        if ids_BP is not None and ids_BR is not None:
            ids_BR = np.concatenate((ids_BR, ids_BP[:, -1:]), axis=1)
        return replace(
            samples, response_BR=self._ended(samples.response_BR), response_ids_BR=ids_BR
        )

    def largest_k(self, length: int) -> int | None:
        return self.task.largest_k(length)

    def largest_id(self, length: int) -> int | None:
        return self.task.largest_id(length)

    def solve(self, samples: Samples) -> np.ndarray:
        return self._ended(self.task.solve(samples))

    def _ended(self, response_BR: np.ndarray) -> np.ndarray:
        return np.pad(response_BR, ((0, 0), (0, 1)), constant_values=len(self.task.vocabulary))
