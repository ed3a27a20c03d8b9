"""Write checkpoints atomically in a thread, and find the newest intact one.

    each process    writes its weights and moments into step000300.tmp/, then RANK.written
    first process   waits for RANK.written of all, writes the other files and manifest.json with
                    their SHA-256, renames step000300.tmp to step000300, deletes older ones

So a folder without `.tmp` is complete, whenever a process is killed. `resume_point` returns the
newest one whose files have the SHA-256 of its manifest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_sparsity.base.errors import ConfigError, DataError, ReportedElsewhere, UserError
from olmo_sparsity.base.files import naming_written_file, publish, read_json, write_json
from olmo_sparsity.base.manifest import FileEntry, find_damage, make_entry, write_manifest
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.models.checkpoint_files import list_checkpoints, verified_checkpoints
from olmo_sparsity.training.attempts import Attempts, note_saved

if TYPE_CHECKING:
    from olmo_sparsity.training.distributed import Processes

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


class CheckpointWriter:
    """Writes checkpoints, one at a time, in a thread of each process while training continues.

    `wait` raises errors of the threads, and `failure` shows them earlier. As a context manager it
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
        self._opened_at = time.monotonic()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._part: Future[None] | None = None
        self._whole: Future[None] | None = None
        self._give_up_at = float("inf")
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
            must write copies, as training changes the originals.
        begun: When copying began, by `time.monotonic`.
        """
        assert self._part is None, "call wait() first"
        final = self.run_folder / "checkpoints" / f"step{state.step:06d}"
        partial = final.with_suffix(".tmp")
        begun = time.monotonic() if begun is None else begun
        with self.processes.agree(), naming_written_file(final, partial):
            if self.processes.is_first:
                # A start that was killed may have left a part of the same step.
                shutil.rmtree(partial, ignore_errors=True)
                (partial / ENGINE_FOLDER).mkdir(parents=True)

        def write_own() -> None:
            with _removed_on_error(partial), naming_written_file(final, partial):
                listed = {}
                for path in write_part(partial):
                    listed[str(path.relative_to(partial))] = asdict(make_entry(path))
                # Written last, as it tells the first process that the part is complete.
                write_json(partial / f"{self.processes.rank}.written", listed)

        def publish_all(part: Future[None]) -> None:
            part.result()  # raises if this process could not write its own part
            with _removed_on_error(partial), naming_written_file(final, partial):
                write_once(partial)
                write_json(partial / "trainer.json", asdict(state))
                known = self._wait_for_parts(partial)
                shutil.rmtree(final, ignore_errors=True)  # a damaged checkpoint of the same step
                write_manifest(partial, known=known)
                publish(partial, final)
                trained_s = time.monotonic() - self._opened_at
                note_saved(self.run_folder, state.step, self.first_step, trained_s)
                self._delete_older(state.step)
            self._say_if_slow(state.step, time.monotonic() - begun)

        self._part = self._thread.submit(write_own)
        if self.processes.is_first:
            self._whole = self._thread.submit(publish_all, self._part)

    def _delete_older(self, step: int) -> None:
        """Delete the checkpoints that are not kept, now that this step's is complete."""
        # Checkpoints of later steps are damaged: the run was resumed before them.
        saved = [folder for folder in list_checkpoints(self.run_folder) if step_of(folder) <= step]
        beyond_last = saved[self.kept.keep :]
        _delete([folder for folder in beyond_last if not self.kept.stays(step_of(folder))])

    def _wait_for_parts(self, partial: Path) -> dict[str, FileEntry]:
        """Wait until all processes have written their parts. Return their files."""
        lists = [partial / f"{rank}.written" for rank in range(self.processes.world_size)]
        while missing := [path.stem for path in lists if not path.exists()]:
            if time.monotonic() > self._give_up_at:
                raise UserError(f"{partial}: process {missing[0]} has not written its part")
            time.sleep(0.05)
            # Otherwise a network disk may answer from memory for a minute.
            os.utime(partial)
        known: dict[str, FileEntry] = {}
        for path in lists:
            known |= read_json(path, dict[str, FileEntry], "")
            path.unlink()
        return known

    def _say_if_slow(self, step: int, took_s: float) -> None:
        if took_s > SLOW_S and not self._has_said_slow:
            self._has_said_slow = True
            grace = f"set GraceTime to at least as long, or --signal=USR2@{2 * took_s:.0f}"
            say(f"saving step {step} took {took_s:.0f} s: {grace}")

    @property
    def failure(self) -> str:
        """Return the error of the checkpoint that is being written; empty if there is none."""
        for future in (self._part, self._whole):
            if future is None or not future.done():
                continue
            error = future.exception()
            if error is not None:
                return str(error) or repr(error)
        return ""

    def wait(self) -> None:
        """Wait until the checkpoint is on the disk. Every process must call it."""
        try:
            with self.processes.agree():
                if self._part is not None:
                    self._part.result()
        except (UserError, ReportedElsewhere):
            self._give_up_at = 0.0  # a part is missing, so the first process need not wait for it
            raise
        with self.processes.agree():
            if self._whole is not None:
                self._whole.result()
        self._part = None
        self._whole = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._give_up_at = min(self._give_up_at, time.monotonic() + PATIENCE_S)
        self._thread.shutdown()
        if not self.failure:
            return
        is_reported = isinstance(error, ReportedElsewhere) or self.failure in str(error)
        if not is_reported:  # training ends with another error
            say(self.failure)


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    return int(checkpoint.name.removeprefix("step"))


