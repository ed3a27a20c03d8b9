"""Find the checkpoint that a run goes on from: the newest one that is intact.

    choose_checkpoint ─> verify_newest           all processes: each hashes a share of the files
                      ─> checkpoint_to_resume    the first process: decides, reports damaged ones

    step000300  damaged, model.safetensors is cut short    skipped, with a line in the log
    step000200  intact                                     the run goes on from it
    step000100                                             not looked at

Called by start.py; restore.py then reads the checkpoint. That of a 7B model has 87 GB, which one
process hashes for a minute or more, so all processes share its files.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.base.errors import ConfigError, DataError, UnreadableNowError
from olmo_sparsity.base.manifest import find_damaged_file, read_entries
from olmo_sparsity.base.progress import say
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.checkpoint_files import list_checkpoints
from olmo_sparsity.training.metrics.read import read_metrics
from olmo_sparsity.training.optimizer.moments import share_out
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.run_folder.attempts import Attempts
from olmo_sparsity.training.run_folder.environment import resumed_steps

RESTORE = "restore one, or begin anew and keep what is left with --start_over=true"
"""What to do if no checkpoint is intact."""


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose files were compared with its manifest."""

    folder: Path
    problem: str | None
    """What is damaged in it; None if it is intact."""


def choose_checkpoint(config: RunConfig, processes: Processes) -> Path | None:
    """Return the checkpoint to go on from, of the run or of `branch_from`, on all processes the
    same; None for a run that begins."""
    verified = verify_newest(Path(config.run_folder), processes)
    latest = None
    with processes.raising_together():
        if processes.is_first:
            latest = checkpoint_to_resume(config, verified)
    latest = processes.gather(latest)[0]
    if latest is None and config.branch_from is not None:
        latest = Path(config.branch_from)
        problem = find_damage_together(latest, processes)
        with processes.raising_together():
            if problem is not None and processes.is_first:
                raise ConfigError(
                    f"branch_from={latest} must be an intact checkpoint folder: {problem}"
                )
    return latest


def verify_newest(run_folder: Path, processes: Processes) -> list[VerifiedCheckpoint]:
    """Verify the checkpoints of a run, newest first, until one is intact. Return those that were
    verified, on all processes the same: in the example above step 300, damaged, and step 200. Raise
    UnreadableNowError if one that cannot be read now may be intact."""
    folders: list[Path] = []
    with processes.raising_together():
        if processes.is_first:
            folders = list_checkpoints(run_folder)
    verified = []
    # The first process lists them for all: a network disk may show another list elsewhere.
    for folder in processes.gather(folders)[0]:
        problem = find_damage_together(folder, processes)
        verified.append(VerifiedCheckpoint(folder, problem))
        if problem is None:
            break
    return verified


def find_damage_together(folder: Path, processes: Processes) -> str | None:
    """Return what is damaged in a folder that has a manifest, on all processes the same; None if it
    is intact. Each process hashes a share of the files."""
    # The first process reads the manifest for all.
    own_manifest = None
    with processes.raising_together():
        if processes.is_first:
            own_manifest = read_entries(folder)
    manifest = processes.gather(own_manifest)[0]
    assert manifest is not None  # it is the first process's
    if manifest.problem is not None:
        return manifest.problem

    # About as many bytes for each process, by the same rule on all of them.
    sizes = {name: entry.bytes for name, entry in sorted(manifest.files.items())}
    reader_of_file = share_out(sizes, processes.world_size)
    own_files = {
        name: entry
        for name, entry in manifest.files.items()
        if reader_of_file[name] == processes.rank
    }
    own_problem = None
    with processes.raising_together():
        own_problem = find_damaged_file(folder, own_files)
    problems = [problem for problem in processes.gather(own_problem) if problem is not None]
    # Any of them would do, but all processes must return the same.
    return min(problems, default=None)


