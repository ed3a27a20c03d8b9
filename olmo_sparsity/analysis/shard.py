"""Divide the documents of a measurement into shards, for processes that start apart (`--shard`).

    documents 0 … 6     shard 0/2: 0, 1, 4, 5     shard 1/2: 2, 3, 6

The processes of one launch divide their shard again in the same way (`Shard.part`).
measurement/sharing.py and cost_report.py ask a shard which documents it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Shard(NamedTuple):
    """The documents that one of several processes measures, as `--shard` says it. It is a tuple, as
    `shard=(0, 4)` may be passed for it.

        Shard(0, 2).of([0, 1, 2, 3, 4, 5, 6])  # [0, 1, 4, 5]
        Shard(1, 2).of([0, 1, 2, 3, 4, 5, 6])  # [2, 3, 6]
    """

    shard_index: int = 0
    """Which of the shards this is, from 0."""

    num_shards: int = 1

    def of(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of those documents that belong to this shard."""
        # Thresholds are fitted on documents with an even number and used on those with an odd one,
        # so documents are dealt in pairs, and each shard has some of both.
        return [number for number in numbers if number // 2 % self.num_shards == self.shard_index]

    def part(self, process_index: int, num_processes: int) -> Shard:
        """Return the documents of this shard that one of several processes measures."""
        # The pairs 1, 4, 7, 10, … of shard 1/3 are the pairs 1, 7, … and 4, 10, … of two processes,
        # which are the shards 1/6 and 4/6 of all documents.
        index = self.shard_index + self.num_shards * process_index
        return Shard(index, self.num_shards * num_processes)


ALL_DOCUMENTS = Shard()
"""The shard of a process that measures alone."""
