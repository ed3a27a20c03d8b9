"""Write checkpoints atomically in a thread.

    each process    writes its weights and moments into step000300.tmp/, then RANK.written
    first process   waits for RANK.written of all, writes the other files and manifest.json with
                    their SHA-256, renames step000300.tmp to step000300, deletes older ones

An error of the disk makes both try again, and costs this checkpoint at most. If it is full, the
oldest checkpoint that need not stay is deleted before.

So a folder without `.tmp` is complete, whenever a process is killed. resume.py finds the newest one
whose files have the SHA-256 of its manifest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from olmo_sparsity.base.errors import ReportedElsewhere, UserError
from olmo_sparsity.base.files import naming_written_file, publish, read_json, sync, write_json
from olmo_sparsity.base.locks import check_not_taken_over
from olmo_sparsity.base.manifest import FileEntry, make_entry, write_manifest
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.retry import may_pass, retry
from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.models.checkpoint_files import checkpoint_folder, list_checkpoints, step_of
from olmo_sparsity.training.attempts import note_saved

if TYPE_CHECKING:
    from olmo_sparsity.training.distributed import Processes

T = TypeVar("T")

ENGINE_FOLDER = "engine"
"""Name of the folder of a checkpoint that has the state of the optimizer."""


@dataclass
class TrainerState:
    """The content of `trainer.json`: the state that resuming needs besides weights and
    optimizer."""

    step: int
    tokens: int
    data_fingerprint: str
    metrics_crc32: str | None = None
    """CRC of this step's line of metrics.jsonl, by which a file of another run is noticed."""

    recent: list[list[float]] = field(default_factory=list)
    """Loss and gradient norm of the last steps, for `optimizer.skip_sigmas`."""

    num_skipped: int = 0

    skipped_batches: list[int] = field(default_factory=list)
    """Numbers of the batches that are left out (`training.on_nan=skip`), from 0."""

    @staticmethod
    def read(folder: Path) -> TrainerState:
        return read_json(folder / "trainer.json", TrainerState, "use another checkpoint")


SLOW_S = 25.0
"""Seconds above which a save is reported as slow: clusters give a preempted job 30."""

PATIENCE_S = 30.0
"""Seconds that the first process waits for the parts of others when it ends with an error."""

MAX_FAILED_SAVES = 3
"""Number of saves in a row at which a run ends if all of them fail."""

EXIT_DISK = 74
"""The disk took no checkpoint, for a reason that may pass; the same command resumes. `EX_IOERR` of
sysexits.h."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors of a full disk and of a full quota."""


@dataclass(frozen=True)
class SaveFailure:
    """Why a checkpoint was not saved."""

    message: str
    may_pass: bool
    """Whether the error passes by itself, so that it is worth while to start again."""

    @staticmethod
    def of(error: Exception, processes: Processes) -> SaveFailure:
        """Return the failure that an error of this process is."""
        message = str(error) or repr(error)
        if processes.world_size > 1:
            where = f"process {processes.rank} of {processes.world_size} on {socket.gethostname()}"
            message = f"{where}: {message}"
        return SaveFailure(message, may_pass(error))


