"""Hold what the options of all commands have in common: the parser, and texts of --help.

arguments.py and attribute_arguments.py declare the options with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NoReturn

from olmo_sparsity.command.ending import print_error


class Parser(argparse.ArgumentParser):
    """A parser whose errors look like those of the commands: one line, and exit code 2."""

    add = argparse.ArgumentParser.add_argument  # a short name, for many lines below

    def error(self, message: str) -> NoReturn:
        self.exit(print_error(f"{message} ({self.prog} --help says more)"))


# Texts of --help that several commands share.

TOKENIZER = "of a model on a server: a folder, a GGUF file or a hub name"
MODEL = (
    "run, checkpoint, Hugging Face folder, .gguf file or hub name (NAME@REVISION); smollm2: one "
    "of 135M parameters, downloaded once; demo: a tiny one that is installed"
)

AT = "targets: words, /a regular expression/ or tokens FIRST:END; may be given several times"
AT_FILE = "@FILE reads it from a file"


def add_documented(sub: Parser, help: Mapping[str, str], **metavars: str) -> None:
    """Add options that are named like arguments of a function, with the help of its docstring.

    Args:
        sub: The parser of the command.
        help: What the docstring says of each argument (`arguments_of`).
        metavars: The options to add, each with what --help calls its value.
    """
    for name, metavar in metavars.items():
        sub.add(f"--{name}", metavar=metavar, help=help[name].replace("%", "%%"))


def add_shard(sub: Parser, condition: str = "") -> None:
    """Add the option --shard.

    Args:
        sub: The parser of the command.
        condition: With which other option it has an effect, for the help.
    """
    sub.add(
        "--shard",
        metavar="I/N",
        help=f"{condition}i/n: the i-th (from 0) of n processes; the last one writes the results "
        "(the tasks of a SLURM array or of srun take theirs by themselves)",
    )
