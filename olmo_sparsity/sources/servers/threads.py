"""Run calls at once in threads.

    in_threads([lambda: 1, lambda: 2])   →   [1, 2]

servers/pool.py and servers/checks.py call it, to send several requests at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any


@dataclass(frozen=True)
class _Outcome:
    """How a call has ended: with a result, or with an error."""

    call_index: int
    result: Any = None
    error: BaseException | None = None


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that run at once, in the order of the calls. The first failure is
    raised at once, and so is an interrupt: an executor of `concurrent.futures` would wait for the
    other calls, which may take minutes."""
    outcomes = SimpleQueue[_Outcome]()

    def run(call_index: int) -> None:
        try:
            outcomes.put(_Outcome(call_index, calls[call_index]()))
        except BaseException as error:  # it is raised again in the thread that waits
            outcomes.put(_Outcome(call_index, error=error))

    for call_index in range(len(calls)):
        # Daemons do not keep the program from ending.
        threading.Thread(target=run, args=(call_index,), daemon=True).start()

    # In the order in which they end.
    results: dict[int, Any] = {}
    for _ in calls:
        outcome = outcomes.get()
        if outcome.error is not None:
            raise outcome.error
        results[outcome.call_index] = outcome.result
    return [results[call_index] for call_index in range(len(calls))]
