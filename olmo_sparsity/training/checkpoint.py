"""Checkpoints that are either whole or not there.

Place in the flow: **losses become checkpoints**.

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
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError

from olmo_sparsity.config import CheckpointConfig
from olmo_sparsity.errors import ConfigError, UserError
from olmo_sparsity.files import publish
from olmo_sparsity.json_files import read_json
from olmo_sparsity.manifest import verify_manifest, write_manifest
from olmo_sparsity.model.checkpoint_files import list_checkpoints
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


def save(
    run_folder: Path,
    state: TrainerState,
    kept: CheckpointConfig,
    write_once: Callable[[Path], None],
    write_own: Callable[[Path], None],
    processes: Processes,
) -> Path:
    """`write_once(folder)` puts what the first process writes into the folder it is given,
    `write_own(folder)` each process's part. The manifest comes after all of them."""
    final = run_folder / "checkpoints" / f"step{state.step:06d}"
    partial = final.with_suffix(".tmp")
    try:
        with processes.agree(), _disk_errors(run_folder, final):
            if processes.is_first:
                shutil.rmtree(partial, ignore_errors=True)
                (partial / ENGINE_FOLDER).mkdir(parents=True)
        with processes.agree(), _disk_errors(run_folder, final):
            write_own(partial / ENGINE_FOLDER)
            if processes.is_first:
                write_once(partial)
        with processes.agree(), _disk_errors(run_folder, final):
            if processes.is_first:
                (partial / "trainer.json").write_text(json.dumps(asdict(state), indent=1))
                shutil.rmtree(final, ignore_errors=True)  # a corrupted one of the same step
                write_manifest(partial)
                publish(partial, final)
                old = list_checkpoints(run_folder)[kept.keep :]
                _delete([path for path in old if not kept.stays(step_of(path))])
    except UserError:
        if processes.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


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
