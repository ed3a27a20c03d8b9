"""Run commands in processes of their own, several at once, and stop them when a signal comes.

    run_processes([Command(["sleep", "1"]), Command(["false"])], num_at_once=2)
        → Ending(exit_codes=[0, 1], is_stopped=False)

here.py runs the jobs of an experiment so.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from olmo_sparsity.base.launch import EXIT_STOPPED, STOP_SIGNALS, handling


class Command(NamedTuple):
    """A command that is run in a process of its own."""

    words: Sequence[str]
    variables: Mapping[str, str] = {}
    """Variables of the environment, next to those of this process."""


class Ending(NamedTuple):
    """How several processes have ended."""

    exit_codes: list[int]
    is_stopped: bool
    """Whether a signal to stop came, to this process or to one of them: they may have ended well
    all the same."""


def run_processes(commands: Sequence[Command], num_at_once: int) -> Ending:
    """Run commands, and wait for them. A signal to stop is passed on to those that run, and no
    further ones begin.

    Args:
        commands: The commands, in order.
        num_at_once: Number of commands that run at once.
    """
    children: list[subprocess.Popen] = []
    signals: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        signals.append(number)
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    with handling(STOP_SIGNALS, pass_on):
        for words, variables in commands:
            # Polled, as `wait` of one child would miss the end of another.
            while sum(child.poll() is None for child in children) >= num_at_once:
                time.sleep(0.05)
            if signals:
                break
            # In its own process group, or Ctrl-C would reach it twice, and the second kills it.
            child = subprocess.Popen(words, env=os.environ | variables, process_group=0)
            children.append(child)
            if signals:  # it came while the process was started
                child.send_signal(signals[-1])
        codes = [child.wait() for child in children]
    return Ending(codes, is_stopped=bool(signals) or EXIT_STOPPED in codes)
