"""Run calls at once in threads."""

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
    """Return the results of calls that run at once. The first failure, or an interrupt, does not
    wait for the others, as an executor of `concurrent.futures` would."""
    outcomes = SimpleQueue[_Outcome]()

    def run(number: int) -> None:
        try:
            outcomes.put(_Outcome(number, calls[number]()))
        except BaseException as error:
            outcomes.put(_Outcome(number, error=error))

    for number in range(len(calls)):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    results = dict[int, Any]()
    for _ in calls:
        outcome = outcomes.get()
        if outcome.error is not None:
            raise outcome.error
        results[outcome.number] = outcome.result
    return [results[number] for number in range(len(calls))]
