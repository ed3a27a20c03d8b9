"""Count the starts of a run that die, so that a run that cannot go on is not started for ever.

    attempts.json         {"saved_step": 1200, "starts": 1}
    the start is killed   {"saved_step": 1200, "starts": 1}, and the next one makes it 2
    it saves step 1300    {"saved_step": 1300, "starts": 0}: that is progress
    starts = max_starts   UserError: the run died 3 times within 100 steps … find the cause

A start is counted as soon as it has locked the run folder, before anything that takes time or
memory. It is no longer counted when it ends in an orderly way (finished, an error that the log
explains), and when a signal asks it to stop: one that is killed while it still saves has not died.
The count goes back to 0 when a start gets on: when it saves a checkpoint that is PROGRESS_STEPS
steps or PROGRESS_S seconds of training beyond its beginning. A first checkpoint alone is no
progress, as it may be 10 steps from the beginning.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from olmo_sparsity.base.errors import DataError, UnreadableNowError, UserError
from olmo_sparsity.base.files import read_json, write_json
from olmo_sparsity.base.launch import forget_deaths
from olmo_sparsity.base.locks import check_not_taken_over

PROGRESS_STEPS = 100
PROGRESS_S = 600.0


@dataclass
class Attempts:
    """The content of `attempts.json`. It also shows that there were checkpoints, should they be
    gone."""

    saved_step: int = 0
    """The last step that was saved."""

    starts: int = 0
    """How many starts since the last progress have ended without a report, as a killed process
    does."""

    @staticmethod
    def read(run_folder: Path) -> Attempts:
        """Return the content of the file; no attempts if there is none, or a damaged one. Raise
        UnreadableNowError while it cannot be read: without it a run whose checkpoints are gone
        would begin again."""
        path = Attempts.path(run_folder)
        try:
            return read_json(path, Attempts, "")
        except UnreadableNowError:
            raise
        except DataError:  # there is none, or it is damaged, or of an earlier version
            return Attempts()

    def write(self, run_folder: Path) -> None:
        write_json(Attempts.path(run_folder), asdict(self))

    @staticmethod
    def path(run_folder: Path) -> Path:
        return run_folder / "attempts.json"


_file_lock = threading.RLock()
"""Held while this process changes the file: a thread may note a save while a signal asks training
to stop. The handler of a signal may also interrupt the thread that holds it, hence an RLock."""


class StartCount:
    """Counts the start of this process. `begin` is called when the run folder is locked, by the
    first process alone."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.is_counted = False

    def begin(self, max_starts: int) -> None:
        """Count this start. Raise UserError if `max_starts` starts have died without progress."""
        attempts = Attempts.read(self.run_folder)
        if attempts.starts >= max_starts:
            raise UserError(
                f"{self.run_folder} died {attempts.starts} times within {PROGRESS_STEPS} steps and "
                f"{PROGRESS_S / 60:.0f} min of its start, the last saved step is "
                f"{attempts.saved_step}; find the cause in the log (memory? time limit?), then "
                f"pass --checkpoint.max_starts={attempts.starts + max_starts}"
            )
        Attempts(attempts.saved_step, attempts.starts + 1).write(self.run_folder)
        self.is_counted = True

    def end(self) -> None:
        """Take this start back, as it ends in an orderly way, or was asked to end."""
        if not self.is_counted:
            return
        # Before anything else: the handler of a signal may interrupt this, and call it again.
        self.is_counted = False
        with contextlib.suppress(UserError, OSError):  # the count is that of another process now
            check_not_taken_over(self.run_folder)
            with _file_lock:
                attempts = Attempts.read(self.run_folder)
                num_starts = max(attempts.starts - 1, 0)
                Attempts(attempts.saved_step, num_starts).write(self.run_folder)


@contextlib.contextmanager
def counted_start(run_folder: Path) -> Iterator[StartCount]:
    """Yield the count of this start. An end that the run reports is not a death: a signal, an error
    of the user. Any other error is one, and so is a kill."""
    count = StartCount(run_folder)
    try:
        yield count
    except (UserError, KeyboardInterrupt):
        count.end()
        raise
    # Not in `finally`: any other error leaves the count, as a kill does.
    count.end()


def note_saved(run_folder: Path, step: int, resumed_step: int, trained_s: float) -> None:
    """Note a step that was saved, and whether it shows progress.

    Args:
        resumed_step: The step from which this start resumed; 0 if it began.
        trained_s: Seconds since its training began.
    """
    with _file_lock:
        if step - resumed_step >= PROGRESS_STEPS or trained_s >= PROGRESS_S:
            Attempts(step).write(run_folder)
            forget_deaths()
        else:
            Attempts(step, Attempts.read(run_folder).starts).write(run_folder)