def _delete(checkpoints: list[Path]) -> None:
    """Delete checkpoint folders."""
    for checkpoint in checkpoints:
        # Renamed first, as a half-deleted folder would look like a damaged checkpoint.
        renamed = checkpoint.with_suffix(".tmp")
        checkpoint.rename(renamed)
        # On NFS an open file leaves another one behind, until the next start.
        shutil.rmtree(renamed, ignore_errors=True)


RESTORE = "restore one, or begin at step 0 and keep what is left with --start_over=true"
"""What to do if no checkpoint is intact."""


def resume_point(run_folder: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest intact checkpoint, or None for a run that has saved none.

    Damaged ones are reported and skipped. Partial folders of killed runs are removed. Raise
    DataError if all checkpoints are damaged or gone, as training from step 0 would replace them,
    and UnreadableNowError if one that cannot be read now may be intact.
    """
    all_damaged = ""
    for folder, problem in verified_checkpoints(run_folder):
        if problem is None:
            _remove_partial(run_folder)
            return folder
        say(f"checkpoint {folder} is damaged ({problem}); trying the one before")
        if not all_damaged:
            all_damaged = f"no checkpoint of {run_folder} is intact, the latest: {problem}"
    if all_damaged:
        raise DataError(f"{all_damaged}; {RESTORE}")
    saved_step = last_saved_step(run_folder)
    if saved_step:
        gone = f"{run_folder} has saved step {saved_step}, and no checkpoint is there now"
        raise DataError(f"{gone}; {RESTORE}")
    _remove_partial(run_folder)
    return None


def _remove_partial(run_folder: Path) -> None:
    for leftover in (run_folder / "checkpoints").glob("*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def last_saved_step(run_folder: Path) -> int:
    """Return the last step that a start has saved or resumed from; 0 if there is none."""
    path = run_folder / "environment.json"
    starts = []
    if path.exists():
        starts = read_json(path, list[dict], "delete it to go on without")
    resumed_steps = [int(start.get("resumed_at_step", 0)) for start in starts]
    return max(Attempts.read(run_folder).saved_step, *resumed_steps, 0)


def set_aside(run_folder: Path) -> Path:
    """Move everything that a run has written into a new folder inside its run folder, so that it
    can begin again at step 0. Return that folder."""
    number = 1
    while (run_folder / f"set_aside_{number}").exists():
        number += 1
    new_folder = run_folder / f"set_aside_{number}"
    new_folder.mkdir()
    written = ("checkpoints", "metrics.jsonl", "environment.json", "skipped_batches.json")
    for name in (*written, Attempts.path(run_folder).name):
        if (run_folder / name).exists():
            (run_folder / name).rename(new_folder / name)
    (run_folder / "checkpoints").mkdir()
    return new_folder


def branch_point(folder: str) -> Path:
    """Return the checkpoint folder that a branch starts from, after verifying it."""
    problem = find_damage(folder)
    if problem:
        raise ConfigError(f"branch_from={folder} must be an intact checkpoint folder: {problem}")
    return Path(folder)


@contextlib.contextmanager
def _removed_on_error(partial: Path) -> Iterator[None]:
    """Remove the folder if the body raises UserError, as when the disk is full."""
    try:
        yield
    except UserError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
