"""Write checkpoints atomically in a thread, and find the newest intact one.

Files go into `stepNNNNNN.tmp`, with a manifest of their SHA-256 last, and one rename publishes it:
whenever a process is killed, a folder without `.tmp` is complete."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_sparsity.config.sections import CheckpointConfig
from olmo_sparsity.errors import ConfigError, UserError
from olmo_sparsity.io import naming, publish, read_json, verify_manifest, write_json, write_manifest
from olmo_sparsity.model.checkpoint_files import list_checkpoints, verified_checkpoints
from olmo_sparsity.runtime import say

if TYPE_CHECKING:
    from olmo_sparsity.training.distributed import Processes

ENGINE_FOLDER = "engine"


@dataclass
class TrainerState:
    """`trainer.json`: the state besides weights and optimizer that resuming needs."""

    step: int
    tokens: int
    data_fingerprint: str
    metrics_crc32: str | None = None
    """CRC of this step's line of metrics.jsonl; identifies a file of another run."""

    @staticmethod
    def read(folder: Path) -> TrainerState:
        return read_json(folder / "trainer.json", TrainerState, "use another checkpoint")


class CheckpointWriter:
    """Writes checkpoints, one at a time, in a thread while training continues.

    Errors of the thread are raised by `wait`; `failure` shows them earlier. `train` does not
    return while a checkpoint is being written, not even with an error (unless Ctrl-C is pressed
    again and again).
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
        """`write_once(folder)` writes the files of the first process, `write_own(folder)` the
        files of each process. They must write copies, as training changes the originals meanwhile.

        `shared`: every process has a part (ZeRO). All parts are on the disk when this returns, so
        that the thread of the first process can list them in the manifest.
        """
        assert self._writing is None, "call wait() first"
        final = self.run_folder / "checkpoints" / f"step{state.step:06d}"
        partial = final.with_suffix(".tmp")

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / ENGINE_FOLDER).mkdir(parents=True)

        def write() -> None:
            with _removed_on_error(partial), naming(final, partial):
                if not shared:
                    begin()
                    write_own(partial / ENGINE_FOLDER)
                write_once(partial)
                write_json(partial / "trainer.json", asdict(state))
                shutil.rmtree(final, ignore_errors=True)  # a corrupted one of the same step
                write_manifest(partial)
                publish(partial, final)
                # Later ones are damaged and do not count.
                saved = [p for p in list_checkpoints(self.run_folder) if step_of(p) <= state.step]
                _delete([p for p in saved[self.kept.keep :] if not self.kept.stays(step_of(p))])

        first, agree = self.processes.is_first, self.processes.agree
        if shared:
            with _removed_on_error(partial) if first else contextlib.nullcontext():
                with agree(), naming(final, partial):
                    if first:
                        begin()
                with agree(), naming(final, partial):
                    write_own(partial / ENGINE_FOLDER)
        if first:
            self._writing = self._thread.submit(write)

    @property
    def failure(self) -> str:
        """The error of the checkpoint being written; empty if there is none."""
        if self._writing is None or not self._writing.done():
            return ""
        error = self._writing.exception()
        return "" if error is None else str(error) or repr(error)

    def wait(self) -> None:
        """Wait until the checkpoint is on the disk. Every process must call it."""
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
        # Renamed first, as a half-deleted folder would look like a damaged checkpoint.
        renamed = old.with_suffix(".tmp")
        old.rename(renamed)
        # On NFS an open file leaves another one behind, until the next start.
        shutil.rmtree(renamed, ignore_errors=True)


def resume_point(run_folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest intact checkpoint; damaged ones are reported and skipped. Partial folders of
    killed runs are removed."""
    for leftover in (run_folder / "checkpoints").glob("*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    for folder, problem in verified_checkpoints(run_folder):
        if problem is None:
            return folder
        say(f"checkpoint {folder} is damaged ({problem}); trying the one before")
    return None


def branch_point(folder: str) -> Path:
    """A checkpoint of another run, after verifying it."""
    if problem := verify_manifest(folder):
        raise ConfigError(
            f"branch_from={folder} ({problem}) must be an intact checkpoint, such as "
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
