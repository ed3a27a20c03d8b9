"""Prepare the next items of a generator in a thread while the current one is used.

    for batch in in_background(batches, depth=2):     # two more batches are prepared meanwhile
        train(batch)

It serves documents that are read and tokenized, and training batches.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_background(items: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """Yield the items of a generator, while a thread prepares the next `depth` ones. An error of
    the generator is raised where its item would be yielded."""
    end = object()  # not None, which may be an item
    with contextlib.closing(items), ThreadPoolExecutor(max_workers=1) as thread:
        waiting = deque(thread.submit(next, items, end) for _ in range(depth))
        while True:
            item = waiting.popleft().result()
            if item is end:
                return
            waiting.append(thread.submit(next, items, end))
            yield item  # type: ignore[misc] # it is not `end`
