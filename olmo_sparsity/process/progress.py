"""Show progress: one live line on a terminal, occasional lines in a log or pipe.

Place in the flow: used by all long work. Never imports torch.
"""

from __future__ import annotations

import shutil
import sys
import time

from olmo_sparsity.errors import printable


class Progress:
    """with Progress("training", total=1000, unit="steps") as progress:
    progress.update(10, loss="3.21")
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str,
        *,
        enabled: bool = True,
        log_every_s: float = 30,
    ) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.enabled = enabled
        self.done = self.done_at_start = 0
        self.live = sys.stderr.isatty()
        self.pause_s = 0.1 if self.live else log_every_s
        self.started = time.perf_counter()
        self.shown_at = -float("inf") if self.live else self.started
        self.text = ""

    def __enter__(self) -> Progress:
        return self

    def resume_at(self, done: int) -> None:
        """Progress of an earlier run: shown as done, not counted in the rate."""
        self.done = self.done_at_start = done

    def update(self, done: int, **values: str) -> None:
        self.done = done
        now = time.perf_counter()
        fresh = done - self.done_at_start
        rate = fresh / (now - self.started) if now > self.started else 0.0
        of_total = f"/{self.total:,}" if self.total else ""
        parts = [self.title, f"{done:,}{of_total} {self.unit}"]
        parts += [f"{name.replace('_', ' ')} {value}" for name, value in values.items()]
        left = ""
        if rate > 0:
            parts.append(f"{rate:,{'.3g' if rate < 1e3 else '.0f'}} {self.unit}/s")
            if self.total and done < self.total:
                left = f" · {format_duration((self.total - done) / rate)} left"
        self.text = printable(" · ".join(parts))
        if now - self.shown_at >= self.pause_s:
            self.shown_at = now
            self._show(self.text + left)

    def note(self, message: str) -> None:
        """Print a line that stays."""
        if self.enabled:
            self._clear()
            say(message)

    def _show(self, text: str) -> None:
        if not self.enabled:
            return
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            print("\r\x1b[K" + text[:width], end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", file=sys.stderr)

    def __exit__(self, kind: object, *_: object) -> None:
        self._clear()
        if self.enabled and self.text:
            took = format_duration(time.perf_counter() - self.started)
            state = "stopped" if kind else "done"
            print(f"{self.text} · {state} in {took}", file=sys.stderr, flush=True)


def say(message: str) -> None:
    """Print a message to stderr; stdout is for results."""
    print(printable(message), file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
