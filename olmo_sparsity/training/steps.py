"""Take the steps of a run, and log, evaluate and save when that is due.

    Steps.take_all: for each step
        draw (in a thread)          the next batch
        Steps.take                  engine.step(batch) → loss, gradient norm → metrics
        Steps.log                   speed, waits and memory (after_step/log.py, alarms.py)
        Steps.evaluate_if_due       held-out losses (after_step/evaluation.py)
        Steps.save_if_due           weights and moments, which a thread writes (after_step/save.py)
        next                        whether a process was asked to stop, all stop together

Several processes run this together. Within `processes.raising_together()`, an error of one is
raised by all, so that none waits for another that has gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.launch import EXIT_STOPPED
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.data.background import in_background
from olmo_sparsity.data.batches import Batch, TrainingBatches
from olmo_sparsity.models.huggingface.computation import describe_angles
from olmo_sparsity.training.after_step.alarms import LossAlarm, StragglerAlarm
from olmo_sparsity.training.after_step.clock import Clock
from olmo_sparsity.training.after_step.evaluation import evaluate_step
from olmo_sparsity.training.after_step.log import count_left_out, log_step
from olmo_sparsity.training.after_step.profile import Profile
from olmo_sparsity.training.after_step.save import save_checkpoint
from olmo_sparsity.training.checkpoints.save_steps import SaveSteps, SaveTime, is_due
from olmo_sparsity.training.checkpoints.writer import CheckpointWriter
from olmo_sparsity.training.metrics.metrics import Metrics
from olmo_sparsity.training.optimizer.learning_rate import learning_rate
from olmo_sparsity.training.prepared_run import PreparedRun
from olmo_sparsity.training.processes.stop_signals import StopRequest
from olmo_sparsity.training.run_folder.gpu_hours import GpuHours

TEXT_UNREADABLE = "the text of the next step cannot be read"
"""The reason to stop of a process whose next batch cannot be read."""

SLOW_EVALUATION_S = 60.0
"""Seconds above which an evaluation is reported as slow. slurm/train.sbatch signals a job 120 s
before its time limit, and what the evaluation takes of them is missing for the save."""


class Outcome(IntEnum):
    """How training ended: exit codes of `olmo-sparsity train`; command/ending.py has the others."""

    FINISHED = 0
    STOPPED_BY_SIGNAL = EXIT_STOPPED
    """Saved and stopped by SIGTERM, SIGINT or SIGUSR2; the same command resumes."""

    BATCH_SKIPPED = -1
    """A number was not finite, and the batch of its step is left out from now on. `train` then goes
    back to the last checkpoint, so this is no exit code."""


class Ahead(NamedTuple):
    """What follows a step on one process."""

    own_reason: str
    """Why this process asks all to stop after the step; empty if it does not."""

    batch: Batch | None = None
    """The batch of the next step. None after the last step, or with a reason to stop."""

    reading_error: UserError | OSError | None = None
    """Why the next batch could not be read; None if it could."""


class Steps:
    """Trains step by step. Logs, evaluates and saves when these are due."""

    def __init__(
        self,
        run: PreparedRun,
        metrics: Metrics,
        writer: CheckpointWriter,
        progress: Progress,
        stop_request: StopRequest,
        profile: Profile,
    ) -> None:
        self.run = run
        self.config = run.config
        self.engine = run.engine
        self.processes = run.processes
        self.metrics = metrics
        self.writer = writer
        self.progress = progress
        self.stop_request = stop_request
        self.profile = profile
        self.gpu_hours = run.start.gpu_hours
        self.first_step = run.step + 1
        self.num_steps = run.config.training.num_steps
        self.clock = Clock(run.step)
        self.loss_alarm = LossAlarm(self.config, metrics.earlier_losses)
        self.straggler_alarm = StragglerAlarm(run.watchdog.nodes)
        self.saves = SaveSteps(run.config.checkpoint, run.step, self.num_steps)
        self._has_said_slow = False

    def take_all(self) -> Outcome:
        """Train until the last step, or until a signal or the GPU-hours ask to stop."""
        self.progress.resume_at(self.run.step)
        # A thread draws the next batch while a step computes.
        drawn = draw(self.run.batches, self.first_step, self.num_steps, self.engine.device)
        with contextlib.closing(in_background(drawn, depth=1)) as batches:
            for step in range(self.first_step, self.num_steps + 1):
                if step == self.first_step:  # in the loop, as a finished run reads no batch
                    with self.processes.raising_together():
                        batch = self.read_batch(batches, step)
                rate = self.take(step, batch)
                if self.is_logged(step):
                    self.log(step, rate)
                with self.clock.paused():
                    self.evaluate_if_due(step)

                # The next batch is read before the processes ask each other whether to stop. So one
                # exchange a step is enough, and if one process cannot read its text, all end at
                # once. Otherwise the others would wait for it in the next step, and leave as if its
                # node had failed.
                ahead = self.look_ahead(step, batches)
                with self.clock.paused():
                    # If one process gets a signal, all stop at the same step.
                    stop_reason = self.processes.first_nonempty(ahead.own_reason)
                    self.save_or_raise(step, stop_reason, ahead.reading_error)
                    if stop_reason and step < self.num_steps:
                        return self.stop_early(step, stop_reason)
                if ahead.batch is not None:
                    batch = ahead.batch
        return Outcome.FINISHED

    def look_ahead(self, step: int, batches: Iterator[Batch]) -> Ahead:
        """Return what follows a step on this process: the next batch, or a reason to stop."""
        own_reason = self.stop_request.signal_name or self.gpu_hours.reason_to_stop()
        if own_reason or step == self.num_steps:
            return Ahead(own_reason)
        try:
            return Ahead(own_reason="", batch=self.read_batch(batches, step + 1))
        except (UserError, OSError) as error:
            return Ahead(TEXT_UNREADABLE, reading_error=error)

    def read_batch(self, batches: Iterator[Batch], step: int) -> Batch:
        """Return the batch of a step, which is usually read already."""
        with (
            self.clock.measuring("data_wait_s"),
            self.run.watchdog.disk_work(f"reading the batch of step {step}"),
        ):
            return next(batches)

    def is_logged(self, step: int) -> bool:
        """Return whether the row of a step has speeds, and is written at once."""
        return step % self.config.logging.interval_steps == 0 or step == self.num_steps

    def take(self, step: int, batch: Batch) -> float:
        """Take a step, and add its numbers to the metrics. Return its learning rate."""
        self._expect(step)
        begins_stage = step in self.config.training.first_steps
        if step == self.first_step or begins_stage:
            set_angles(self.run, step, self.progress)
        seed_step(self.config.seed, step, self.processes.rank, self.engine.device)
        self.profile.before(step)

        rate = learning_rate(self.config.optimizer, step, self.num_steps)
        logs_layer_norms = self.is_logged(step) and self.config.logging.layer_gradient_norms
        self.engine.logs_layer_norms = logs_layer_norms
        step_began_s = time.monotonic()
        # Both stay on the GPU until metrics are flushed: to read them now, the host would wait.
        loss, gradient_norm = self.engine.step(batch, rate, self.run.jump_detector)
        if step == self.first_step:
            float(gradient_norm)  # waits for the GPU, so that the whole step is timed
            self.run.watchdog.first_step_s = time.monotonic() - step_began_s

        layer_norms = {}
        if logs_layer_norms:
            layer_norms = {
                f"gradient_norm/{part}": norm for part, norm in self.engine.layer_norms.items()
            }
        self.metrics.add(
            step,
            loss=loss,
            gradient_norm=gradient_norm,
            learning_rate=rate,
            **layer_norms,
            **count_left_out(self.run, self.writer),
        )
        return rate

    def _expect(self, step: int) -> None:
        """Tell the watchdog how long the step may take."""
        # Kernels may be compiled in the first step of a stage, and in that of the run, which the
        # watchdog counts as part of the start.
        if step > self.first_step and step in self.config.training.first_steps:
            self.run.watchdog.expect(f"step {step}")
        elif step > self.first_step:
            self.run.watchdog.expect_step(step)

    def log(self, step: int, rate: float) -> None:
        """Write the rows of the steps since the last call, and print what should be looked at."""
        row = log_step(self.run, step, rate, self.clock, self.metrics, self.progress)
        lines = [self.loss_alarm.describe_rise(step, row["loss"])]
        # With zero3 a process waits for the weights of others in its forward passes.
        if "slowest_process" in row and self.config.engine.name != "zero3":
            slowest = round(row["slowest_process"])
            lines.append(self.straggler_alarm.describe_slow(slowest, row["slowest_to_median"]))
        for line in filter(None, lines):
            self.progress.note(line)

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate, if that is due after this step."""
        if is_due(step, self.config.evaluation.interval_steps, self.num_steps):
            evaluation_began_s = time.monotonic()
            with self.clock.measuring("evaluation_s"):
                evaluate_step(self.run, step, self.metrics, self.writer, self.progress)
            self._report_if_slow(step, time.monotonic() - evaluation_began_s)

    def _report_if_slow(self, step: int, evaluation_s: float) -> None:
        """Say once that a signal during an evaluation may come too late to save."""
        if evaluation_s > SLOW_EVALUATION_S and not self._has_said_slow:
            self._has_said_slow = True
            self.progress.note(
                f"step {step}: the evaluation took {evaluation_s:.0f} s, and a signal acts after "
                "it; before a time limit leave so much more than a save takes (sbatch "
                "--signal=USR2@SECONDS), or lower evaluation.num_sequences"
            )

    def save_or_raise(
        self, step: int, stop_reason: str, reading_error: UserError | OSError | None
    ) -> None:
        """Save if that is due after this step, or if the run stops there. If a process could not
        read its next batch, all raise.

        Args:
            stop_reason: Why the run stops after this step; empty if it goes on.
            reading_error: Why this process could not read its next batch; None if it could.
        """
        if stop_reason != TEXT_UNREADABLE:
            self.save_if_due(step, stop_reason)
            return
        # Only if it is due: a text that has changed may have been trained on, and another
        # checkpoint would take the place of an older one.
        self.save_if_due(step)
        with self.processes.raising_together():
            if reading_error is not None:
                raise reading_error

    def save_if_due(self, step: int, stop_reason: str = "") -> None:
        """Save, if that is due after this step or if the run stops there. Before the run ends, wait
        until the checkpoint is complete."""
        if stop_reason or self.saves.due(step):
            with self.clock.measuring("save_s"):
                save_time = self.save(step)
            next_save = self.saves.after_save(step, save_time, self.processes)
            if next_save:
                self.progress.note(f"step {step}: {next_save}")
        if stop_reason or step == self.num_steps:
            # There is no next save, so a failed one is begun again, until `wait` raises.
            while not self.writer.wait():
                self.save(step)
            self.metrics.finish()

    def save(self, step: int) -> SaveTime:
        """Begin to save this step. Return how long training stood still."""
        return save_checkpoint(self.run, step, self.metrics, self.writer)

    def stop_early(self, step: int, reason: str) -> Outcome:
        """End the run after a step that is saved: on a signal, or with an error at its
        GPU-hours."""
        with self.processes.raising_together():
            if reason == GpuHours.SPENT and self.processes.is_first:
                raise self.gpu_hours.limit_error(step)
        self.progress.note(f"{reason}: saved step {step}; the same command goes on")
        return Outcome.STOPPED_BY_SIGNAL


def draw(
    batches: TrainingBatches, first_step: int, num_steps: int, device: torch.device
) -> Generator[Batch, None, None]:
    """Yield the batches of a step and all later ones, for a thread to iterate."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise the thread would use memory of the first GPU
    for step in range(first_step, num_steps + 1):
        batch = batches.of_step(step)
        yield batch.pinned() if device.type == "cuda" else batch


def set_angles(run: PreparedRun, step: int, progress: Progress) -> None:
    """Have the model turn by the base and the scaling of RoPE of a step's stage."""
    config_of_stage = run.config.at(step).model
    # A new model turns as the run's own settings say.
    is_first = step == run.step + 1
    config_before = run.config.model if is_first else run.config.at(step - 1).model
    if config_of_stage != config_before:
        run.engine.losses.model.set_angles(config_of_stage)
        progress.note(f"step {step}: RoPE turns with {describe_angles(config_of_stage)}")


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the random numbers of a step. Dropout then depends only on (seed, step, process), so a
    resumed run repeats it."""
    (mixed,) = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    # torch.manual_seed formats the stack at each call, for each kind of device that is not there.
    torch.default_generator.manual_seed(int(mixed))
    if device.type == "cuda":
        torch.cuda.manual_seed(int(mixed))