class CheckpointWriter:
    """Writes checkpoints, one at a time, in a thread of each process while training continues.

    An error of the disk does not end training. Processes try again (base/retry.py); then the
    checkpoint is given up, those before it stay, and training goes on to the next save. `wait`
    raises only if MAX_FAILED_SAVES saves in a row have failed. As a context manager the writer
    waits at the end: `train` does not return while a checkpoint is being written, not even with an
    error."""

    def __init__(
        self,
        run_folder: Path,
        kept: CheckpointConfig,
        processes: Processes,
        first_step: int = 0,
    ) -> None:
        """Open the writer of a start. `first_step`: the step from which it resumed."""
        self.run_folder = run_folder
        self.kept = kept
        self.processes = processes
        self.first_step = first_step
        self.num_failed = 0
        """Number of saves of this start that have failed."""

        self._num_failed_in_a_row = 0
        self._opened_at = time.monotonic()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._partial: Path | None = None
        """The folder that is being written; None between saves."""

        self._expendable: Path | None = None
        """The checkpoint that is deleted if the disk is full; None if there is none."""

        self._part: Future[None] | None = None
        self._whole: Future[None] | None = None
        self._give_up_at = float("inf")
        self._is_ending = threading.Event()
        self._has_said_slow = False

    def save(
        self,
        state: TrainerState,
        write_once: Callable[[Path], None],
        write_part: Callable[[Path], Iterable[Path]],
        begun: float | None = None,
    ) -> None:
        """Begin to write the checkpoint of a step. Every process must call it.

        write_once: Writes into a folder the files that all processes have in common.
        write_part: Writes into a folder the files of this process, and returns their paths. Both
            must write copies, as training changes the originals, and may be called again.
        begun: When copying began, by `time.monotonic`.
        """
        assert self._partial is None, "call wait() first"
        final = checkpoint_folder(self.run_folder, state.step)
        begun = time.monotonic() if begun is None else begun
        self._expendable = self._find_expendable(state.step)
        created = self._create_partial(final)
        if isinstance(created, SaveFailure):
            self._note_failure(created)
            return
        partial = created

        def write_own() -> None:
            listed = {}
            for path in write_part(partial):
                listed[str(path.relative_to(partial))] = asdict(make_entry(path))
            # Written last, as it tells the first process that the part is complete.
            write_json(partial / f"{self.processes.rank}.written", listed)

        def write_common() -> None:
            write_once(partial)
            write_json(partial / "trainer.json", asdict(state))

        def give_name() -> None:
            check_not_taken_over(self.run_folder)
            if partial.exists():
                shutil.rmtree(final, ignore_errors=True)  # a damaged checkpoint of the same step
                publish(partial, final)
            else:  # an earlier try has renamed it, and failed to write that to the disk
                sync(final.parent)

        def publish_all(part: Future[None]) -> None:
            part.result()  # raises if this process could not write its own part
            self._retry(write_common, final, partial)
            self._wait_for_parts(partial)
            known = self._retry(lambda: self._read_parts(partial), final, partial)
            self._retry(lambda: self._remove_lists(partial), final, partial)
            self._retry(lambda: write_manifest(partial, known=known), final, partial)
            self._retry(give_name, final, partial)
            self._after_publishing(state.step)
            self._say_if_slow(state.step, time.monotonic() - begun)

        self._partial = partial
        self._part = self._thread.submit(self._retry, write_own, final, partial)
        if self.processes.is_first:
            self._whole = self._thread.submit(publish_all, self._part)

    def _create_partial(self, final: Path) -> Path | SaveFailure:
        """Create a new folder, in which the checkpoint is written before it gets its final name.
        The first process creates it; return the same on all."""
        created: Path | SaveFailure | None = None
        if self.processes.is_first:
            try:
                # Training waits for the folder, as all processes must know its name before they
                # write. The wait also keeps the tries of the last save apart.
                partial = final.with_suffix(".tmp")
                created = self._retry(lambda: _new_folder(final), final, partial)
            except (OSError, UserError) as error:
                created = SaveFailure.of(error, self.processes)
        of_first: Path | SaveFailure = self.processes.gather(created)[0]
        return of_first

    def _retry(self, action: Callable[[], T], final: Path, partial: Path) -> T:
        """Return the result of an action on the disk, which is tried again after an error, unless
        training has ended. Any error is worth it: also a full disk may have space later."""

        def act() -> T:
            with naming_written_file(final, partial):
                return action()

        def report(line: str) -> None:
            # The others would say the same of a full disk; `wait` names the one that gave up.
            if self.processes.is_first:
                say(line)

        def is_worth_while(error: Exception) -> bool:
            if getattr(error, "errno", None) in FULL:
                self._make_room(error)
            return not self._is_ending.is_set()

        return retry(act, is_worth_while, report, self._is_ending.wait)

    def _find_expendable(self, step: int) -> Path | None:
        """Return the oldest checkpoint that need not stay, on all processes the same: if all of
        them find the disk full, they delete one. None if only the newest one is left, from which
        the run would resume."""
        expendable = None
        if self.processes.is_first:
            with contextlib.suppress(UserError):  # the folder cannot be listed now
                older = self._saved_until(step)[1:]
                may_go = [folder for folder in older if not self.kept.stays(step_of(folder))]
                expendable = may_go[-1] if may_go else None
        of_first: Path | None = self.processes.gather(expendable)[0]
        return of_first

    def _make_room(self, error: Exception) -> None:
        """Delete a checkpoint, once a save, as the disk is full."""
        expendable = self._expendable
        self._expendable = None
        if expendable is not None:
            with contextlib.suppress(OSError):  # another process has deleted it
                _delete([expendable])
                say(f"{error}: deleted {expendable} to make room")

    def _saved_until(self, step: int) -> list[Path]:
        """Return the checkpoints up to a step, the newest first. Those of later steps are damaged:
        the run was resumed before them."""
        return [path for path in list_checkpoints(self.run_folder) if step_of(path) <= step]

    def _after_publishing(self, step: int) -> None:
        """Note that the checkpoint of a step is complete, and delete those that are not kept. It is
        complete, so an error is only reported."""
        try:
            check_not_taken_over(self.run_folder)
            trained_s = time.monotonic() - self._opened_at
            note_saved(self.run_folder, step, self.first_step, trained_s)
            self._delete_older(step)
        except (OSError, UserError) as error:
            say(f"step {step} is saved, but what follows a save failed: {error}")

    def _delete_older(self, step: int) -> None:
        """Delete the checkpoints that are not kept, now that this step's is complete."""
        beyond_last = self._saved_until(step)[self.kept.keep :]
        _delete([folder for folder in beyond_last if not self.kept.stays(step_of(folder))])

    def _lists(self, partial: Path) -> list[Path]:
        """Return the file of each process that lists what it has written."""
        return [partial / f"{rank}.written" for rank in range(self.processes.world_size)]

    def _wait_for_parts(self, partial: Path) -> None:
        """Wait until all processes have written their parts."""
        lists = self._lists(partial)
        while missing := [path.stem for path in lists if not path.exists()]:
            if time.monotonic() > self._give_up_at:
                raise UserError(f"{partial}: process {missing[0]} has not written its part")
            time.sleep(0.05)
            # Otherwise a network disk may answer from memory for a minute.
            with contextlib.suppress(OSError):  # the next try may do it
                os.utime(partial)

    def _read_parts(self, partial: Path) -> dict[str, FileEntry]:
        """Return the files of all processes."""
        known: dict[str, FileEntry] = {}
        for path in self._lists(partial):
            known |= read_json(path, dict[str, FileEntry], "")
        return known

    def _remove_lists(self, partial: Path) -> None:
        """Remove the lists, which are no part of a checkpoint."""
        for path in self._lists(partial):
            path.unlink(missing_ok=True)

    def _say_if_slow(self, step: int, took_s: float) -> None:
        if took_s > SLOW_S and not self._has_said_slow:
            self._has_said_slow = True
            grace = f"set GraceTime to at least as long, or --signal=USR2@{2 * took_s:.0f}"
            say(f"saving step {step} took {took_s:.0f} s: {grace}")

    def wait(self) -> bool:
        """Wait until the checkpoint that is being written is complete or has failed. Every process
        must call it. Return whether the last save is complete, on all processes the same.

        Raise UserError if MAX_FAILED_SAVES in a row have failed, with an exit code that says
        whether a new start may help."""
        if self._partial is None:
            return self._num_failed_in_a_row == 0
        failures = self.processes.gather(self._failure_of(self._part))
        if any(failures):
            self._give_up_at = 0.0  # a part is missing, so the first process need not wait for it
        failures += self.processes.gather(self._failure_of(self._whole))
        self._give_up_at = float("inf")
        partial = self._partial
        self._partial = None
        self._part = None
        self._whole = None
        for failure in failures:
            if failure is not None:
                if self.processes.is_first:
                    shutil.rmtree(partial, ignore_errors=True)
                self._note_failure(failure)
                return False
        self._num_failed_in_a_row = 0
        return True

    def _failure_of(self, future: Future[None] | None) -> SaveFailure | None:
        """Wait for a thread. Return why it failed; None if it did not."""
        if future is None:
            return None
        try:
            future.result()
        except (OSError, UserError) as error:
            return SaveFailure.of(error, self.processes)
        return None

    def _note_failure(self, failure: SaveFailure) -> None:
        """Count a save that has failed, and report it. Raise UserError if it is one too many."""
        self.num_failed += 1
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row < MAX_FAILED_SAVES:
            if self.processes.is_first:
                count = f"{self._num_failed_in_a_row} of at most {MAX_FAILED_SAVES - 1}"
                say(f"NOT SAVED: {failure.message}; training goes on to the next save ({count})")
            return
        error: UserError = ReportedElsewhere()
        if self.processes.is_first:
            error = UserError(f"{failure.message}; {MAX_FAILED_SAVES} saves in a row have failed")
        if failure.may_pass:
            error.exit_code = EXIT_DISK
        raise error

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_ending.set()
        self._give_up_at = min(self._give_up_at, time.monotonic() + PATIENCE_S)
        self._thread.shutdown()
        failure = self._failure_of(self._part) or self._failure_of(self._whole)
        if failure is None:
            return
        # Training ends with another error.
        if self.processes.is_first and self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
        if not isinstance(error, ReportedElsewhere):
            say(failure.message)


def _new_folder(final: Path) -> Path:
    """Create the folder in which a checkpoint is written, and return it."""
    # A start that was killed may have left a part of the same step. On NFS a file of it that some
    # process still has open cannot be removed: then another name is taken.
    partial = final.with_suffix(".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    number = 1
    while partial.exists():
        partial = final.with_name(f"{final.name}.{number}.tmp")
        number += 1
    (partial / ENGINE_FOLDER).mkdir(parents=True)
    return partial


def _delete(checkpoints: list[Path]) -> None:
    """Delete checkpoint folders."""
    for checkpoint in checkpoints:
        # Renamed first, as a half-deleted folder would look like a damaged checkpoint.
        renamed = checkpoint.with_suffix(".tmp")
        checkpoint.rename(renamed)
        # On NFS an open file leaves another one behind, until the next start.
        shutil.rmtree(renamed, ignore_errors=True)
