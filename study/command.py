"""Run a module of the study as a command, with the messages and exit codes of `olmo-sparsity`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from olmo_sparsity.base.errors import naming_extras
from olmo_sparsity.command.ending import exit_code_of, flush_results, interrupt_on_signals
from olmo_sparsity.command.streams import prepare_streams


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, list[str]], None],
    words: list[str] | None,
    *,
    takes_settings: bool = False,
    again: str | None = None,
) -> int:
    """Return the exit code. `run` gets the options and the `--key=value` words; `again`: what the
    same command does after it was stopped."""
    options, settings = parser.parse_known_args(words)
    unknown = [word for word in settings if not takes_settings or not word.startswith("--")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        with naming_extras():
            run(options, settings)
        return flush_results(0)
    except (Exception, KeyboardInterrupt) as error:
        return exit_code_of(error, again=again)


def enter(main: Callable[[], int]) -> NoReturn:
    prepare_streams()
    interrupt_on_signals()
    sys.exit(main())
