"""The parity task with a scratchpad: the response is the running parity, bit by bit.

Place in the flow: a task → samples.

Prompt `b_1 … b_n =`, response `s_1 … s_n` with s_i = b_1 ⊕ … ⊕ b_i. Coupled IDs: b_i and s_i share
one, and `=` has the ID before the response, one below b_1.

Dimension key: B samples, n bits, P = n + 1 prompt length, R = n response length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from study.tasks.samples import Ks, Samples, Task, refuse_k

_EQUALS = 2


@dataclass(frozen=True)
class ScratchpadParity(Task):
    vocabulary: ClassVar[tuple[str, ...]] = ("0", "1", "=")

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        refuse_k("scratchpad_parity", k)
        bits_Bn = generator.integers(0, 2, size=(num_samples, length))
        ids_n = np.arange(2, length + 2)
        ids_Bn = np.tile(ids_n, (num_samples, 1))
        return Samples(
            prompt_BP=np.pad(bits_Bn, ((0, 0), (0, 1)), constant_values=_EQUALS),
            response_BR=bits_Bn.cumsum(1) % 2,
            prompt_ids_BP=np.pad(ids_Bn, ((0, 0), (0, 1)), constant_values=1),
            response_ids_BR=ids_Bn,
        )

    def solve(self, samples: Samples) -> np.ndarray:
        return np.bitwise_xor.accumulate(samples.prompt_BP[:, :-1], axis=1)

    def largest_id(self, length: int) -> int:
        return length + 1
