"""Errors that are the user's to mend: one line with cause and remedy, exit code 2, no traceback."""


class UserError(Exception):
    """Anything the command line reports in one line. An invariant of ours is an `assert`."""


class ConfigError(UserError):
    """A setting is wrong: names the field, its value and what to do."""


class DataError(UserError):
    """An input file is wrong: names the file (and line) and what to do."""


class SaidElsewhere(UserError):
    """Another process of the same run has said what is wrong; this one leaves in silence."""


def printable(text: str) -> str:
    """For a terminal, on one line: a name may hold characters that it would take for orders."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch has a type of its own for a GPU's memory; a CPU's is told by words alone."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = ("can't allocate memory", "DefaultCPUAllocator", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
