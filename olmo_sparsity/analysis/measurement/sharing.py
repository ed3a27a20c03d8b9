"""Share the documents of a measurement with other processes: do one's own, and wait for the others.

    work_on_documents    this process's documents, one after another, with progress
    wait_for_documents   documents of other processes; if they make no progress for long, this
                         process does them itself

What is finished shows in the folder that all share (`Parts.find_finished`); processes exchange
nothing else. So a process that died, or has not begun, only costs time. For example, process 0 has
the documents 0 and 1, and process 1 has 2 and 3 but dies:

    time      process 0                                   process 1
       0 s    measures 0, then 1                          measures 2
      20 s    waits for 2 and 3: 3 is missing             dies
      80 s    measures 3 itself, as nothing has changed
"""

from __future__ import annotations

import time
from collections.abc import Callable

from olmo_sparsity.analysis.measurement.parts import Parts
from olmo_sparsity.base.progress import Progress

PATIENCE_S = 60.0
"""Without progress of another process for so long, its documents are measured here."""


def work_on_documents(
    phase: str,
    parts: Parts,
    numbers: list[int],
    measure_document: Callable[[int], None],
    is_shown: bool,
) -> float:
    """Measure documents that are not finished. Return how many seconds the slowest one took.

    Args:
        phase: The phase of the measurement, `losses` or `recovery`.
        parts: The folder of the measurement.
        numbers: Numbers of the documents of this process.
        measure_document: Measures one document by its number, and adds it to `parts`.
        is_shown: Whether to show progress.
    """
    finished = parts.find_finished(phase)
    slowest_s = 0.0
    unfinished = [number for number in numbers if number not in finished]
    num_finished = len(numbers) - len(unfinished)
    with Progress(phase, len(numbers), "documents", enabled=is_shown) as progress:
        progress.resume_at(num_finished)
        try:
            for number in unfinished:
                began_s = time.monotonic()
                measure_document(number)
                slowest_s = max(slowest_s, time.monotonic() - began_s)
                num_finished += 1
                progress.update(num_finished)
        finally:
            # Also after Ctrl-C, so that no finished document is lost.
            parts.flush()
    return slowest_s


def wait_for_documents(
    phase: str,
    parts: Parts,
    numbers: list[int],
    measure_document: Callable[[int], None],
    slowest_s: float,
) -> None:
    """Wait until other processes have finished these documents. After a while without progress,
    take it that they have died or not begun, and measure their documents here.

    Args:
        phase: The phase of the measurement, `losses` or `recovery`.
        parts: The folder of the measurement.
        numbers: Numbers of the documents to wait for.
        measure_document: Measures one document by its number, and adds it to `parts`.
        slowest_s: Seconds that the slowest document took here. One may take as long elsewhere.
    """
    # Tests set the patience to 0.
    patience_s = max(PATIENCE_S, 4 * slowest_s) if PATIENCE_S else 0.0
    num_missing_before: int | None = None
    last_progress_s = time.monotonic()
    while True:
        missing = sorted(set(numbers) - parts.find_finished(phase))
        if not missing:
            return
        others_progressed = len(missing) != num_missing_before
        num_missing_before = len(missing)
        if others_progressed:
            last_progress_s = time.monotonic()
        elif time.monotonic() - last_progress_s < patience_s:
            time.sleep(0.5)
        else:
            # The last one, as a process that has just begun measures the first.
            measure_document(missing[-1])
            parts.flush()
            # This was no progress of another process. So the next missing document is measured
            # without waiting again.
            num_missing_before -= 1
