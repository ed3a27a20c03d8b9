"""Let signals ask a run to save and stop, instead of killing it.

    with stop_signals(on_request) as stop_request:
        ...                            # `kill -TERM` calls on_request() at once
        stop_request.signal_name       # "SIGTERM": the run saves and stops after this step

loop.py enters it around all steps, and steps.py asks after each of them.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from olmo_sparsity.base.launch import STOP_SIGNALS, handling


class StopRequest:
    """Whether a signal has asked this process to stop."""

    signal_name = ""
    """The name of the signal; empty as long as there was none."""


@contextlib.contextmanager
def stop_signals(on_request: Callable[[], None]) -> Iterator[StopRequest]:
    """Inside, SIGTERM, SIGINT and SIGUSR2 ask the run to save and stop after the current step. A
    second SIGINT interrupts at once, except while a checkpoint is being written.

    Args:
        on_request: Called at each signal, at once: the process may be killed before it has saved.
    """
    stop_request = StopRequest()

    def request(number: int, frame: FrameType | None) -> None:
        # Who presses Ctrl-C again does not want to wait. (`CheckpointWriter` completes a checkpoint
        # that is being written all the same.)
        if number == signal.SIGINT and stop_request.signal_name:
            raise KeyboardInterrupt
        stop_request.signal_name = signal.Signals(number).name
        on_request()

    with handling(STOP_SIGNALS, request):
        yield stop_request
