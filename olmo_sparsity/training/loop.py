"""Train a model: from its last checkpoint to the last step, again after a batch that is skipped.

    train ─> train_from_checkpoint ─> starting (prepared_run.py): counts this start
                                   ─> prepare (start.py): engine, batches, the step to begin at
                                   ─> take_steps: Steps.take_all (steps.py)
                                   ─> finish: export, last line

    outcome = train(load_config("configs/quick.yaml", []))    # FINISHED or STOPPED_BY_SIGNAL

The config determines a run, and its checkpoints hold all state that must survive a kill. So the
same command resumes a run, whether it was stopped by a signal or killed. command/training.py calls
`train` in each process of a launch.

Several processes run this together. Within `processes.raising_together()`, an error of one is
raised by all, so that none waits for another that has gone.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from olmo_sparsity.base.errors import UnreadableNowError, UserError
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.base.retry import is_full, may_pass
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.huggingface.exchange import export
from olmo_sparsity.training.after_step.profile import Profile
from olmo_sparsity.training.checkpoints.writer import EXIT_DISK, CheckpointWriter
from olmo_sparsity.training.metrics.loss_rows import format_losses
from olmo_sparsity.training.metrics.metrics import Metrics
from olmo_sparsity.training.metrics.writers import MetricWriter, MetricWriters
from olmo_sparsity.training.prepared_run import PreparedRun, starting
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.stop_signals import stop_signals
from olmo_sparsity.training.run_folder.environment import has_started
from olmo_sparsity.training.run_folder.skipped_batches import skip_and_go_back
from olmo_sparsity.training.start import prepare
from olmo_sparsity.training.steps import Outcome, Steps


def train(
    config: RunConfig, processes: Processes | None = None, profile: str | None = None
) -> Outcome:
    """Train until the last step or a signal. Continue from the last checkpoint if the run folder
    has one.

    Args:
        processes: The processes that train together; None: this one alone.
        profile: FIRST:LAST, two steps; a Chrome trace of them and those between is written.
    """
    processes = processes or Processes()
    while True:
        with requeueing_after_disk_errors(Path(config.run_folder)):
            outcome = train_from_checkpoint(config, processes, profile)
        if outcome is not Outcome.BATCH_SKIPPED:
            return outcome
        # All begins again as in a new process, which works with any engine. The old engine must be
        # gone by then, as there is memory for one.
        gc.collect()
        profile = None  # its steps may be done


@contextlib.contextmanager
def requeueing_after_disk_errors(run_folder: Path) -> Iterator[None]:
    """Inside, an error of a disk that may be back in an hour gets the exit code with which a job is
    requeued. So does a full disk, if the run has begun: the first start of a run that finds no room
    has somebody who waits for it, and can choose another disk."""
    try:
        yield
    except OSError as error:
        if is_full(error) and has_started(run_folder):
            place = error.filename or run_folder
            full = UserError(f"{place}: {error.strerror}; free space, then start again")
            full.exit_code = EXIT_DISK
            raise full from None
        if error.filename is None or not may_pass(error):
            raise
        unreadable_now = UnreadableNowError(error.filename, error.strerror)
        unreadable_now.exit_code = EXIT_DISK
        raise unreadable_now from None
    except UserError as error:
        is_full_later = is_full(error) and has_started(run_folder)
        if isinstance(error, UnreadableNowError) or may_pass(error) or is_full_later:
            error.exit_code = EXIT_DISK
        raise


def train_from_checkpoint(
    config: RunConfig, processes: Processes, profile: str | None = None
) -> Outcome:
    """Train from the last checkpoint until the last step or a signal. At a number that is not
    finite, raise UserError; or, with `training.on_nan=skip`, leave that batch out from now on and
    return BATCH_SKIPPED."""
    with starting(config, processes) as start:
        run = prepare(config, start)
        with processes.raising_together():
            # A finished run only exports, whatever it has cost.
            if run.step < run.config.training.num_steps:
                start.gpu_hours.check_earlier(run.step)

        try:
            outcome, metrics = take_steps(run, profile)
        except UserError as error:
            if error.diverged_at is None or run.config.training.on_nan == "stop":
                raise
            skip_batch(run, error.diverged_at, error.problem)
            return Outcome.BATCH_SKIPPED

        if outcome is Outcome.FINISHED:
            run.watchdog.expect("the export")
            finish(run, metrics)
        return outcome


class _TakenSteps(NamedTuple):
    """How the steps of a start have ended."""

    outcome: Outcome
    metrics: Metrics


def take_steps(run: PreparedRun, profile: str | None) -> _TakenSteps:
    """Take all steps of a start, and write all that they have begun to write.

    Args:
        profile: FIRST:LAST, two steps that are profiled; None: no step is.
    """
    processes = run.processes
    num_steps = run.config.training.num_steps
    with (
        Progress("training", num_steps, "steps", enabled=processes.is_first) as progress,
        # A signal ends the count of this start, as the process may be killed before it has saved.
        stop_signals(run.start.count.end) as stop_request,
        CheckpointWriter(run.folder, run.config.checkpoint, processes, run.step) as writer,
        # Not `Start.cleanup`, which the watchdog closes: W&B may wait for its network as it ends.
        contextlib.ExitStack() as open_writers,
    ):
        with processes.raising_together():
            step_profile = Profile(profile, run)
            run.start.cleanup.callback(step_profile.stop)
            metrics = open_metrics(run, open_writers)
        steps = Steps(run, metrics, writer, progress, stop_request, step_profile)
        return _TakenSteps(steps.take_all(), metrics)


def open_metrics(run: PreparedRun, open_writers: contextlib.ExitStack) -> Metrics:
    """Return the metrics of a run, which the first process writes, also to TensorBoard and W&B if
    the config says so. These are closed with `open_writers`."""
    writers: list[MetricWriter] = []
    if run.processes.is_first:
        other_writers = MetricWriters(run.config.logging, run.folder, run.step, run.settings)
        open_writers.callback(other_writers.close)
        writers = [other_writers]
    return Metrics(
        run.folder,
        run.step,
        writers,
        writes=run.processes.is_first,
        while_writing=lambda: run.watchdog.disk_work("writing metrics.jsonl"),
    )


def skip_batch(run: PreparedRun, step: int, problem: str) -> None:
    """Note in the run folder that the batch of a step is left out from now on, and report it.

    Args:
        problem: Says which number of the step is not finite.
    """
    with run.processes.raising_together():
        if run.processes.is_first:
            max_skips = run.config.training.max_skips
            skipped = skip_and_go_back(step, run.folder, run.batches.skipped, max_skips)
            run.start.report(f"{problem}: {skipped}")


def finish(run: PreparedRun, metrics: Metrics) -> None:
    """Export the model if the config says so, and report the last held-out losses."""
    with run.processes.raising_together():
        if run.processes.is_first and run.config.checkpoint.export_at_end:
            out = run.folder / "huggingface"
            if not out.exists():  # a finished run may be started again
                export(run.folder, out)
    if run.processes.is_first:
        losses = metrics.last_heldout()
        shown = format_losses(losses) if losses else "lost, with its line of metrics.jsonl"
        run.start.report(f"held-out loss by position: {shown}")
