"""Map an error to an exit code and a one-line message, and keep streams readable to the end.

Place in the flow: cli.py calls **`exit_code_of`** for whatever a command raises:

    what has ended the command   exit code and message
    UserError, memory, disk      2, with a line that says what to do
    a signal                     75 or 130, with a line that says what the same command would do
    a reader that has left       141, silently
    anything else                1: a bug of ours, with its traceback

docs/train.md lists the codes.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from olmo_sparsity.base.errors import (
    ReportedElsewhere,
    UserError,
    is_out_of_memory,
    one_line,
    readable,
)
from olmo_sparsity.base.launch import EXIT_STOPPED

EXIT_DEFECT = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


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

    error: What was raised.
    again: What the same command would do after it was stopped, such as "goes on"; None: it would
        start anew.
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


# --- standard output and error ------------------------------------------------------------------


class ResultStream:
    """Standard output, in which what a terminal would execute or cannot show is replaced by escapes
    of JSON: a text of a user or a model must not move the cursor or change colours. An error
    of writing names standard output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.has_reader = True
        """Whether all was read so far. The parser passes over an error when it prints --help."""

    def write(self, text: str) -> int:
        with self._naming_errors():
            return self._stream.write(_escape_unprintable(text))

    def flush(self) -> None:
        with self._naming_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Turn the error of a full disk or a closed stream into a UserError. A reader that has left
        is no such error."""
        try:
            yield
        except BrokenPipeError:
            self.has_reader = False
            raise
        except OSError as error:
            if error.errno == errno.EBADF:
                reason = "it is closed; redirect it to a file with >"
            else:
                reason = f"{error.strerror}; free space, or redirect it to another file"
            raise UserError(f"standard output cannot be written: {reason}") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ReaderHasLeft(KeyboardInterrupt):
    """Nobody reads standard error any more, as in `… 2>&1 | head -1`, so the command stops as after
    Ctrl-C. A BrokenPipeError would be taken for an error of the file that is being read: code that
    loads a model or a text turns any Exception into a message about its file."""


class MessageStream:
    """Standard error, which raises ReaderHasLeft once, and drops what is written afterwards."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_reader = True

    def write(self, text: str) -> int:
        with self._stopping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._stopping():
            self._stream.flush()

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """Raise ReaderHasLeft in place of the first BrokenPipeError."""
        try:
            yield
        except BrokenPipeError:
            if self._has_reader:
                self._has_reader = False
                raise ReaderHasLeft from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def prepare_streams() -> None:
    """Let standard output and error replace characters that their encoding lacks, such as ASCII, by
    escapes of JSON."""
    codecs.register_error("as JSON", _escape_unencodable)
    _occupy_closed_streams()
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name) or open(number, "w", closefd=False)  # noqa: SIM115 # open until the end
        stream.reconfigure(errors="as JSON")
        setattr(sys, name, ResultStream(stream) if name == "stdout" else MessageStream(stream))


def _occupy_closed_streams() -> None:
    """Give the numbers of streams that the shell has closed to /dev/null: the next file that is
    opened would get them, and with it what a library prints. Reading closed input and writing
    closed output stay errors; messages are lost."""
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, flags), number)


_ALLOWED_UNPRINTABLE = re.compile("(\x1b\\[[01]m|[\n\t])")
"""What we print ourselves and is not printable: codes of bold type, and white space."""


def _escape_unprintable(text: str) -> str:
    """Return a text with escapes of JSON in place of characters that a terminal would execute."""
    if text.replace("\n", "").isprintable():
        return text
    parts = _ALLOWED_UNPRINTABLE.split(text)
    return "".join(
        part if _ALLOWED_UNPRINTABLE.fullmatch(part) else _escape_all(part) for part in parts
    )


def _escape_all(text: str) -> str:
    """Return a text with an escape in place of each character that is not printable."""
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Return escapes for what cannot be encoded, and where encoding goes on: the interface of
    `codecs.register_error`."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


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
