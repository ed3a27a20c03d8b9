"""Train a model: from its last checkpoint to the last step, again after a batch that is skipped.

    train ─> train_from_checkpoint ─> prepare (start.py): engine, batches, the step to begin at
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
from olmo_sparsity.base.retry import may_pass
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.huggingface.exchange import export
from olmo_sparsity.training.after_step.profile import Profile
from olmo_sparsity.training.checkpoints.writer import EXIT_DISK, CheckpointWriter
from olmo_sparsity.training.metrics.loss_rows import format_losses
from olmo_sparsity.training.metrics.metrics import Metrics
from olmo_sparsity.training.metrics.writers import MetricWriter, MetricWriters
from olmo_sparsity.training.processes.distributed import Processes
from olmo_sparsity.training.processes.stop_signals import stop_signals
from olmo_sparsity.training.run_folder.attempts import StartCount, counted_start
from olmo_sparsity.training.run_folder.gpu_hours import GpuHours
from olmo_sparsity.training.run_folder.skipped_batches import skip_batch_of
from olmo_sparsity.training.start import PreparedRun, prepare
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
        with requeueing_after_disk_errors():
            outcome = train_from_checkpoint(config, processes, profile)
        if outcome is not Outcome.BATCH_SKIPPED:
            return outcome
        # All begins again as in a new process, which works with any engine. The old engine must be
        # gone by then, as there is memory for one.
        gc.collect()
        profile = None  # its steps may be done


@contextlib.contextmanager
def requeueing_after_disk_errors() -> Iterator[None]:
    """Inside, an error of a disk that may be back in an hour gets the exit code with which a job is
    requeued."""
    try:
        yield
    except OSError as error:
        if error.filename is None or not may_pass(error):
            raise
        unreadable_now = UnreadableNowError(error.filename, error.strerror)
        unreadable_now.exit_code = EXIT_DISK
        raise unreadable_now from None
    except UserError as error:
        if isinstance(error, UnreadableNowError) or may_pass(error):
            error.exit_code = EXIT_DISK
        raise


def train_from_checkpoint(
    config: RunConfig, processes: Processes, profile: str | None = None
) -> Outcome:
    """Train from the last checkpoint until the last step or a signal. At a number that is not
    finite, raise UserError; or, with `training.on_nan=skip`, leave that batch out from now on and
    return BATCH_SKIPPED."""
    run_folder = Path(config.run_folder)
    with (
        contextlib.ExitStack() as folder_lock,  # held until all is written
        counted_start(run_folder) as start_count,
    ):
        gpu_hours = GpuHours(run_folder, config.training.max_gpu_hours, processes)
        run = prepare(config, processes, folder_lock, start_count, gpu_hours)
        with processes.raising_together():
            # A finished run only exports, whatever it has cost.
            if run.step < run.config.training.num_steps:
                gpu_hours.check_earlier(run.step)

        try:
            outcome, metrics = take_steps(
                run, processes, profile, folder_lock, start_count, gpu_hours
            )
        except UserError as error:
            if error.diverged_at is None or run.config.training.on_nan == "stop":
                raise
            skip_batch(run, error.diverged_at, error.problem, processes)
            return Outcome.BATCH_SKIPPED

        if outcome is Outcome.FINISHED:
            run.watchdog.expect("the export")
            finish(run, metrics, processes)
        return outcome


class _TakenSteps(NamedTuple):
    """How the steps of a start have ended."""

    outcome: Outcome
    metrics: Metrics


def take_steps(
    run: PreparedRun,
    processes: Processes,
    profile: str | None,
    folder_lock: contextlib.ExitStack,
    start_count: StartCount,
    gpu_hours: GpuHours,
) -> _TakenSteps:
    """Take all steps of a start, and write all that they have begun to write.

    Args:
        profile: FIRST:LAST, two steps that are profiled; None: no step is.
        folder_lock: What is closed with the lock of the run folder.
        start_count: Counts this start. A signal to stop ends it, as the process may be killed
            before it has saved.
        gpu_hours: The GPU-hours of the run, which may end it.
    """
    run_folder = Path(run.config.run_folder)
    num_steps = run.config.training.num_steps
    with (
        Progress("training", num_steps, "steps", enabled=processes.is_first) as progress,
        stop_signals(start_count.end) as stop_request,
        CheckpointWriter(run_folder, run.config.checkpoint, processes, run.step) as writer,
        # Not `folder_lock`, which the watchdog closes: W&B may wait for its network as it ends.
        contextlib.ExitStack() as open_writers,
    ):
        with processes.raising_together():
            step_profile = Profile(profile, run)
            folder_lock.callback(step_profile.stop)
            metrics = open_metrics(run, processes, open_writers)
        steps = Steps(run, metrics, writer, progress, stop_request, step_profile, gpu_hours)
        return _TakenSteps(steps.take_all(), metrics)


def open_metrics(
    run: PreparedRun, processes: Processes, open_writers: contextlib.ExitStack
) -> Metrics:
    """Return the metrics of a run, which the first process writes, also to TensorBoard and W&B if
    the config says so. These are closed with `open_writers`."""
    run_folder = Path(run.config.run_folder)
    writers: list[MetricWriter] = []
    if processes.is_first:
        other_writers = MetricWriters(run.config.logging, run_folder, run.step, run.settings)
        open_writers.callback(other_writers.close)
        writers = [other_writers]
    return Metrics(
        run_folder,
        run.step,
        writers,
        writes=processes.is_first,
        while_writing=lambda: run.watchdog.disk_work("writing metrics.jsonl"),
    )


def skip_batch(run: PreparedRun, step: int, problem: str, processes: Processes) -> None:
    """Note in the run folder that the batch of a step is left out from now on, and report it.

    Args:
        problem: Says which number of the step is not finite.
    """
    run_folder = Path(run.config.run_folder)
    with processes.raising_together():
        if processes.is_first:
            skipped = skip_batch_of(step, run_folder, run.config.training.max_skips)
            run.report(f"{problem}: {skipped}")


def finish(run: PreparedRun, metrics: Metrics, processes: Processes) -> None:
    """Export the model if the config says so, and report the last held-out losses."""
    run_folder = Path(run.config.run_folder)
    with processes.raising_together():
        if processes.is_first and run.config.checkpoint.export_at_end:
            out = run_folder / "huggingface"
            if not out.exists():  # a finished run may be started again
                export(run_folder, out)
    if processes.is_first:
        losses = metrics.last_heldout()
        shown = format_losses(losses) if losses else "lost, with its line of metrics.jsonl"
        run.report(f"held-out loss by position: {shown}")
