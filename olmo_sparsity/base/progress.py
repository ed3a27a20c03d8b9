"""Print messages and progress to stderr; stdout is for results.

    say("training a tokenizer of 512 tokens")        one line
    Progress("training", total=1000, unit="steps")   a line that is replaced; in a log, new lines

Imports nothing of ours but errors.
"""

from __future__ import annotations

import shutil
import sys
import time

from olmo_sparsity.base.errors import printable


class Progress:
    """Prints how far a long task is: on a terminal one line that is replaced, in a log a line every
    30 seconds.

        with Progress("training", total=1000, unit="steps") as progress:
            progress.update(10, loss="3.21")

        training · 10/1,000 steps · loss 3.21 · 4.97 steps/s · 3 min 19 s left

    A task whose units take minutes calls `begin` before each of them, too, so that a log shows
    which one is under way."""

    LOG_EVERY_S = 30.0
    TERMINAL_EVERY_S = 0.1
    """The shortest times between two lines of `update`, in a log and on a terminal."""

    LEAST_PAUSE_S = 1.0
    """The shortest time between two lines of `begin` in a log, so that short units are not listed
    one by one."""

    def __init__(self, title: str, total: int | None, unit: str, *, enabled: bool = True) -> None:
        """Begin to count.

        Args:
            title: What is done, for each line.
            total: The number of units in all; None if it is unknown, and no time left is shown.
            unit: What is counted, such as "steps".
            enabled: Whether anything is printed. Of several processes one does it.
        """
        self.title = title
        self.total = total
        self.unit = unit
        self.enabled = enabled
        self.done = 0
        self.done_at_start = 0
        """Units that an earlier run has done. The rate does not count them."""

        self.is_terminal = sys.stderr.isatty()
        self.pause_s = self.TERMINAL_EVERY_S if self.is_terminal else self.LOG_EVERY_S
        # Times of time.perf_counter. A terminal shows the first update at once; a log, which keeps
        # its lines, after a pause.
        self.started_at = time.perf_counter()
        self.shown_at = -float("inf") if self.is_terminal else self.started_at
        self.begun_at = -float("inf")
        """When `begin` last printed a line; minus infinity if it was not called."""

        self.text = ""
        """What `update` showed last, without the time left."""

    def __enter__(self) -> Progress:
        return self

    def resume_at(self, done: int) -> None:
        """Show the progress of an earlier run as done, without counting it in the rate."""
        self.done = done
        self.done_at_start = done

    def skip(self, num_units: int) -> None:
        """Show the next units as done by an earlier run, without counting them in the rate."""
        self.done += num_units
        self.done_at_start += num_units

    def update(self, done: int, **values: str) -> None:
        """Set how many units are done, and show it unless a line was shown just now. `values`: more
        values to show, by their names."""
        self.done = done
        now = time.perf_counter()
        elapsed_s = now - self.started_at
        rate = (done - self.done_at_start) / elapsed_s if elapsed_s > 0 else 0.0

        parts = [self.title, f"{self._count_of(done)} {self.unit}"]
        for name, value in values.items():
            parts.append(f"{name.replace('_', ' ')} {value}")
        if rate > 0:
            shown_rate = f"{rate:,.3g}" if rate < 1e3 else f"{rate:,.0f}"
            parts.append(f"{shown_rate} {self.unit}/s")
        # Without the time left, as `__exit__` shows this text in its last line.
        self.text = printable(" · ".join(parts))
        time_left = ""
        if rate > 0 and self.total and done < self.total:
            time_left = f" · {format_duration((self.total - done) / rate)} left"

        # In a log, `begin` prints a line for each unit in place of those by time.
        has_line_of_unit = not self.is_terminal and self.begun_at > -float("inf")
        if now - self.shown_at >= self.pause_s and not has_line_of_unit:
            self.shown_at = now
            self._show(self.text + time_left)

    def begin(self, description: str) -> None:
        """Show which unit begins: on a terminal in the line that is replaced; in a log as a line of
        its own, in place of those by time, and at most one a second. `description`: what the unit
        is, such as the question of a file."""
        number = self._count_of(self.done + 1)
        text = printable(f"{self.title} · {self.unit} {number} · {description}")
        now = time.perf_counter()
        if self.is_terminal or now - self.begun_at >= self.LEAST_PAUSE_S:
            self.begun_at = now
            self._show(text)

    def _count_of(self, number: int) -> str:
        """Return a number of units, of how many: `10/1,000`, or `10` if the total is unknown."""
        return f"{number:,}/{self.total:,}" if self.total else f"{number:,}"

    def note(self, message: str) -> None:
        """Print a line that stays."""
        self._show(printable(message), stays=True)

    def _show(self, text: str, stays: bool = False) -> None:
        """Print a line. On a terminal the next line replaces it, unless it stays."""
        if not self.enabled:
            return
        end = "\n"
        if self.is_terminal:
            if not stays:
                # A line that wraps could not be replaced.
                text = text[: shutil.get_terminal_size().columns - 1]
                end = ""
            text = "\r\x1b[K" + text  # to the beginning of the line, and erase it
        print(text, end=end, file=sys.stderr, flush=True)

    def __exit__(self, kind: object, *_: object) -> None:
        if self.text:
            state = "stopped" if kind else "done"
            took = format_duration(time.perf_counter() - self.started_at)
            self._show(f"{self.text} · {state} in {took}", stays=True)


def say(message: str) -> None:
    """Print a message to stderr."""
    print(printable(message), file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """Return a time in its two largest units, such as `2 h 5 min`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
