"""Errors that the user can fix: one line with cause and remedy, exit code 2, no traceback."""


class UserError(Exception):
    """Reported by the command line in one line. Violated invariants are `assert`s."""


class ConfigError(UserError):
    """A setting is wrong: names the field, its value and what to do."""


class DataError(UserError):
    """An input file is wrong: names the file (and line) and what to do."""


class ReportedElsewhere(UserError):
    """Another process of the same run has reported the error; this one exits silently."""


def printable(text: str) -> str:
    """On one line and without control characters, which a terminal would execute."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch has an exception type for GPU memory; for CPU memory only the message differs."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = ("can't allocate memory", "DefaultCPUAllocator", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
