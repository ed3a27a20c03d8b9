"""Define the errors that a user can fix: one line with cause and remedy, exit code 2, no traceback.

    UserError
      ConfigError            a setting is wrong
      DataError              an input file is wrong
        UnreadableNowError   the disk does not let a file be read now, and it may be intact
      ReportedElsewhere      another process has printed the error

    raise ConfigError("k=0 must be at least 1; raise it")
    olmo-sparsity: k=0 must be at least 1; raise it       one line, exit code 2

Anything else that is raised is a defect of ours, and keeps its traceback. After the classes come
functions that raise these errors for usual mistakes (`check_…`), that turn errors of libraries into
them (`naming_…`), and that write messages on one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class UserError(Exception):
    """An error that a user can fix, which the command line prints in one line. (A violated
    invariant of ours is an `assert`.)"""

    diverged_at: int | None = None
    """If a training has diverged: the first step with a number that is not finite."""

    errno: int | None = None
    """If a file could not be read or written: the system's number of the error."""

    exit_code: int = 2
    """The exit code of the command that ends with this error."""

    @property
    def problem(self) -> str:
        """Return what is wrong, without what to do, which follows a semicolon in our messages."""
        return str(self).partition(";")[0]


class ConfigError(UserError):
    """A setting is wrong. The message names the field, its value and what to do."""


class DataError(UserError):
    """An input file is wrong. The message names the file, its line if it has lines, and what to
    do."""


class UnreadableNowError(DataError):
    """A file cannot be read now, because of the disk or of permissions. It may be intact."""

    def __init__(self, path: object, reason: object, errno: int | None = None) -> None:
        """Describe the error.

        Args:
            errno: The system's number of the error, by which retry.py knows whether it may pass.
        """
        remedy = "it may be intact: restore access (mount? permission?), then start again"
        super().__init__(f"{path} cannot be read now ({reason}); {remedy}")
        self.errno = errno


class ReportedElsewhere(UserError):
    """Another process of the same run has reported the error; this one exits silently."""


# --- usual mistakes -------------------------------------------------------------------------------


def check_type(
    name: str, value: object, kinds: type | tuple[type, ...], accepted: str, several: bool = False
) -> None:
    """Raise ConfigError unless an argument is of one of these types. True and False are accepted if
    `bool` is among the types, not as numbers.

    Args:
        name: The name of the argument.
        accepted: What it must be, in words.
        several: Whether it must be a list or tuple of values of these types.
    """
    # What is checked: the items of a list, or the value itself. None: it should be a list, and is
    # none. (A text is a sequence of letters, but no list of texts.)
    items: list[object] | None = [value]
    if several:
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        items = list(value) if is_list else None  # type: ignore[call-overload] # a Sequence

    accepted_kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    # To Python True is an int, too.
    accepts_bool = bool in accepted_kinds
    if items is not None and all(
        isinstance(item, accepted_kinds) and (accepts_bool or not isinstance(item, bool))
        for item in items
    ):
        return

    shown = printable(repr(value))
    if len(shown) > 60:
        shown = f"{shown[:60]}…"
    raise ConfigError(f"{name}={shown} must be {accepted}")


CHOSEN_BY_US = {"device": "auto", "dtype": "auto", "prefix": "auto"}
"""Defaults of options that are not None. (That of `device_map` is None: there "auto" is a choice of
the user, with which a model is spread over GPUs.)"""


def check_unset(reason: str, **options: object) -> None:
    """Raise ConfigError if any of these options is set, as it would have no effect.

    Args:
        reason: Why they have no effect.
        options: The value of each option, by its name.
    """
    are_set = [
        f"{name}={value}" for name, value in options.items() if value != CHOSEN_BY_US.get(name)
    ]
    if are_set:
        remedy = "omit it" if len(are_set) == 1 else "omit them"
        raise ConfigError(f"{', '.join(are_set)}: {reason}; {remedy}")


