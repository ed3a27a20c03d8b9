"""Checkpoints that are either whole or not there.

Place in the flow: **losses become checkpoints**.

Training makes a copy of its state and goes on; a thread writes the copy, one checkpoint at a time.
A checkpoint is written to `stepNNNNNN.tmp`, every file and the folder are fsynced, a manifest with
the SHA-256 of every file is written last, and one rename makes it real. Whatever moment a process
is killed at, a folder without `.tmp` is complete, and `resume_point` proves it again before use.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError

from olmo_sparsity.config import CheckpointConfig
from olmo_sparsity.errors import ConfigError, UserError
from olmo_sparsity.files import publish
from olmo_sparsity.json_files import read_json
from olmo_sparsity.manifest import verify_manifest, write_manifest
from olmo_sparsity.model.checkpoint_files import list_checkpoints
from olmo_sparsity.progress import say
from olmo_sparsity.training.distributed import Processes

ENGINE_FOLDER = "engine"


@dataclass
class TrainerState:
    """`trainer.json`: what is needed to go on besides weights and optimizer."""

    step: int
    tokens: int
    data_fingerprint: str

    @staticmethod
    def read(folder: Path) -> TrainerState:
        return read_json(folder / "trainer.json", TrainerState, "use another checkpoint")


class CheckpointWriter:
    """Writes checkpoints, one at a time, in a thread while training goes on.

    What goes wrong there is raised by `wait`; `failure` says it before. `train` does not return
    while a checkpoint is being written, whatever it ends with.
    """

    def __init__(self, run_folder: Path, kept: CheckpointConfig, processes: Processes) -> None:
        self.run_folder, self.kept, self.processes = run_folder, kept, processes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(
        self,
        state: TrainerState,
        write_once: Callable[[Path], None],
        write_own: Callable[[Path], None],
        shared: bool = False,
    ) -> None:
        """`write_once(folder)` puts what the first process writes into the folder it is given,
        `write_own(folder)` each process's part. They must write copies: training changes the
        originals meanwhile.

        `shared`: other processes than the first have a part, too (ZeRO). All parts are on the disk
        when this returns, for the thread of the first process lists them in the manifest.
        """
        assert self._writing is None, "wait() for the one before"
        final = self.run_folder / "checkpoints" / f"step{state.step:06d}"
        partial = final.with_suffix(".tmp")

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / ENGINE_FOLDER).mkdir(parents=True)

        def write() -> None:
            with _removed_on_error(partial), _disk_errors(self.run_folder, final):
                if not shared:
                    begin()
                    write_own(partial / ENGINE_FOLDER)
                write_once(partial)
                (partial / "trainer.json").write_text(json.dumps(asdict(state), indent=1))
                shutil.rmtree(final, ignore_errors=True)  # a corrupted one of the same step
                write_manifest(partial)
                publish(partial, final)
                # Later ones were passed over as damaged: they count for nothing.
                saved = [p for p in list_checkpoints(self.run_folder) if step_of(p) <= state.step]
                _delete([p for p in saved[self.kept.keep :] if not self.kept.stays(step_of(p))])

        first, agree = self.processes.is_first, self.processes.agree
        if shared:
            with _removed_on_error(partial) if first else contextlib.nullcontext():
                with agree(), _disk_errors(self.run_folder, final):
                    if first:
                        begin()
                with agree(), _disk_errors(self.run_folder, final):
                    write_own(partial / ENGINE_FOLDER)
        if first:
            self._writing = self._thread.submit(write)

    @property
    def failure(self) -> str:
        """What went wrong with the checkpoint under way, in words; empty while nothing has."""
        if self._writing is None or not self._writing.done():
            return ""
        error = self._writing.exception()
        return "" if error is None else str(error) or repr(error)

    def wait(self) -> None:
        """Until the checkpoint under way is on the disk. Every process must call it."""
        with self.processes.agree():
            if self._writing is not None:
                self._writing.result()
        self._writing = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._thread.shutdown()
        if self.failure not in str(error):  # training ends with another error
            say(self.failure)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step"))


def _delete(checkpoints: list[Path]) -> None:
    for old in checkpoints:
        # Renamed first: a half-deleted folder must not look like a damaged checkpoint.
        doomed = old.with_suffix(".tmp")
        old.rename(doomed)
        shutil.rmtree(doomed)


def resume_point(run_folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is provably whole; damaged ones are named and passed over. What a
    killed start left half written or half deleted is removed."""
    for leftover in (run_folder / "checkpoints").glob("*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    for folder in list_checkpoints(run_folder):
        problem = verify_manifest(folder)
        if problem is None:
            return folder
        say(f"checkpoint {folder} is damaged ({problem}); trying the one before")
    return None


def branch_point(folder: str) -> Path:
    """A checkpoint of another run, proven whole."""
    problem = verify_manifest(folder)
    if problem is not None:
        raise ConfigError(
            f"branch_from={folder} is no whole checkpoint ({problem}); name one like "
            "runs/quick/checkpoints/step000200"
        )
    return Path(folder)


@contextlib.contextmanager
def _removed_on_error(partial: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def _disk_errors(run_folder: Path, final: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # safetensors reports a failed write in words, not by its errno.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        full = full or "os error 28" in str(error) or "No space left" in str(error)
        if isinstance(error, RuntimeError) and "write" not in str(error):
            raise
        kept = list_checkpoints(run_folder)
        last = f"{kept[0]} is intact" if kept else "there was no earlier one"
        cause = "no space left on the disk" if full else str(error).splitlines()[0]
        raise UserError(
            f"could not write checkpoint {final}: {cause}; {last}. Free space (or lower "
            "checkpoint.keep) and run the same command again to go on"
        ) from None
