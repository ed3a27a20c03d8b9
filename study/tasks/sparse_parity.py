"""The sparse parity task: predict the XOR of k marked bits among l.

Place in the flow: a task → samples.

A sample of length 2l is l pairs (mark, bit). k of the marks, chosen uniformly, show which bits
count. The paper names the distribution D^sp_{l,k} and the lengths; marks next to bits are our
reading.

Dimension key: B samples, l pairs, P = 2l prompt length, R = 1 response length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from olmo_sparsity.errors import ConfigError
from study.tasks.samples import Ks, Samples, Task

_ZERO, _ONE, _PLAIN, _RELEVANT = range(4)


@dataclass(frozen=True)
class SparseParity(Task):
    vocabulary: ClassVar[tuple[str, ...]] = ("0", "1", ".", "*")
    length_step: ClassVar[int] = 2

    def sample(
        self, generator: np.random.Generator, num_samples: int, length: int, k: Ks = None
    ) -> Samples:
        """`k` None: uniform in 1 … l for each sample."""
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
        marks_Bl, bits_Bl = samples.prompt_BP[:, ::2], samples.prompt_BP[:, 1::2]
        return ((marks_Bl == _RELEVANT) & (bits_Bl == _ONE)).sum(1, keepdims=True) % 2

    def largest_k(self, length: int) -> int:
        return length // 2


def count_relevant_ones(samples: Samples) -> np.ndarray:
    """Number of marked ones of each sample; the response is its parity."""
    marks_Bl, bits_Bl = samples.prompt_BP[:, 0::2], samples.prompt_BP[:, 1::2]
    return ((marks_Bl == _RELEVANT) & (bits_Bl == _ONE)).sum(1)
