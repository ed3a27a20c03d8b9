"""Split work between processes that do not talk to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """The part of some work that one process does: every `count`-th item, from item `index` on."""

    index: int
    count: int

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items of this share."""
        return items[self.index :: self.count]


WHOLE = Share(0, 1)
"""The share of a process that works alone."""
