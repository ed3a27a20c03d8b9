"""Order the sequences of an epoch (`data.order`): by a shuffled list, or by a computed permutation.

    order = order_epoch("stored", num_sequences=5, seed=0, epoch=0)
    order[0]     # the index of the sequence that the epoch reads first

Both orders depend on the number of sequences, the seed and the epoch alone, so that any process
finds any sequence by itself. The list is OLMo's order, and takes memory; the permutation takes
none.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from olmo_sparsity.base.errors import ConfigError

Order = Literal["auto", "stored", "computed"]

MAX_STORED_BY_AUTO = 2**24
"""Number of sequences up to which `auto` stores the order. Each process holds 4 bytes for each of
them: 64 MiB, which takes 0.4 s to shuffle."""

MAX_STORED = 2**32
"""Number of sequences up to which an order can be stored, in numbers of 32 bits."""

_64_BITS = 2**64 - 1

_ROUNDS = 8
"""Four rounds of a Feistel network with random functions cannot be told from a random permutation
(Luby and Rackoff). Our functions only look random, hence twice as many."""


class EpochOrder(Protocol):
    """The order of an epoch, an array or a `ComputedOrder`. `order[i]` is the index in the text of
    the sequence that the epoch reads at index i, from 0."""

    def __getitem__(self, index_in_epoch: int, /) -> int: ...


def choose_order(order: Order, num_sequences: int) -> Order:
    """Return `stored` or `computed`. `auto` becomes `stored` if the order takes little memory."""
    if order == "auto":
        return "stored" if num_sequences <= MAX_STORED_BY_AUTO else "computed"
    if order == "stored" and num_sequences > MAX_STORED:
        raise ConfigError(
            f"data.order=stored holds at most {MAX_STORED:,} sequences, and the text has "
            f"{num_sequences:,}; pass --data.order=computed"
        )
    return order


def order_epoch(order: Order, num_sequences: int, seed: int, epoch: int) -> EpochOrder:
    """Return the order in which an epoch reads its sequences."""
    if choose_order(order, num_sequences) == "computed":
        return ComputedOrder(num_sequences, seed, epoch)
    return stored_order(num_sequences, seed, epoch)


def stored_order(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    """Return the shuffled indices of the sequences of an epoch, as OLMo's IterableDataset does."""
    order = np.arange(num_sequences, dtype=np.uint32)
    # As in OLMo, epoch 1 of seed 0 repeats epoch 0 of seed 1. ComputedOrder keeps them apart.
    np.random.Generator(np.random.PCG64(seed=seed + epoch)).shuffle(order)
    return order


class ComputedOrder:
    """A permutation of 0 … n - 1 that needs no memory.

    A Feistel network permutes the numbers of as many bits as n has. It splits a number into two
    halves and changes one of them by a function of the other, in turns; each such round can be
    undone, so no two numbers meet. Results of n or more are permuted again, until they are below n
    (cycle walking). At least half of all results are, so this takes fewer than two turns on
    average."""

    def __init__(self, num_sequences: int, seed: int, epoch: int) -> None:
        self.num_sequences = num_sequences
        num_bits = max(2, (num_sequences - 1).bit_length())
        self.low_bits = num_bits // 2
        self.low_mask = 2**self.low_bits - 1
        self.high_mask = 2 ** (num_bits - self.low_bits) - 1
        generator = np.random.Generator(np.random.PCG64(seed=[seed, epoch]))
        self.keys = generator.integers(0, 2**64, _ROUNDS, dtype=np.uint64).tolist()

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index_in_epoch: int) -> int:
        if not 0 <= index_in_epoch < self.num_sequences:
            raise IndexError(f"place {index_in_epoch} of {self.num_sequences}")
        number = self._permute(index_in_epoch)
        # Cycle walking: results that are too large are permuted until one is in range.
        while number >= self.num_sequences:
            number = self._permute(number)
        return number

    def _permute(self, number: int) -> int:
        """Return the image of a number under the Feistel network."""
        high = number >> self.low_bits
        low = number & self.low_mask
        # Even rounds change the high half, odd ones the low half.
        for round_index, key in enumerate(self.keys):
            if round_index % 2 == 0:
                high ^= _scramble(low ^ key) & self.high_mask
            else:
                low ^= _scramble(high ^ key) & self.low_mask
        return high << self.low_bits | low


def _scramble(number: int) -> int:
    """Return 64 bits that each depend on all bits of the number (the end of SplitMix64)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _64_BITS
    return number ^ number >> 31
