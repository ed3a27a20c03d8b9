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
    ready: queue.Queue[Any] = queue.Queue(depth)
    stopped = threading.Event()
    end = object()

    def put(item: Any) -> bool:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def work() -> None:
        try:
            with contextlib.closing(items):
                for item in items:
                    if not put((item, None)):
                        return
            put((end, None))
        except BaseException as error:
            put((end, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is end:
                return
            yield item
    finally:
        stopped.set()
        thread.join()
