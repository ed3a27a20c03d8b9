"""Prepare the next items of a generator in a thread while the current one is used.

Place in the flow: around reading and tokenizing documents, and around training batches.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(items: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """The same items, prepared by a thread, with at most `depth` of them waiting."""
    # Both queues are written in C: Ctrl-C within the lock of a `queue.Queue` leaves it locked, and
    # the thread would wait for it for ever.
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    stopped = False
    end = object()

    def work() -> None:
        try:
            with contextlib.closing(items):
                for item in items:
                    room.get()
                    if stopped:
                        return
                    ready.put((item, None))
            ready.put((end, None))
        except BaseException as error:
            ready.put((end, error))

    for _ in range(depth):
        room.put(None)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            room.put(None)
            if error is not None:
                raise error
            if item is end:
                return
            yield item
    finally:
        stopped = True
        room.put(None)
        thread.join()