def check_encodable(text: str, name: str) -> None:
    """Raise DataError if a string holds half of a surrogate pair, which no tokenizer reads and no
    file in UTF-8 stores. JSON can spell it, and Python reads it from names that are not UTF-8.
    `name`: what the error calls the string."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name}: {text[error.start]!a}, its character {error.start + 1:,}, is half of a "
            "surrogate pair; correct it, for example with text.encode(errors='replace').decode()"
        ) from None


# --- errors of libraries and files ----------------------------------------------------------------


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Put the file and line that is being read, such as `questions.jsonl:3`, before the message of
    an error."""
    try:
        yield
    except UserError as error:
        error.args = (f"{place}: {error}",)
        raise


def unreadable(path: str | Path, error: Exception) -> DataError:
    """Return the error for a file that a library cannot read."""
    # safetensors writes files that their owner alone may read, and then calls them missing.
    if os.path.exists(path) and not os.access(path, os.R_OK):
        return UnreadableNowError(path, "permission denied")
    return DataError(f"'{path}' cannot be read ({one_line(error)}); write or download it again")


class Extra(NamedTuple):
    """An extra of pyproject.toml: packages that only one feature needs."""

    feature: str
    """What needs it, for the message."""

    modules: tuple[str, ...]
    """The modules that it installs, of which one is missing without it."""


EXTRAS = {
    "train": Extra("training, and what was trained here,", ("accelerate", "deepspeed", "olmo")),
    "data": Extra("text of the hub", ("datasets", "zstandard")),
    "gguf": Extra("a GGUF file", ("gguf",)),
    "llama": Extra("llama:FILE.gguf", ("llama_cpp",)),
    "peft": Extra("a PEFT adapter", ("peft",)),
    "tensorboard": Extra("logging.tensorboard=true", ("tensorboard",)),
    "wandb": Extra("logging.wandb_project", ("wandb",)),
    "lm_eval": Extra("evaluation.lm_eval", ("lm_eval",)),
}
"""The extras, by the name with which pip installs them."""


@contextmanager
def naming_extras() -> Iterator[None]:
    """Turn the error that a module is missing into one that says which extra installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        for name, extra in EXTRAS.items():
            if missing in extra.modules:
                raise ConfigError(
                    f"{extra.feature} needs the extra {name}: pip install 'olmo-sparsity[{name}]'"
                ) from None
        raise


NO_DOCSTRINGS = (
    "python -OO (PYTHONOPTIMIZE=2) removes docstrings, and transformers builds its models from "
    "them; run python, or python -O"
)


@contextmanager
def naming_panics(origin: str) -> Iterator[None]:
    """Turn a failure of the tokenizers library into a DataError. Its panics, such as that of a
    regular expression that never ends, are a BaseException, not an Exception. `origin`: where the
    tokenizer is from."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
            raise
        reason = one_line(f"{type(error).__name__}: {error}")
        raise DataError(
            f"{origin}: its tokenizer cannot read the text ({reason}); correct its tokenizer.json"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory is full.

    PyTorch has an exception type for GPU memory. For CPU memory, and for memory that CUDA's
    libraries require by themselves, only the message tells."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = (
        "can't allocate memory",
        "DefaultCPUAllocator",
        "Storage size calculation overflowed",
        "_STATUS_ALLOC_FAILED",
        "out of memory",
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


# --- messages on one line -------------------------------------------------------------------------


def one_line(error: object) -> str:
    """Return the beginning of a library's message, which may have many lines."""
    return " ".join(str(error).split())[:300]


def printable(text: str) -> str:
    """Return a text on one line and without control characters, which a terminal would execute."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


LONGEST_WORD = 300
"""The largest number of letters of a word that a message shows in full. Paths have fewer."""


def readable(message: str) -> str:
    """Return a message as one line of printable characters. A word of thousands of letters, such as
    a mistyped number, is cut."""
    cut = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda match: f"{match[0][:60]}…", message)
    return printable(cut)
