"""Map an error to an exit code and a one-line message.

Place in the flow: beneath the command line. Exit codes: 0 done; 2 bad input; 75 stopped by a
signal, the same command resumes; 76 another process of the run died, the same command resumes from
the last checkpoint; 130 stopped by Ctrl-C without a way to resume; 141 the reader of the output has
closed it. Anything else is a bug of ours, with its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from olmo_sparsity.errors import ReportedElsewhere, UserError, is_out_of_memory, printable

EXIT_DEFECT = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75
EXIT_LOST_PROCESS = 76
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def print_error(message: str, code: int = EXIT_BAD_INPUT) -> int:
    with contextlib.suppress(OSError):  # stderr may be closed
        print(f"olmo-sparsity: {printable(message)}", file=sys.stderr, flush=True)
    return code


def exit_code_of(error: BaseException, *, resumes: bool) -> int:
    """Print a line for any error that is not a defect; defects are raised again. `resumes`: whether
    the same command resumes where it was stopped."""
    if isinstance(error, ReportedElsewhere):
        return EXIT_BAD_INPUT
    if isinstance(error, UserError):
        return print_error(str(error))
    if isinstance(error, KeyboardInterrupt):
        if resumes:
            return print_error("stopped; the same command goes on", EXIT_STOPPED)
        return print_error("stopped", EXIT_INTERRUPTED)
    if is_out_of_memory(error):
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return print_error(
            f"out of memory ({reason}); take smaller batches (training.micro_batch_size, "
            "training.batch_size, --batch-tokens), shorter sequences (training.length, --long), a "
            "smaller model, or a machine with more memory"
        )
    if isinstance(error, OSError):
        return _exit_code_of_os_error(error)
    if isinstance(error, ValueError) and str(error) == "embedded null byte":
        return print_error("a path holds a null byte; write it without")
    raise error


def _exit_code_of_os_error(error: OSError) -> int:
    if isinstance(error, BrokenPipeError) and error.filename in STREAMS:
        return EXIT_BROKEN_PIPE
    if error.filename is not None:
        return print_error(f"{error.filename}: {error.strerror}")
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise error
    return print_error(f"a file could not be written: {error.strerror}; free space and start again")


# --- standard output and error ------------------------------------------------------------------

STREAMS = ("stdout", "stderr")


class NamedStream:
    """A stream whose errors have a file name, as those of files do."""

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
        setattr(sys, name, NamedStream(getattr(sys, name), name))


def flush_results() -> None:
    """Raise write errors here, for `exit_code_of`, and not during Python's shutdown."""
    with contextlib.suppress(BrokenPipeError):  # the reader has read enough
        sys.stdout.flush()


def close_streams() -> None:
    """Keep Python's shutdown from reporting write errors a second time."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
