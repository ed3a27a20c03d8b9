"""How a command ends: its exit code, and the one line that says why.

Place in the flow: beneath the command line. Exit codes: 0 done; 2 the input must be mended; 75
stopped by a signal, the same command goes on; 76 another process of the run died, the same command
goes on from the last checkpoint; 130 and 141, as shells have them: stopped by Ctrl-C where nothing
goes on, and nobody reads what is written any more; anything else is a bug of ours, with its
traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from olmo_sparsity.errors import SaidElsewhere, UserError, is_out_of_memory, printable

EXIT_DEFECT = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75
EXIT_LOST_PROCESS = 76
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141


def complain(message: str, code: int = EXIT_BAD_INPUT) -> int:
    with contextlib.suppress(OSError):  # nobody reads it
        print(f"olmo-sparsity: {printable(message)}", file=sys.stderr, flush=True)
    return code


def answer(error: BaseException, *, resumes: bool) -> int:
    """One line for whatever is not a defect. `resumes`: whether the command, typed again, goes on
    where it was stopped."""
    if isinstance(error, SaidElsewhere):
        return EXIT_BAD_INPUT
    if isinstance(error, UserError):
        return complain(str(error))
    if isinstance(error, KeyboardInterrupt):
        if resumes:
            return complain("stopped; the same command goes on", EXIT_STOPPED)
        return complain("stopped", EXIT_INTERRUPTED)
    if is_out_of_memory(error):
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return complain(
            f"out of memory ({reason}); take smaller batches (training.micro_batch_size, "
            "training.batch_size, --batch-tokens), shorter sequences (training.length, --long), a "
            "smaller model, or a machine with more memory"
        )
    if isinstance(error, OSError):
        return _answer_os(error)
    raise error


def _answer_os(error: OSError) -> int:
    if isinstance(error, BrokenPipeError) and error.filename in STREAMS:
        return EXIT_UNREAD
    if error.filename is not None:
        return complain(f"{error.filename}: {error.strerror}")
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    return complain(f"a file could not be written: {error.strerror}; free space and start again")


# --- where results and messages go --------------------------------------------------------------

STREAMS = ("stdout", "stderr")


class Named:
    """A stream whose errors say which it is, as those of files do."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        with self._naming():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._naming():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._name
            raise


def name_streams() -> None:
    for name in STREAMS:
        setattr(sys, name, Named(getattr(sys, name), name))


def flush_results() -> None:
    """What cannot be written is to be said by `answer`, not by Python as it ends."""
    with contextlib.suppress(BrokenPipeError):  # whoever reads it has read enough
        sys.stdout.flush()


def let_go_of_streams() -> None:
    """As a process ends: what could not be written has been said; Python would say it again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
