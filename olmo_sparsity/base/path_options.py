"""Check paths that a user has passed as options, before anything is computed for them.

    path_of("out", 3)                            # ConfigError: out=3 must be a path, …
    path_of("out", "a" * 300)                    # ConfigError: out=aaa… has a name of 300 bytes, …
    check_suffix("--html", "page.htm", ".html")  # ConfigError: --html=page.htm must end in .html

Each function takes the name of the option or argument, with which its message begins. files.py has
what reads and writes the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from olmo_sparsity.base.errors import ConfigError, printable

LONGEST_NAME = 255
"""Bytes. The longest name of a file or folder on Linux, where an é takes two bytes."""


def path_of(name: str, path: object) -> Path:
    """Return a path that a user has passed as the argument `name`. Raise ConfigError if it is not a
    path, if it is blank, which would mean the current folder, or if a name in it is too long."""
    if isinstance(path, bytes) or not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{name}={path!r:.60} must be a path, a string or pathlib.Path")
    text = os.fspath(path)
    # A PathLike of the user's own may return bytes.
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{name}={text!r:.60} is blank; pass the path of a file or folder")
    _check_lengths_of_names(name, text)
    return Path(text)


def _check_lengths_of_names(name: str, path: str) -> None:
    """Raise ConfigError if a file or folder of a path has a longer name than disks store. Python's
    own error, raised by the first look at the disk, names neither the argument nor the limit."""
    for part in Path(path).parts:
        # Half of a surrogate pair cannot be encoded; `check_encodable` has a message for it.
        num_bytes = len(part.encode(errors="replace"))
        if num_bytes > LONGEST_NAME:
            raise ConfigError(
                f"{name}={printable(path)[:60]}… has a name of {num_bytes} bytes, and disks store "
                f"{LONGEST_NAME} at most; pass a shorter one"
            )


def check_suffix(name: str, path: str | os.PathLike[str], *suffixes: str) -> None:
    """Raise ConfigError if a file to be written has none of the suffixes."""
    if path_of(name, path).suffix not in suffixes:
        raise ConfigError(f"{name}={path} must end in {' or '.join(suffixes)}")


def check_output_path(name: str, path: str | None) -> None:
    """Raise ConfigError if a path to be written, such as that of `--out`, has a name that is too
    long, or begins with ~. A shell replaces ~ only where a word begins, so not in
    `--out=~/results`, and a folder named ~ would be made."""
    if path is None:
        return
    _check_lengths_of_names(name, path)
    if path.startswith("~"):
        full = os.path.expanduser(path)
        raise ConfigError(f"{name}={path}: ~ is not replaced here; write the whole path, {full}")


def check_not_read(name: str, path: str | None, inputs: Iterable[str]) -> None:
    """Raise ConfigError if a file to be written is one that the command reads, which would be lost.
    `inputs`: the words of other options, each of which may name a file: FILE, @FILE or
    NAME=FILE."""
    if path is None or not os.path.exists(path):
        return
    for word in inputs:
        for file in (word, word.removeprefix("@"), word.partition("=")[2]):
            # The same file may have two names, by a link or by "./".
            if os.path.exists(file) and os.path.samefile(file, path):
                problem = f"{name}={path} would replace {file}, which is read"
                raise ConfigError(f"{problem}; write to another file")


def check_can_be_reopened(name: str, path: str) -> None:
    """Raise ConfigError if a file that is read several times is a pipe or standard input (`-`).
    Opened again, a pipe is empty, or waits for ever."""
    # A missing file, and a folder, get the message of the function that reads them.
    if os.path.isdir(path):
        return
    is_pipe = os.path.exists(path) and not os.path.isfile(path)
    if is_pipe or path == "-":
        raise ConfigError(
            f"{name}={path} is read several times, and a pipe only once; write it to a file"
        )
