"""Train a model: from its last checkpoint to the last step, again after a batch that is skipped.

    train ─> train_from_checkpoint ─> prepare (start.py): engine, batches, the step to begin at
                                   ─> take_steps: Steps.run (steps.py)
                                   ─> finish: export, last line

The config determines a run, and its checkpoints hold all state that must survive a kill. So the
same command resumes a run, whether it was stopped by a signal or killed.

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
from olmo_sparsity.training.attempts import StartCount, counted_start
from olmo_sparsity.training.checkpoint import EXIT_DISK, CheckpointWriter
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.evaluate import format_losses
from olmo_sparsity.training.gpu_hours import GpuHours
from olmo_sparsity.training.metric_writers import MetricWriter, MetricWriters
from olmo_sparsity.training.metrics import Metrics
from olmo_sparsity.training.run_folder import skip_batch_of
from olmo_sparsity.training.start import Start, prepare
from olmo_sparsity.training.step_profile import Profile
from olmo_sparsity.training.steps import Outcome, Steps
from olmo_sparsity.training.stop_signals import stop_signals


def train(
    config: RunConfig, processes: Processes | None = None, profile: str | None = None
) -> Outcome:
    """Train until the last step or a signal. Continue from the last checkpoint if the run folder
    has one. `profile`: FIRST:LAST, two steps; a Chrome trace of them and those between is
    written."""
    processes = processes or Processes()
    while True:
        with naming_disks():
            outcome = train_from_checkpoint(config, processes, profile)
        if outcome is not Outcome.BATCH_SKIPPED:
            return outcome
        # All begins again as in a new process, which works with any engine. The old engine must be
        # gone by then, as there is memory for one.
        gc.collect()
        profile = None  # its steps may be done


@contextlib.contextmanager
def naming_disks() -> Iterator[None]:
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
    """Train from the last checkpoint until the last step, a signal, or a number that is not finite.
    With `training.on_nan=skip` the last is an outcome, and otherwise an error."""
    run_folder = Path(config.run_folder)
    with (
        contextlib.ExitStack() as held,  # which locks the run folder until all is written
        counted_start(run_folder) as count,
    ):
        hours = GpuHours(run_folder, config.training.max_gpu_hours, processes)
        start = prepare(config, processes, held, count, hours)
        with processes.raising_together():
            # A finished run only exports, whatever it has cost.
            if start.step < start.config.training.num_steps:
                hours.check_earlier(start.step)
        try:
            outcome, metrics = take_steps(start, processes, profile, held, count, hours)
        except UserError as error:
            if error.diverged_at is None or start.config.training.on_nan == "stop":
                raise
            skip_batch(start, error.diverged_at, error.problem, processes)
            return Outcome.BATCH_SKIPPED
        if outcome is Outcome.FINISHED:
            start.watchdog.expect("the export", "work_timeout_s")
            finish(start, metrics, processes)
        return outcome


class _Steps(NamedTuple):
    """What has become of the steps of a start."""

    outcome: Outcome
    metrics: Metrics


def take_steps(
    start: Start,
    processes: Processes,
    profile: str | None,
    held: contextlib.ExitStack,
    count: StartCount,
    hours: GpuHours,
) -> _Steps:
    """Take all steps of a start, and write all that they have begun to write.

    profile: FIRST:LAST, two steps that are profiled; None: no step is.
    held: What is closed with the lock of the run folder.
    count: Counts this start. A signal to stop ends it, as the process may be killed before it has
        saved.
    hours: The GPU-hours of the run, which may end it.
    """
    run_folder = Path(start.config.run_folder)
    num_steps = start.config.training.num_steps
    with (
        Progress("training", num_steps, "steps", enabled=processes.is_first) as progress,
        stop_signals(count.end) as stop,
        CheckpointWriter(run_folder, start.config.checkpoint, processes, start.step) as writer,
        # Not `held`, which the watchdog closes: W&B may wait for its network as it ends.
        contextlib.ExitStack() as opened,
    ):
        with processes.raising_together():
            profiled = Profile(profile, start)
            held.callback(profiled.stop)
            metrics = open_metrics(start, processes, opened)
        steps = Steps(start, metrics, writer, progress, stop, profiled, hours)
        return _Steps(steps.run(), metrics)


def open_metrics(start: Start, processes: Processes, opened: contextlib.ExitStack) -> Metrics:
    """Return the metrics of a run, which the first process writes, also to TensorBoard and W&B if
    the config says so. These are closed with `opened`."""
    run_folder = Path(start.config.run_folder)
    writers: list[MetricWriter] = []
    if processes.is_first:
        elsewhere = MetricWriters(start.config.logging, run_folder, start.step, start.settings)
        opened.callback(elsewhere.close)
        writers = [elsewhere]
    return Metrics(
        run_folder,
        start.step,
        writers,
        writes=processes.is_first,
        while_writing=lambda: start.watchdog.disk_work("writing metrics.jsonl"),
    )


def skip_batch(start: Start, step: int, problem: str, processes: Processes) -> None:
    """Note in the run folder that the batch of a step is left out from now on, and report it.
    `problem`: says which number of the step is not finite."""
    run_folder = Path(start.config.run_folder)
    with processes.raising_together():
        if processes.is_first:
            skipped = skip_batch_of(step, run_folder, start.config.training.max_skips)
            start.report(f"{problem}: {skipped}")


def finish(start: Start, metrics: Metrics, processes: Processes) -> None:
    """Export the model if the config says so, and report the last held-out losses."""
    run_folder = Path(start.config.run_folder)
    with processes.raising_together():
        if processes.is_first and start.config.checkpoint.export_at_end:
            out = run_folder / "huggingface"
            if not out.exists():  # a finished run may be started again
                export(run_folder, out)
    if processes.is_first:
        losses = metrics.last_heldout()
        shown = format_losses(losses) if losses else "lost, with its line of metrics.jsonl"
        start.report(f"held-out loss by position: {shown}")
