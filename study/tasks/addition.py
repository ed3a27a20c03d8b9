"""Add two n-digit numbers. Coupled IDs join digits of equal significance.

A prompt is `a_1 … a_n + b_1 … b_n =`, most significant digit first, with numbers uniform below
10^n. The response has the n+1 digits of the sum, least significant first, so that each depends on
two places and a carry. Each significance has one ID, counted in writing order; `+` and `=` have the
ID before the response, one above its first digit's. Of 58 + 67 = 125, for example:

    tokens   5 8 + 6 7 = 5 2 1
    IDs      2 3 4 2 3 4 3 2 1

Cho et al. 2024 train on up to 30 digits, with correct sums at 200.

Dimension key: B samples, n digits, P = 2n + 2 prompt length, R = n + 1 response length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from study.tasks.samples import Ks, Samples, Task, refuse_k

_PLUS, _EQUALS = 10, 11


@dataclass(frozen=True)
class Addition(Task):
    vocabulary: ClassVar[tuple[str, ...]] = (*"0123456789", "+", "=")

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        refuse_k("addition", k)
        a_Bn, b_Bn = generator.integers(0, 10, size=(2, num_samples, length))
        plus_B1 = np.full((num_samples, 1), _PLUS)
        equals_B1 = np.full((num_samples, 1), _EQUALS)
        sum_ids_R = np.arange(1, length + 2)
        # The sum has one digit more than each number, the most significant, with the first ID.
        digit_ids_n = sum_ids_R[1:]
        sign_ids = [length + 2]
        prompt_ids_P = np.concatenate((digit_ids_n, sign_ids, digit_ids_n, sign_ids))
        return Samples(
            prompt_BP=np.concatenate((a_Bn, plus_B1, b_Bn, equals_B1), axis=1),
            response_BR=self._add(a_Bn, b_Bn),
            prompt_ids_BP=np.tile(prompt_ids_P, (num_samples, 1)),
            response_ids_BR=np.tile(sum_ids_R[::-1], (num_samples, 1)),
        )

    def _add(self, a_Bn: np.ndarray, b_Bn: np.ndarray) -> np.ndarray:
        """Return the digits of sums, least significant first, by carrying from place to place."""
        total_BR = np.pad(a_Bn + b_Bn, ((0, 0), (1, 0)))
        for place in range(total_BR.shape[1] - 1, 0, -1):
            total_BR[:, place - 1] += total_BR[:, place] // 10
        total_BR %= 10
        return total_BR[:, ::-1]

    def solve(self, samples: Samples) -> np.ndarray:
        """Solve with Python's integers, unlike the sampler."""
        rows = []
        for prompt in samples.prompt_BP.tolist():
            num_digits = len(prompt) // 2 - 1
            a = _read_number(prompt[:num_digits])
            b = _read_number(prompt[-1 - num_digits : -1])
            digits = [int(digit) for digit in str(a + b).zfill(num_digits + 1)]
            rows.append(digits[::-1])
        return np.array(rows)

    def largest_id(self, length: int) -> int:
        return length + 2


def _read_number(digits: list[int]) -> int:
    return int("".join(map(str, digits)))
