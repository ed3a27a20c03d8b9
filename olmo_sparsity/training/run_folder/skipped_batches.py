"""Leave out the batch of a step whose numbers are not finite (`training.on_nan=skip`).

A run with checkpoints of steps 20 and 30, in which the loss of step 42 is NaN:

    step 42 is NaN            batch 41 is left out, and the run goes on from step 30
    step 45 is NaN, too       so batch 41 was not the cause: the weights of step 30 may be damaged.
                              They are set aside (step000030.set_aside), a second batch is left out,
                              and the run goes on from step 20
    step 900 is NaN           a new case: the run goes on from the newest checkpoint again

    skipped_batches.json      {"batches": [41, 45], "steps": [42, 45], "went_back_to": [30, 20]}

loop.py calls `skip_and_go_back` at such a step, and then starts the run again, which reads the
batches to leave out by `read_skipped_batches` (start.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.files import read_json, write_json
from olmo_sparsity.base.json_text import with_crc
from olmo_sparsity.models.checkpoint_files import list_checkpoints, step_of

COMES_BACK_WITHIN = 100
"""If another step is not finite within so many steps, the skipped batch was not the cause, and the
run goes on from an older checkpoint."""


SET_ASIDE = ".set_aside"
"""Ending of the name of a checkpoint that is set aside. No start goes on from it."""


@dataclass(frozen=True)
class SkippedBatches:
    """The content of `skipped_batches.json`. Each skip has an item in each list: those of `steps`
    and `went_back_to` are in the order of the skips, those of `batches` are sorted."""

    batches: list[int] = field(default_factory=list)
    """The batches that are left out, from 0, sorted."""

    steps: list[int] = field(default_factory=list)
    """The steps whose numbers were not finite, from 1."""

    went_back_to: list[int] = field(default_factory=list)
    """The steps from which the run went on; 0 is its beginning."""

    @staticmethod
    def read(run_folder: Path) -> SkippedBatches:
        """Return the content of the file; empty lists if there is none."""
        path = _path_in(run_folder)
        if not path.exists():
            return SkippedBatches()
        return read_json(path, SkippedBatches, "restore it")

    def write(self, run_folder: Path) -> None:
        write_json(_path_in(run_folder), with_crc(asdict(self)))

    def with_skip(self, batch: int, step: int, went_back_to: int) -> SkippedBatches:
        """Return a copy with one more skip."""
        return SkippedBatches(
            batches=sorted([*self.batches, batch]),
            steps=[*self.steps, step],
            went_back_to=[*self.went_back_to, went_back_to],
        )


def _path_in(run_folder: Path) -> Path:
    return run_folder / "skipped_batches.json"


def read_skipped_batches(run_folder: Path) -> list[int]:
    """Return the numbers of the batches that the run leaves out, from 0."""
    return SkippedBatches.read(run_folder).batches


def list_set_aside(run_folder: Path) -> list[Path]:
    """Return the checkpoints that were set aside, the oldest step first."""
    return sorted((run_folder / "checkpoints").glob(f"step*{SET_ASIDE}"))


def skip_and_go_back(step: int, run_folder: Path, left_out: Sequence[int], max_skips: int) -> str:
    """Leave out the batch of a step from now on, and choose the checkpoint to go on from. Return
    words that say so. Raise UserError if this run has left out `max_skips` batches already.

    Args:
        step: The step, from 1.
        left_out: The batches that the run leaves out now, from 0. A branch also leaves out those of
            the run that it branched from, which this folder's file does not have.
        max_skips: As in the config.
    """
    from olmo_sparsity.data.batches import batch_of_step  # imports PyTorch

    skips = SkippedBatches.read(run_folder)
    if len(skips.batches) >= max_skips:
        raise UserError(
            f"step {step} is not finite, after training.max_skips={max_skips} skipped batches; "
            "lower optimizer.learning_rate in a new folder, which may branch_from a checkpoint "
            "before the loss rose, or raise training.max_skips"
        )
    batch = batch_of_step(step, left_out)
    checkpoints = list_checkpoints(run_folder)  # the newest first
    given_up = _checkpoints_to_give_up(step, checkpoints, skips)
    usable = checkpoints[len(given_up) :]
    next_start = step_of(usable[0]) if usable else 0

    # Noted before checkpoints are set aside: a start that is killed in between then goes on from a
    # newer checkpoint than it might, but leaves out the batch.
    skips.with_skip(batch, step, next_start).write(run_folder)
    for checkpoint in given_up:
        set_aside = checkpoint.with_suffix(SET_ASIDE)
        shutil.rmtree(set_aside, ignore_errors=True)  # of the same step, given up before
        checkpoint.rename(set_aside)

    count = f"{len(skips.batches) + 1} of at most {max_skips}"
    origin = f"the checkpoint of step {next_start}" if usable else "the beginning"
    line = f"batch {batch} is skipped ({count}); going on from {origin}"
    if given_up:
        names = ", ".join(checkpoint.name for checkpoint in given_up)
        line += f", as it came back after {names} (now *.set_aside; deleted if the disk is full)"
    return line


def _checkpoints_to_give_up(
    step: int, checkpoints: Sequence[Path], skips: SkippedBatches
) -> Sequence[Path]:
    """Return the newest checkpoints that the run must not go on from: a number that is not finite
    has come back after the oldest of them, although a batch was skipped.

    Args:
        step: The step whose numbers are not finite now.
        checkpoints: All checkpoints, the newest first.
        skips: The earlier skips.
    """
    if not skips.steps or step - skips.steps[-1] > COMES_BACK_WITHIN:
        return []
    tried_step = skips.went_back_to[-1]
    tried = [checkpoint for checkpoint in checkpoints if step_of(checkpoint) >= tried_step]
    # Without an older one, another batch is left out after the same checkpoint.
    return tried if len(tried) < len(checkpoints) else []
