"""Parse the command line of `olmo-sparsity`, and call one function per command.

    olmo-sparsity train mine.yaml --seed=4

    entry → main → build_parser: options.run = run_train, options.config = "mine.yaml",
                                 options.overrides = ["--seed=4"]
                 → run_train(options) → 0, or an exception, of which ending.py makes an exit code

Options are declared in arguments.py. A command is in the module with its name or, such as `train`
and `figure`, in the module of a group (training.py, results.py).

Place in the flow: on top of everything; `entry` is the program `olmo-sparsity`. Large packages are
imported only inside a command, so that `--help` and a mistake in the options take no seconds.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import NoReturn

from olmo_sparsity.base.errors import NO_DOCSTRINGS, DataError, UserError, naming_extras
from olmo_sparsity.base.path_options import check_not_read, check_output_path
from olmo_sparsity.base.renamed import current_words
from olmo_sparsity.command import arguments, ending
from olmo_sparsity.command.compare import run_compare
from olmo_sparsity.command.ending import EXIT_BAD_INPUT, print_error
from olmo_sparsity.command.explain import run_explain
from olmo_sparsity.command.losses import run_losses
from olmo_sparsity.command.measure import run_measure
from olmo_sparsity.command.results import run_figure, run_report
from olmo_sparsity.command.streams import prepare_streams
from olmo_sparsity.command.training import run_configs, run_export, run_prepare, run_train

__all__ = ["EXIT_BAD_INPUT", "entry", "main"]

GOES_ON = "goes on"
"""What a command that keeps what it has done would do after it was stopped, for the message."""

STARTS_AGAIN = "starts again, as a dry run stores nothing"
"""The same of a dry run."""

RESUMED_COMMANDS = ("prepare", "train", "experiment", "measure")
"""Commands that keep what they have done, and go on when they are given again."""


def entry(arguments: list[str] | None = None) -> NoReturn:
    """Run the command that was typed, and exit with its code."""
    gc.set_threshold(10_000)  # imports allocate without garbage: a tenth of the time of a start
    prepare_streams()
    ending.interrupt_on_signals()
    try:
        code = main(arguments)
    except SystemExit as ended:  # by the parser: after --help, or for a mistake
        code = int(ended.code or 0)
    except UserError as error:  # --help could not be written
        code = print_error(str(error))
    except KeyboardInterrupt as error:  # before the command began
        code = ending.exit_code_of(error, again=None)
    except BrokenPipeError as error:  # nobody reads --help; newer versions of Python pass over it
        code = ending.exit_code_of(error, again=None)
    except Exception:
        traceback.print_exc()
        code = ending.EXIT_DEFECT
    code = ending.close_streams(code)
    ending.leave_signals()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # DeepSpeed keeps process groups alive, and with them gloo's threads. If one of them frees a
        # tensor during Python's shutdown, the process aborts, and the launcher fails the job.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return its exit code. `arguments`: words of the command line. None means
    the command line of this process."""
    if sys.flags.optimize > 1:  # the help of options, too, is made of docstrings
        return print_error(NO_DOCSTRINGS)
    parser = build_parser()
    words = sys.argv[1:] if arguments is None else arguments
    options, other_words = parser.parse_known_args(current_words(words))
    # Only commands that read a config take further `--key.sub=value` words.
    takes_keys = "config" in options
    unknown = [word for word in other_words if not (takes_keys and word.startswith("--"))]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides = other_words
    _check_not_blank(parser, options, words)
    _check_given_once(parser, options, words)

    try:
        _check_current_folder()
        for name in ("out", "html"):
            check_output_path(f"--{name}", getattr(options, name, None))
        _check_html_replaces_no_input(options)
        with naming_extras():
            code = options.run(options)
        return ending.flush_results(code)
    except (Exception, KeyboardInterrupt) as error:
        return _exit_code_of(error, options)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, in which each command has the function that runs it."""
    return arguments.build_parser(
        {
            "configs": run_configs,
            "prepare": run_prepare,
            "train": run_train,
            "experiment": _run_experiment,
            "losses": run_losses,
            "export": run_export,
            "explain": run_explain,
            "attribute": _run_attribute,
            "measure": run_measure,
            "figure": run_figure,
            "compare": run_compare,
            "report": run_report,
        }
    )


def _run_experiment(options: argparse.Namespace) -> int:
    """Run the command `experiment`; return the exit code."""
    # Imported here, as it imports the package `experiment`.
    from olmo_sparsity.command.experiment import run_experiment

    return run_experiment(options)


def _run_attribute(options: argparse.Namespace) -> int:
    """Run the command `attribute`; return the exit code."""
    # Imported here, as the package `sources` can be left out of an installation.
    from olmo_sparsity.command.attribute import run_attribute

    return run_attribute(options)


# --- checks of options of several commands --------------------------------------------------------


MAY_BE_BLANK = ("prefix", "slurm", "measure_slurm")
"""Options for which white space, or nothing, is a value."""


def _check_not_blank(
    parser: argparse.ArgumentParser, options: argparse.Namespace, words: list[str]
) -> None:
    """Exit with a message if an option is white space or nothing, as a variable of the shell that
    is not set leaves it. As a path it would mean the current folder.

    Args:
        parser: Prints the message.
        options: The parsed options.
        words: The command line.
    """
    for name, value in vars(options).items():
        values = value if isinstance(value, list | tuple) else [value]
        is_blank = any(isinstance(item, str) and not item.strip() for item in values)
        if is_blank and name not in MAY_BE_BLANK:
            flag = f"--{name.replace('_', '-')}"
            is_option = any(word.partition("=")[0] == flag for word in words)
            shown = flag if is_option else name.upper()
            if isinstance(value, tuple) and len(value) > 1:
                parser.error(f"{shown} has a comma with nothing before or after it; delete it")
            parser.error(f"{shown} is blank; write a value there (is a shell variable unset?)")


def _check_given_once(
    parser: argparse.ArgumentParser, options: argparse.Namespace, words: list[str]
) -> None:
    """Exit with a message if an option that takes one value is given twice: argparse would ignore
    the first. For keys of a config the last one counts, as scripts add theirs to those of a user.

    Args:
        parser: Prints the message.
        options: The parsed options.
        words: The command line.
    """
    count_of = Counter(word.partition("=")[0] for word in words if word.startswith("-"))
    for flag, count in count_of.items():
        value = getattr(options, flag.lstrip("-").replace("-", "_"), None)
        if count > 1 and not isinstance(value, bool | list | None):
            parser.error(f"{flag} is given {count} times; give it once")


def _check_current_folder() -> None:
    """Raise DataError if the current folder is gone. Libraries would fail later, with messages
    about files of their own."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise DataError("the current folder was deleted; `cd` to another one") from None


