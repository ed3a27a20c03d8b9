"""Save checkpoints while training goes on, and keep the last ones.

    with CheckpointWriter(run_folder, config.checkpoint, processes) as writer:
        writer.save(content)    # begins step 300; threads write it
        ...                     # steps 301 … 599 are trained
        writer.wait()           # True if step 300 is on the disk
        writer.save(…)          # begins step 600

    checkpoints/    step000300/  step000600.1f4c09ae.tmp/      step 600 is being written

steps.py decides when to save, and after_step/save.py copies what is saved. save.py writes one
checkpoint; resume.py finds the newest one whose files have the SHA-256 of its manifest.

After an error of the disk the processes try again. If the tries fail, too, this checkpoint alone is
lost: training goes on to the next save. If the disk is full, a checkpoint is deleted that need not
stay (expendable.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_sparsity.base.errors import ReportedElsewhere, UserError
from olmo_sparsity.base.locks import check_not_taken_over
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.models.checkpoint_files import step_of
from olmo_sparsity.training.checkpoints.expendable import find_expendable, saved_until
from olmo_sparsity.training.checkpoints.save import (
    CheckpointContent,
    Save,
    SaveFailure,
    delete_checkpoints,
)
from olmo_sparsity.training.run_folder.attempts import note_saved

if TYPE_CHECKING:
    from olmo_sparsity.training.processes.distributed import Processes

SLOW_S = 25.0
"""Seconds above which a save is reported as slow: clusters give a preempted job 30."""

PATIENCE_S = 30.0
"""Seconds that the first process waits for the parts of others once training has ended: a process
that ended with an error writes none."""

MAX_FAILED_SAVES = 3
"""Number of saves in a row at which a run ends if all of them fail."""

EXIT_DISK = 74
"""The disk took no checkpoint, or a file could not be read, for a reason that may pass: it is away,
or full until somebody frees space. The same command resumes. `EX_IOERR` of sysexits.h."""


class CheckpointWriter:
    """Writes checkpoints, one at a time, in a thread of each process while training continues.

    If a save fails, the checkpoints before it stay, and training goes on. `wait` raises only if
    MAX_FAILED_SAVES saves in a row have failed. As a context manager the writer waits at the end:
    `train` does not return while a checkpoint is being written, not even with an error."""

    def __init__(
        self,
        run_folder: Path,
        settings: CheckpointConfig,
        processes: Processes,
        resumed_step: int = 0,
    ) -> None:
        """Open the writer of a start.

        Args:
            settings: The section `checkpoint`, which says which checkpoints stay.
            resumed_step: The step from which the run resumes; 0 if it begins.
        """
        self.run_folder = run_folder
        self.settings = settings
        self.processes = processes
        self.resumed_step = resumed_step
        self.num_failed = 0
        """Number of saves of this start that have failed."""

        self._num_failed_in_a_row = 0
        self._opened_at_s = time.monotonic()
        # A single thread, so that the first process writes its own part before it completes the
        # checkpoint.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._save: Save | None = None
        """The save under way, until `wait` has seen its end; None if there is none."""

        self._is_ending = threading.Event()
        """Set when training has ended."""

        self._has_said_slow = False

    # --- begin a save ---------------------------------------------------------------------------

    def save(self, content: CheckpointContent, began_s: float | None = None) -> None:
        """Begin to write the checkpoint of a step. Call `wait` before, which ends the last save.
        Every process must call it.

        Args:
            content: The content of the checkpoint, with its step.
            began_s: When the save began, with its copies, by `time.monotonic`. Default: now.
        """
        assert self._save is None, "call wait() first"
        if began_s is None:
            began_s = time.monotonic()
        save = Save(
            self.run_folder,
            content,
            self.processes,
            self._choose_expendable(content.state.step),
            self._is_ending,
        )
        failure = save.create_folder()
        if failure is not None:
            self._note_failure(failure)
            return
        self._save = save
        save.own_part_task = self._thread.submit(save.write_own_part)
        if self.processes.is_first:
            save.completion_task = self._thread.submit(self._complete, save, began_s)

    def _choose_expendable(self, step: int) -> Path | None:
        """Return the checkpoint that is deleted if the disk is full; None if all must stay. It is
        the same on all processes, so that they delete only one if several find the disk full."""
        expendable = None
        if self.processes.is_first:
            with contextlib.suppress(UserError):  # the folder cannot be listed now
                expendable = find_expendable(self.run_folder, self.settings, step)
        chosen_by_first: Path | None = self.processes.gather(expendable)[0]
        return chosen_by_first

    def _complete(self, save: Save, began_s: float) -> None:
        """Complete a checkpoint when the own part is written, and delete old ones. Runs in the
        thread of the first process."""
        assert save.own_part_task is not None
        save.own_part_task.result()  # raises if this process could not write its own part
        save.complete()
        step = save.content.state.step
        try:
            self._note_and_delete_old(step)
        except (OSError, UserError) as error:
            # No failure of the save: its checkpoint is complete.
            say(f"step {step} is saved, but what follows a save failed: {error}")
        self._report_if_slow(step, time.monotonic() - began_s)

    def _note_and_delete_old(self, step: int) -> None:
        """Note that the checkpoint of a step is complete, and delete those that are not kept."""
        # Another process may train in this folder by now: its checkpoints are not ours.
        check_not_taken_over(self.run_folder)
        trained_s = time.monotonic() - self._opened_at_s
        note_saved(self.run_folder, step, self.resumed_step, trained_s)
        newest_first = saved_until(self.run_folder, step)
        old = newest_first[self.settings.keep :]
        delete_checkpoints([folder for folder in old if not self.settings.stays(step_of(folder))])

    def _report_if_slow(self, step: int, took_s: float) -> None:
        """Say once that saves take longer than clusters give a job that they preempt."""
        if took_s > SLOW_S and not self._has_said_slow:
            self._has_said_slow = True
            grace = f"set GraceTime to at least as long, or --signal=USR2@{2 * took_s:.0f}"
            say(f"saving step {step} took {took_s:.0f} s: {grace}")

    # --- end a save -----------------------------------------------------------------------------

    def wait(self) -> bool:
        """Wait until the checkpoint that is being written is complete or has failed. Every process
        must call it. Return whether the last save is complete, on all processes the same; True
        before the first save.

        Raise UserError if MAX_FAILED_SAVES in a row have failed, with an exit code that says
        whether a new start may help."""
        save = self._save
        if save is None:
            return self._num_failed_in_a_row == 0

        # First the parts of all: if one failed, the first process need not wait for it.
        failures = self.processes.gather(save.failure_of(save.own_part_task))
        if any(failures):
            save.give_up_in(0.0)
        failures += self.processes.gather(save.failure_of(save.completion_task))
        self._save = None
        for failure in failures:
            if failure is not None:
                save.remove()
                self._note_failure(failure)
                return False
        self._num_failed_in_a_row = 0
        return True

    def _note_failure(self, failure: SaveFailure) -> None:
        """Count a save that has failed, and report it. Raise UserError if it is one too many."""
        self.num_failed += 1
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row < MAX_FAILED_SAVES:
            if self.processes.is_first:
                count = f"{self._num_failed_in_a_row} of at most {MAX_FAILED_SAVES - 1}"
                say(f"NOT SAVED: {failure.message}; training goes on to the next save ({count})")
            return
        # All processes raise, and the first one alone has a message, so that it is printed once.
        error: UserError = ReportedElsewhere()
        if self.processes.is_first:
            error = UserError(
                f"{failure.message}; {MAX_FAILED_SAVES} saves in a row have failed, and the same "
                "command resumes from the last checkpoint"
            )
        if failure.may_pass:
            error.exit_code = EXIT_DISK
        raise error

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the save that is under way, and print why it failed, if it did. Training ends,
        maybe with an error of its own, which must not be hidden: nothing is raised."""
        save = self._save
        self._is_ending.set()
        if save is not None:
            save.give_up_in(PATIENCE_S)
        self._thread.shutdown()  # waits for what was begun
        if save is None:
            return
        failure = save.failure_of(save.own_part_task) or save.failure_of(save.completion_task)
        if failure is None:
            return
        save.remove()
        # A process that ends because of another one's error prints nothing at all.
        if not isinstance(error, ReportedElsewhere):
            say(failure.message)
