"""Write one checkpoint to the disk, in a thread of each process.

    create_folder     the first process creates step000300.1f4c09ae.tmp/; all wait for it
    write_own_part    each process writes its weights and moments into it, then 2.written, which
                      lists them with their SHA-256 (2 is the rank of the process)
    complete          the first process writes the files that all have in common, waits for
                      0.written … 7.written of all eight processes, joins these lists to
                      manifest.json, and renames the folder to step000300/

So a folder without `.tmp` is complete, at whatever moment a process is killed. Each action is tried
again after an error of the disk.

`CheckpointWriter` of writer.py has one `Save` at a time, and calls these in this order.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.files import (
    naming_written_file,
    partial_name,
    publish,
    read_json,
    sync,
    write_json,
)
from olmo_sparsity.base.locks import check_not_taken_over
from olmo_sparsity.base.manifest import FileEntry, make_entry, write_manifest
from olmo_sparsity.base.progress import say
from olmo_sparsity.base.retry import is_full, may_pass, retry
from olmo_sparsity.models.checkpoint_files import checkpoint_folder
from olmo_sparsity.training.run_folder.trainer_state import ENGINE_FOLDER, STATE_FILE, TrainerState

if TYPE_CHECKING:
    from olmo_sparsity.training.processes.distributed import Processes

T = TypeVar("T")

POLL_S = 0.05
"""Seconds between two looks for the lists of other processes."""


class CheckpointContent(NamedTuple):
    """The content of a checkpoint. Both functions write copies, as training changes the originals,
    and may be called again after an error."""

    state: TrainerState
    """The content of trainer.json, with the step."""

    write_common: Callable[[Path], None]
    """Writes into a folder the files that all processes have in common."""

    write_part: Callable[[Path], Iterable[Path]]
    """Writes into a folder the files of this process, and returns their paths."""


@dataclass(frozen=True)
class SaveFailure:
    """Why a checkpoint was not saved."""

    message: str
    may_pass: bool
    """Whether a later start may succeed: the error passes by itself, or once somebody has freed
    space."""

    @staticmethod
    def of(error: Exception, processes: Processes) -> SaveFailure:
        """Describe an error of this process as a failure, for all processes."""
        message = str(error) or repr(error)
        if processes.world_size > 1:
            where = f"process {processes.rank} of {processes.world_size} on {socket.gethostname()}"
            message = f"{where}: {message}"
        return SaveFailure(message, may_pass(error) or is_full(error))


class Save:
    """A checkpoint on its way to the disk."""

    def __init__(
        self,
        run_folder: Path,
        content: CheckpointContent,
        processes: Processes,
        expendable: Path | None,
        is_ending: threading.Event,
    ) -> None:
        """Prepare a save; nothing is written yet.

        Args:
            expendable: The checkpoint that is deleted if the disk is full, on all processes the
                same; None if there is none.
            is_ending: Is set when training has ended: an action that fails is then not tried again.
        """
        self.run_folder = run_folder
        self.content = content
        self.processes = processes
        self.expendable = expendable
        self.is_ending = is_ending
        self.final_folder = checkpoint_folder(run_folder, content.state.step)
        # No other start has this name. A process of an earlier start may go on to write its part of
        # the same step, as when its node, which was given up, comes back.
        self.partial_folder = partial_name(self.final_folder)
        """The folder that is written, until it is renamed to `final_folder`. All processes take the
        name of the first one (`create_folder`)."""

        self.own_part_task: Future[None] | None = None
        """The call of `write_own_part` in a thread; None before it begins. The writer sets it."""

        self.completion_task: Future[None] | None = None
        """The call of `complete` in a thread; None on all processes but the first."""

        self._give_up_at_s = float("inf")
        """When `complete` no longer waits for the parts of others, by `time.monotonic`."""

    # --- the steps of a save, in order ----------------------------------------------------------

    def create_folder(self) -> SaveFailure | None:
        """Create the folder, on the first process, and learn its name, on all. Return why it could
        not be created, on all processes the same; None if it was."""
        created: Path | SaveFailure | None = None
        if self.processes.is_first:
            try:
                # Training waits for the folder, as all processes must know its name before they
                # write. The wait also keeps the tries of the last save apart.
                self._retry(self._make_folder)
                created = self.partial_folder
            except (OSError, UserError) as error:
                created = SaveFailure.of(error, self.processes)
        created_by_first: Path | SaveFailure = self.processes.gather(created)[0]
        if isinstance(created_by_first, SaveFailure):
            return created_by_first
        self.partial_folder = created_by_first
        return None

    def _make_folder(self) -> None:
        (self.partial_folder / ENGINE_FOLDER).mkdir(parents=True, exist_ok=True)

    def write_own_part(self) -> None:
        """Write the files of this process. Runs in a thread."""
        self._retry(self._write_own_part)

    def _write_own_part(self) -> None:
        listed = {}
        for path in self.content.write_part(self.partial_folder):
            listed[str(path.relative_to(self.partial_folder))] = asdict(make_entry(path))
        # Written last, as it tells the first process that the part is complete.
        write_json(self._list_of(self.processes.rank), listed)

    def complete(self) -> None:
        """Write all that is not the part of a process, wait for the parts, and give the checkpoint
        its name. Runs in a thread of the first process, after `write_own_part`."""
        self._retry(self._write_common_files)
        self._wait_for_parts()
        # Each action by itself, as one that has succeeded must not be done again: the lists are
        # gone after the second.
        known_entries = self._retry(self._read_lists)
        self._retry(self._remove_lists)
        self._retry(lambda: write_manifest(self.partial_folder, known=known_entries))
        self._retry(self._give_final_name)

    def _write_common_files(self) -> None:
        self.content.write_common(self.partial_folder)
        write_json(self.partial_folder / STATE_FILE, asdict(self.content.state))

    def _wait_for_parts(self) -> None:
        """Wait until all processes have written their parts."""
        ranks = range(self.processes.world_size)
        while missing := [rank for rank in ranks if not self._list_of(rank).exists()]:
            if time.monotonic() > self._give_up_at_s:
                raise UserError(
                    f"{self.partial_folder}: process {missing[0]} has not written its part"
                )
            time.sleep(POLL_S)
            # Otherwise a network disk may answer from memory for a minute.
            with contextlib.suppress(OSError):  # the next look may succeed
                os.utime(self.partial_folder)

    def _read_lists(self) -> dict[str, FileEntry]:
        """Return the files of all processes, by path in the checkpoint. Their SHA-256 need not be
        computed again, which takes a minute for 7B parameters."""
        entries: dict[str, FileEntry] = {}
        for rank in range(self.processes.world_size):
            entries |= read_json(self._list_of(rank), dict[str, FileEntry], "")
        return entries

    def _remove_lists(self) -> None:
        """Remove the lists, which are no part of a checkpoint."""
        for rank in range(self.processes.world_size):
            self._list_of(rank).unlink(missing_ok=True)

    def _list_of(self, rank: int) -> Path:
        """Return the file in which a process lists what it has written."""
        return self.partial_folder / f"{rank}.written"

    def _give_final_name(self) -> None:
        check_not_taken_over(self.run_folder)
        if self.partial_folder.exists():
            # A damaged checkpoint of the same step, which the run did not resume from.
            shutil.rmtree(self.final_folder, ignore_errors=True)
            publish(self.partial_folder, self.final_folder)
        else:  # an earlier try has renamed it, and failed to write that to the disk
            sync(self.final_folder.parent)

    # --- its end --------------------------------------------------------------------------------

    def give_up_in(self, seconds: float) -> None:
        """Let `complete` wait no longer than this for the parts of other processes."""
        self._give_up_at_s = min(self._give_up_at_s, time.monotonic() + seconds)

    def failure_of(self, task: Future[None] | None) -> SaveFailure | None:
        """Wait for `own_part_task` or `completion_task`. Return why it failed; None if it did not,
        or this process has no such task."""
        if task is None:
            return None
        try:
            task.result()
        except (OSError, UserError) as error:
            return SaveFailure.of(error, self.processes)
        return None

    def remove(self) -> None:
        """Remove what was written. The first process does so for all."""
        if self.processes.is_first:
            shutil.rmtree(self.partial_folder, ignore_errors=True)

    # --- errors of the disk ---------------------------------------------------------------------

    def _retry(self, action: Callable[[], T]) -> T:
        """Return the result of an action on the disk. It is tried again after any error, also of a
        full disk, which may have space later; but not once training has ended."""

        def act() -> T:
            with naming_written_file(self.final_folder, self.partial_folder):
                return action()

        def report(line: str) -> None:
            # The others would say the same of a full disk; `wait` names the one that gave up.
            if self.processes.is_first:
                say(line)

        def is_worth_while(error: Exception) -> bool:
            if is_full(error):
                self._make_room(error)
            return not self.is_ending.is_set()

        return retry(act, is_worth_while, report, self.is_ending.wait)

    def _make_room(self, error: Exception) -> None:
        """Delete the expendable checkpoint, as the disk is full. Do nothing if there is none, or
        this save has deleted it already."""
        expendable = self.expendable
        self.expendable = None
        if expendable is not None:
            with contextlib.suppress(OSError):  # another process has deleted it
                delete_checkpoints([expendable])
                say(f"{error}: deleted {expendable} to make room")


def delete_checkpoints(checkpoints: list[Path]) -> None:
    """Delete checkpoint folders."""
    for checkpoint in checkpoints:
        # Renamed first, as a half-deleted folder would look like a damaged checkpoint.
        renamed = partial_name(checkpoint)
        checkpoint.rename(renamed)
        # On NFS an open file leaves another one behind, until the next start.
        shutil.rmtree(renamed, ignore_errors=True)
