"""Checkpoints that are either whole or not there.

Place in the flow: **losses become checkpoints**.

A checkpoint is written to `stepNNNNNN.tmp`, every file and the folder are fsynced, a manifest with
the SHA-256 of every file is written last, and one rename makes it real. Whatever moment a process
is killed at, a folder without `.tmp` is complete, and `resume_point` proves it again before use.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from olmo_sparsity.errors import DataError, UserError
from olmo_sparsity.files import publish, sync
from olmo_sparsity.model.checkpoint_files import (
    list_checkpoints,
    verify_manifest,
    write_manifest,
)

ENGINE_FOLDER = "engine"


@dataclass
class TrainerState:
    """`trainer.json`: what is needed to go on besides weights and optimizer."""

    step: int
    tokens: int
    data_fingerprint: str
    rng: dict[str, str]

    @staticmethod
    def read(folder: Path) -> TrainerState:
        path = folder / "trainer.json"
        try:
            return TrainerState(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path} is not a trainer state: {error}") from None


def save(run_folder: Path, state: TrainerState, keep: int, write: Callable[[Path], None]) -> Path:
    """`write(folder)` puts model and optimizer files into the folder it is given."""
    final = run_folder / "checkpoints" / f"step{state.step:06d}"
    partial = final.with_suffix(".tmp")
    with _disk_errors(run_folder, partial):
        shutil.rmtree(partial, ignore_errors=True)
        (partial / ENGINE_FOLDER).mkdir(parents=True)
        write(partial)
        (partial / "trainer.json").write_text(json.dumps(asdict(state), indent=1))
        write_manifest(partial)
        for path in sorted(partial.rglob("*")):
            sync(path)
        shutil.rmtree(final, ignore_errors=True)  # a corrupted one of the same step
        publish(partial, final)
    for old in list_checkpoints(run_folder)[keep:]:
        # Renamed first: a half-deleted folder must not look like a damaged checkpoint.
        doomed = old.with_suffix(".tmp")
        old.rename(doomed)
        shutil.rmtree(doomed)
    return final


def resume_point(run_folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is provably whole; damaged ones are named and passed over."""
    for folder in list_checkpoints(run_folder):
        problem = verify_manifest(folder)
        if problem is None:
            return folder
        say(f"checkpoint {folder} is damaged ({problem}); trying the one before")
    return None


def rng_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(s.numpy().tobytes()).decode() for name, s in states.items()}


def restore_rng(states: dict[str, str]) -> None:
    for name, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)


@contextlib.contextmanager
def _disk_errors(run_folder: Path, partial: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch.save and safetensors report a failed write in words, not by its errno.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        full = full or "os error 28" in str(error) or "No space left" in str(error)
        if isinstance(error, RuntimeError) and "write" not in str(error):
            raise
        shutil.rmtree(partial, ignore_errors=True)
        kept = list_checkpoints(run_folder)
        last = f"{kept[0]} is intact" if kept else "there was no earlier one"
        cause = "no space left on the disk" if full else str(error).splitlines()[0]
        raise UserError(
            f"could not write checkpoint {partial.with_suffix('')}: {cause}; {last}. Free space "
            "(or lower checkpoint.keep) and run the same command again to go on"
        ) from None