def _check_html_replaces_no_input(options: argparse.Namespace) -> None:
    """Raise ConfigError if --html is a file that another option names."""
    words: list[str] = []
    for name, value in vars(options).items():
        values = value if isinstance(value, list | tuple) else [value]
        if name != "html":
            words += [word for word in values if isinstance(word, str)]
    check_not_read("--html", getattr(options, "html", None), words)


# --- the end of a command -------------------------------------------------------------------------


def _exit_code_of(error: BaseException, options: argparse.Namespace) -> int:
    """Print what stopped a command, and what the same command would do now; return the exit code.

    Args:
        error: What was raised.
        options: The options of the command.
    """
    if getattr(options, "questions", None) is not None:
        # Not the code of a stopped training, which SLURM's scripts submit again.
        return ending.exit_code_of(error, again=GOES_ON, code=ending.EXIT_INTERRUPTED)
    if options.command in RESUMED_COMMANDS and getattr(options, "dry_run", False):
        return ending.exit_code_of(error, again=STARTS_AGAIN, code=ending.EXIT_INTERRUPTED)

    keeps_work = options.command in RESUMED_COMMANDS
    if options.command == "losses":
        keeps_work = getattr(options, "out", None) is not None  # without a folder nothing is kept
    return ending.exit_code_of(error, again=GOES_ON if keeps_work else None)
