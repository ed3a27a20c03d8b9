"""Read one text from a file, from standard input, or as it stands on the command line.

read_text("notes.txt")                       the file notes.txt
read_text("-")                               standard input
read_text("Who opened it?", inline=True)     the text itself
read_text("@prompt.txt", inline=True)        the file prompt.txt
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.files import open_standard_input
from olmo_sparsity.text.records import LARGEST_DOCUMENT


def read_text(path: str, inline: bool = False) -> str:
    """Return a text that a user named on the command line. Raise DataError if it is not text in
    UTF-8, or empty.

    Args:
        path: The name of a file, or `-` for standard input.
        inline: Whether `path` is the text itself, unless it begins with @, as in @FILE.
    """
    if inline:
        if not path.startswith("@"):
            return path
        path = path.removeprefix("@")
    try:
        with _open_bytes(path) as file:
            # One byte more than is allowed shows that there is more.
            raw = file.read(LARGEST_DOCUMENT + 1)
        if len(raw) > LARGEST_DOCUMENT:
            raise DataError(f"{path} has more than {LARGEST_DOCUMENT:,} bytes; pass a part of it")
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 from byte {error.start + 1:,} on") from None
    if "\0" in text[:200]:
        raise DataError(f"{path} is not text in UTF-8: it has a zero byte")
    if not text.strip():
        raise DataError(f"{path} is empty; write the text into it, or pass another file")
    return text


def _open_bytes(path: str) -> AbstractContextManager[BinaryIO]:
    """Open a file, or standard input for `-`, which stays open."""
    if path != "-":
        return Path(path).open("rb")
    return nullcontext(open_standard_input() if sys.stdin is None else sys.stdin.buffer)
