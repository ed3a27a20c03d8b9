"""Run calls at once in threads.

Place in the flow: below servers/pool.py and servers/checks.py, which send several requests at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any


@dataclass(frozen=True)
class _Outcome:
    """How a call has ended."""

    number: int
    result: Any = None
    error: BaseException | None = None


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that run at once, in the order of the calls. The first failure is
    raised at once, and so is an interrupt: an executor of `concurrent.futures` would wait for the
    other calls, which may take minutes."""
    outcomes = SimpleQueue[_Outcome]()

    def run(number: int) -> None:
        try:
            outcomes.put(_Outcome(number, calls[number]()))
        except BaseException as error:
            outcomes.put(_Outcome(number, error=error))

    for number in range(len(calls)):
        # Daemons do not keep the program from ending.
        threading.Thread(target=run, args=(number,), daemon=True).start()
    results: dict[int, Any] = {}
    for _ in calls:
        outcome = outcomes.get()
        if outcome.error is not None:
            raise outcome.error
        results[outcome.number] = outcome.result
    return [results[number] for number in range(len(calls))]
