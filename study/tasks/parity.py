"""Predict the parity of k marked bits among l, or of all bits with a scratchpad.

Sparse parity is to predict the XOR of k marked bits among l. A sample of length 2l is l pairs
(mark, bit). k of the marks, chosen uniformly, show which bits count. The paper names the
distribution D^sp_{l,k} and the lengths; marks next to bits are our interpretation. With k = 2:

    . 0  * 1  . 1  * 1  . 0  →  0        1 ⊕ 1

With a scratchpad the response is the running parity, bit by bit. A prompt is `b_1 … b_n =`, its
response `s_1 … s_n` with s_i = b_1 ⊕ … ⊕ b_i. Coupled IDs: b_i and s_i share one, and `=` has the
ID before the response, one below b_1.

Dimension key: B samples, l pairs, n bits, P prompt length, R response length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from olmo_sparsity.base.errors import ConfigError
from study.tasks.samples import Ks, Samples, Task, refuse_k

_ZERO, _ONE, _PLAIN, _RELEVANT = range(4)


@dataclass(frozen=True)
class SparseParity(Task):
    vocabulary: ClassVar[tuple[str, ...]] = ("0", "1", ".", "*")
    length_step: ClassVar[int] = 2

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        """Return random samples. `k` None: uniform in 1 … l for each sample."""
        num_pairs = length // 2
        if k is None:
            k = generator.integers(1, num_pairs + 1, size=num_samples)
        k_B = np.broadcast_to(np.asarray(k), (num_samples,))
        if k_B.min() < 0 or k_B.max() > num_pairs:
            raise ConfigError(
                f"k={k_B.max()} relevant places do not fit into the {num_pairs} pairs of a sample "
                f"of length {length}; lower k or raise the length"
            )
        # The k smallest of l random keys are a uniformly chosen k-subset.
        order_Bl = generator.random((num_samples, num_pairs), dtype=np.float32).argsort(1)
        relevant_Bl = np.zeros((num_samples, num_pairs), dtype=bool)
        np.put_along_axis(relevant_Bl, order_Bl, np.arange(num_pairs) < k_B[:, None], axis=1)
        bits_Bl = generator.integers(0, 2, size=(num_samples, num_pairs))
        marks_Bl = np.where(relevant_Bl, _RELEVANT, _PLAIN)
        return Samples(
            prompt_BP=np.stack((marks_Bl, bits_Bl), axis=2).reshape(num_samples, 2 * num_pairs),
            response_BR=(bits_Bl * relevant_Bl).sum(1, keepdims=True) % 2,
            unit=2,
        )

    def solve(self, samples: Samples) -> np.ndarray:
        marks_Bl = samples.prompt_BP[:, ::2]
        bits_Bl = samples.prompt_BP[:, 1::2]
        return ((marks_Bl == _RELEVANT) & (bits_Bl == _ONE)).sum(1, keepdims=True) % 2

    def largest_k(self, length: int) -> int:
        return length // 2


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
            prompt_BP=np.pad(bits_Bn, ((0, 0), (0, 1)), constant_values=2),
            response_BR=bits_Bn.cumsum(1) % 2,
            prompt_ids_BP=np.pad(ids_Bn, ((0, 0), (0, 1)), constant_values=1),
            response_ids_BR=ids_Bn,
        )

    def solve(self, samples: Samples) -> np.ndarray:
        return np.bitwise_xor.accumulate(samples.prompt_BP[:, :-1], axis=1)

    def largest_id(self, length: int) -> int:
        return length + 1
