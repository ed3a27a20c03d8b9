"""Map an error to an exit code and a one-line message, and write what is left of the results.

Place in the flow: cli.py calls **`exit_code_of`** for whatever a command raises:

    what has ended the command   exit code and message
    UserError, memory, disk      2, with a line that says what to do
    a signal                     75 or 130, with a line that says what the same command would do
    a reader that has left       141, silently
    anything else                1: a bug of ours, with its traceback

docs/train.md lists the codes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys

from olmo_sparsity.base.errors import (
    ReportedElsewhere,
    UserError,
    is_out_of_memory,
    one_line,
    readable,
)
from olmo_sparsity.base.launch import EXIT_STOPPED
from olmo_sparsity.command.streams import ReaderHasLeft

EXIT_DEFECT = 1
"""The exit code after an error of ours, as Python has it after an exception."""

EXIT_BAD_INPUT = 2
"""The exit code after an error that the user can fix, as argparse has it after a wrong option."""

EXIT_INTERRUPTED = 130
"""The exit code of a stopped command that keeps nothing: 128 + 2, the number of SIGINT, as shells
have it."""

EXIT_BROKEN_PIPE = 141
"""The exit code where nobody reads the output any more: 128 + 13, the number of SIGPIPE, as shells
have it."""


def print_error(message: str, code: int = EXIT_BAD_INPUT) -> int:
    """Print a line on standard error, and return the exit code."""
    with contextlib.suppress(OSError, ReaderHasLeft):  # stderr may be closed
        print(f"olmo-sparsity: {readable(message)}", file=sys.stderr, flush=True)
    return code


def interrupt_on_signals() -> None:
    """Let SIGTERM, and SIGUSR2, which SLURM's scripts ask for before a time limit, end a command as
    Ctrl-C does. Training and experiments have handlers of their own while they run."""

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # once: the command is ending then
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, interrupt)


def leave_signals() -> None:
    """Let signals end the process as the system does: the command is over, and an exception during
    Python's shutdown would be printed with its traceback."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def exit_code_of(error: BaseException, *, again: str | None, code: int = EXIT_STOPPED) -> int:
    """Print a line for an error that is not a defect of ours, and return the exit code. Raise a
    defect again.

    Args:
        error: What was raised.
        again: What the same command would do after it was stopped, such as "goes on"; None means
            that it would start anew.
        code: The exit code of a stopped command that does not start anew.
    """
    if isinstance(error, ReportedElsewhere):
        return error.exit_code
    if isinstance(error, UserError):
        return print_error(str(error), error.exit_code)
    if isinstance(error, ReaderHasLeft):
        return EXIT_BROKEN_PIPE
    if isinstance(error, KeyboardInterrupt):
        if again is not None:
            return print_error(f"stopped; the same command {again}", code)
        return print_error("stopped", EXIT_INTERRUPTED)
    if is_out_of_memory(error):
        reason = one_line(error) or type(error).__name__
        remedy = "take smaller batches (training.micro_batch_size, --batch-tokens) or sequences"
        return print_error(f"out of memory ({reason}); {remedy} (training.length, --long)")
    if isinstance(error, OSError):
        return _exit_code_of_os_error(error)
    if isinstance(error, ValueError) and str(error) == "embedded null byte":
        return print_error("a path holds a null byte; write it without")
    raise error


def _exit_code_of_os_error(error: OSError) -> int:
    """Print which file could not be read or written, and return the exit code. Raise the error
    again if no file is to blame."""
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    if error.filename is not None:
        return print_error(f"{error.filename}: {error.strerror}")
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise error
    return print_error(f"a file could not be written: {error.strerror}; free space and start again")


# --- the end of both streams ----------------------------------------------------------------------


def flush_results(code: int) -> int:
    """Write what is left of the results, so that errors are raised here, for `exit_code_of`, and
    not during Python's shutdown. Return the exit code of a command that ends with `code`."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has read enough
        return code or EXIT_BROKEN_PIPE
    if not getattr(sys.stdout, "has_reader", True):
        return code or EXIT_BROKEN_PIPE
    return code


def close_streams(code: int) -> int:
    """Keep Python's shutdown from reporting write errors a second time. Return the exit code of a
    command that ends with `code`."""
    try:
        code = flush_results(code)
    except UserError as error:
        code = code or print_error(str(error))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, UserError, ReaderHasLeft):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code
