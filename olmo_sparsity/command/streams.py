r"""Keep standard output and standard error readable to the end of a command.

    standard output    ResultStream     escapes what a terminal would execute; errors of writing are
                                        UserErrors that name it
    standard error     MessageStream    stops the command when nobody reads it any more

    print("red: \x1b[31m")      prints  red: \u001b[31m       colours of a user's text do nothing
    print("naïve")              prints  na\u00efve            where the terminal has ASCII only
    explain … > /dev/full       UserError: standard output cannot be written: …
    explain … 2>&1 | head -1    the command stops, silently

`prepare_streams` puts both in place of `sys.stdout` and `sys.stderr`; ending.py flushes them.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from olmo_sparsity.base.errors import UserError


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
        """Turn the error of a full disk or a closed stream into a UserError. Let the error of a
        reader that has left pass through."""
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
        # Python has None in place of a stream that the shell has closed.
        stream = getattr(sys, name) or open(number, "w", closefd=False)  # noqa: SIM115 # open until the end
        stream.reconfigure(errors="as JSON")
        setattr(sys, name, ResultStream(stream) if name == "stdout" else MessageStream(stream))


def _occupy_closed_streams() -> None:
    """Give the numbers of streams that the shell has closed to /dev/null: the next file that is
    opened would get them, and with it what a library prints."""
    # Input is opened for writing and output for reading, so that using them stays an error. What is
    # written to standard error is lost.
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, flags), number)


_ALLOWED_UNPRINTABLE = re.compile("(\x1b\\[[01]m|[\n\t])")
"""Unprintable characters that the commands print on purpose: codes of bold type, white space."""


def _escape_unprintable(text: str) -> str:
    """Return a text with escapes of JSON in place of characters that a terminal would execute."""
    # Nearly all texts. The rest of this function looks at each character.
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