def checkpoint_to_resume(config: RunConfig, verified: Sequence[VerifiedCheckpoint]) -> Path | None:
    """Return the checkpoint of the run to resume; None for a run that begins. With `start_over` a
    run whose checkpoints are damaged or gone begins, too, and what is left of them is set aside.
    Partial checkpoints of killed starts are removed.

    Args:
        verified: What `verify_newest` returned.
    """
    run_folder = Path(config.run_folder)
    begun_at = 0
    try:
        latest = _newest_intact(run_folder, verified)
        if latest is None:
            begun_at = _begun_at(config)
            _check_nothing_was_saved(config, begun_at)
    except DataError as error:
        # What cannot be read now may be intact, and is not set aside.
        if not config.start_over or isinstance(error, UnreadableNowError):
            raise
        set_aside_to = set_aside(run_folder)
        say(f"{error.problem}: beginning anew; what is left is in {set_aside_to}")
        return None
    _remove_partial(run_folder)
    num_logged = _last_logged_step(run_folder) - begun_at
    if latest is None and num_logged > 0:
        logged = f"{run_folder} has logged {num_logged} steps and saved none"
        say(f"{logged}: beginning again at step {begun_at}")
    return latest


def _newest_intact(run_folder: Path, verified: Sequence[VerifiedCheckpoint]) -> Path | None:
    """Return the newest intact checkpoint, or None if there is no checkpoint. Damaged ones are
    reported and skipped. Raise DataError if all are damaged, as training from the beginning would
    replace them."""
    for checkpoint in verified:
        if checkpoint.problem is None:
            return checkpoint.folder
        problem = f"{checkpoint.folder} is damaged ({checkpoint.problem})"
        say(f"checkpoint {problem}; trying the one before")
    if verified:
        problem = f"no checkpoint of {run_folder} is intact, the latest: {verified[0].problem}"
        raise DataError(f"{problem}; {RESTORE}")
    return None


def _begun_at(config: RunConfig) -> int:
    """Return the step at which a run begins: 0, or that of the checkpoint from which it branches.
    It is 0, too, for a branch that has not started yet, which has neither saved nor logged."""
    if config.branch_from is None:
        return 0
    steps = resumed_steps(Path(config.run_folder))
    return steps[0] if steps else 0


def _check_nothing_was_saved(config: RunConfig, begun_at: int) -> None:
    """Raise DataError if a run without a checkpoint has had one, as far as its other files tell.

    Args:
        begun_at: The step at which the run begins, of which it has saved no checkpoint.
    """
    run_folder = Path(config.run_folder)
    saved_step = last_saved_step(run_folder)
    if saved_step > begun_at:
        gone = f"{run_folder} has saved step {saved_step}, and no checkpoint is there now"
        raise DataError(f"{gone}; {RESTORE}")
    # A save may be under way when a run dies. The next one begins only when it is on the disk, so
    # that after two intervals one checkpoint at least must be there.
    interval_steps = config.checkpoint.interval_steps
    num_logged = _last_logged_step(run_folder) - begun_at
    if interval_steps and num_logged > 2 * interval_steps:
        logged = f"{run_folder} has logged {num_logged} steps, and no checkpoint is there now"
        raise DataError(f"{logged}; {RESTORE}")


def _last_logged_step(run_folder: Path) -> int:
    """Return the last step in the metrics of a run; 0 if it has logged none."""
    return max((row["step"] for row in read_metrics(run_folder / "metrics.jsonl")), default=0)


def last_saved_step(run_folder: Path) -> int:
    """Return the last step that a start has saved or resumed from; 0 if there is none."""
    return max(Attempts.read(run_folder).saved_step, *resumed_steps(run_folder), 0)


def _remove_partial(run_folder: Path) -> None:
    """Remove checkpoints that killed starts have not completed."""
    for partial in (run_folder / "checkpoints").glob("*.tmp"):
        shutil.rmtree(partial, ignore_errors=True)


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
