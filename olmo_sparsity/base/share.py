"""Split work between processes that do not talk to each other.

Share(1, 3).of(["a", "b", "c", "d", "e"])     # ["b", "e"]: the second of three processes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """The items of some work that one process takes: every `count`-th one, from item `index` on."""

    index: int
    count: int

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items of this share."""
        return items[self.index :: self.count]


WHOLE = Share(0, 1)
"""The share of a process that works alone."""
