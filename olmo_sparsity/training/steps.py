"""Take the steps of a run, and log, evaluate and save when that is due.

    Steps.take_all: for each step
        draw (in a thread)          the next batch
        Steps.take                  engine.step(batch) → loss, gradient norm → metrics
        log_step                    speed, waits and memory; alarms.py
        evaluate_step               held-out losses
        save_checkpoint             weights and moments, which a thread writes

Several processes run this together. Within `processes.raising_together()`, an error of one is
raised by all, so that none waits for another that has gone.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Generator, Iterator
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch

from olmo_sparsity.base.devices import peak_memory_gib
from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.launch import EXIT_STOPPED
from olmo_sparsity.base.locks import check_not_taken_over
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.data.background import in_background
from olmo_sparsity.data.batches import Batch, TrainingBatches
from olmo_sparsity.models.checkpoint_files import part_name, save_weights, write_index
from olmo_sparsity.models.huggingface.computation import describe_angles
from olmo_sparsity.training.alarms import LossAlarm, StragglerAlarm
from olmo_sparsity.training.checkpoint import CheckpointWriter
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.training.evaluate import format_losses
from olmo_sparsity.training.gpu_hours import GpuHours
from olmo_sparsity.training.metrics import Metrics, check_finite
from olmo_sparsity.training.optim import learning_rate
from olmo_sparsity.training.replicas import check_replicas
from olmo_sparsity.training.save_steps import SaveSteps, SaveTime, is_due
from olmo_sparsity.training.start import PreparedRun, StepWork
from olmo_sparsity.training.step_clock import Clock
from olmo_sparsity.training.step_profile import Profile
from olmo_sparsity.training.stop_signals import StopRequest
from olmo_sparsity.training.trainer_state import ENGINE_FOLDER, TrainerState

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
        gpu_hours: GpuHours,
    ) -> None:
        self.run = run
        self.config = run.config
        self.engine = run.engine
        self.processes = run.engine.processes
        self.metrics = metrics
        self.writer = writer
        self.progress = progress
        self.stop_request = stop_request
        self.profile = profile
        self.gpu_hours = gpu_hours
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
                if step == self.first_step:
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
                own_reason = self.stop_request.signal_name or self.gpu_hours.reason_to_stop()
                reading_error = None
                if step < self.num_steps and not own_reason:
                    try:
                        batch = self.read_batch(batches, step + 1)
                    except (UserError, OSError) as error:
                        reading_error = error
                        own_reason = TEXT_UNREADABLE

                with self.clock.paused():
                    # If one process gets a signal, all stop at the same step.
                    stop_reason = self.processes.first_nonempty(own_reason)
                    if stop_reason == TEXT_UNREADABLE:
                        # Only if it is due: a text that has changed may have been trained on, and
                        # another checkpoint would take the place of an older one.
                        self.save_if_due(step)
                        self.raise_together(reading_error)
                    self.save_if_due(step, stop_reason)
                    if stop_reason and step < self.num_steps:
                        return self.stop_early(step, stop_reason)
        return Outcome.FINISHED

    def read_batch(self, batches: Iterator[Batch], step: int) -> Batch:
        """Return the batch of a step, which is usually read already."""
        with (
            self.clock.measuring("data_wait_s"),
            self.run.watchdog.disk_work(f"reading the batch of step {step}"),
        ):
            return next(batches)

    def raise_together(self, own_error: UserError | OSError | None) -> None:
        """Raise an error that one process has, or several, on all of them."""
        with self.processes.raising_together():
            if own_error is not None:
                raise own_error

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
            self.run.watchdog.expect(f"step {step}", "work_timeout_s")
        elif step > self.first_step:
            self.run.watchdog.expect_step(step)

    def log(self, step: int, rate: float) -> None:
        """Write the rows of the steps since the last call, and print what should be looked at."""
        row = log_step(self.run, step, rate, self.clock, self.metrics, self.progress)
        lines = [self.loss_alarm.check(step, row["loss"])]
        # With zero3 a process waits for the weights of others in its forward passes.
        if "slowest_process" in row and self.config.engine.name != "zero3":
            slowest = round(row["slowest_process"])
            lines.append(self.straggler_alarm.check(slowest, row["slowest_to_median"]))
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
                raise self.gpu_hours.error(step)
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


def count_left_out(run: PreparedRun, writer: CheckpointWriter) -> dict[str, float]:
    """Return the numbers of skipped updates, skipped batches and failed saves, for the row of a
    step. A number of what has never happened is left out, but that of `optimizer.skip_sigmas`."""
    counts = {}
    if run.jump_detector:
        counts["skipped_steps"] = float(run.jump_detector.num_skipped)
    if run.batches.skipped:
        counts["skipped_batches"] = float(len(run.batches.skipped))
    if writer.num_failed:
        counts["failed_saves"] = float(writer.num_failed)
    return counts


def log_step(
    run: PreparedRun,
    step: int,
    rate: float,
    clock: Clock,
    metrics: Metrics,
    progress: Progress,
) -> dict[str, float]:
    """Write the rows of the steps since the last call, with speed, waits and memory, and show
    progress. Return the mean of their losses and the speeds, by their names in the metrics.

    Args:
        rate: The learning rate of this step.
    """
    steps_per_s = clock.steps_per_s(step)
    tokens_per_s = steps_per_s * run.step_work.tokens
    speed = {"tokens_per_s": tokens_per_s}
    speed |= count_epochs_so_far(run, step)
    speed |= clock.take_measured()
    speed["peak_memory_gib"] = peak_memory_gib(run.engine.device)
    speed |= flops_utilization(run.step_work, steps_per_s)
    speed |= slowest_process(run.engine)
    with run.engine.processes.raising_together():
        mean_loss = metrics.flush(**speed)
    assert mean_loss is not None  # this step has a row, at least
    progress.update(
        step,
        loss=f"{mean_loss:.4f}",
        lr=f"{rate:.2e}",
        tokens_per_s=f"{tokens_per_s:,.0f}",
    )
    return speed | {"loss": mean_loss}


def count_epochs_so_far(run: PreparedRun, step: int) -> dict[str, float]:
    """Return how often the text was read until a step, and each of several corpora."""
    reads_by_corpus = run.batches.order.count_reads(step)
    epochs = {"epochs": max(reads_by_corpus.values())}
    # The name of a single corpus is empty.
    return epochs | {f"epochs/{name}": reads for name, reads in reads_by_corpus.items() if name}


def flops_utilization(step_work: StepWork, steps_per_s: float) -> dict[str, float]:
    """Return MFU, the share of the vendor's FLOP/s that training reaches; nothing if these are not
    known."""
    if step_work.stated_flops_per_second is None:
        return {}
    # Two conventions of attention's FLOPs, so that the number compares with other projects'.
    whole = step_work.flops_whole_attention
    return {
        "mfu": steps_per_s * step_work.flops / step_work.stated_flops_per_second,
        "mfu_whole_attention": steps_per_s * whole / step_work.stated_flops_per_second,
    }


def slowest_process(engine: Engine) -> dict[str, float]:
    """Return the rank of the process whose forward passes took longest since the last call, and the
    ratio of their time to that of the median process: a slow GPU or node delays all others. Return
    nothing for a single process."""
    if engine.processes.world_size == 1:
        return {}
    seconds = engine.processes.gather(engine.losses.clock.take())
    longest_s = max(seconds)
    ratio = longest_s / max(statistics.median_low(seconds), 1e-9)
    return {"slowest_process": float(seconds.index(longest_s)), "slowest_to_median": ratio}


def evaluate_step(
    run: PreparedRun, step: int, metrics: Metrics, writer: CheckpointWriter, progress: Progress
) -> None:
    """Measure held-out losses, and everything else that `evaluation` configures, and log them."""
    engine = run.engine
    evaluation = run.evaluation
    run.watchdog.expect(f"the evaluation of step {step}", "work_timeout_s")
    other_results: dict[str, list | dict] = {}

    losses_by_corpus: dict[str, list[dict]] = {}
    if evaluation.corpora:
        losses_by_corpus = evaluation.losses_by_corpus(engine)
        other_results["by_corpus"] = losses_by_corpus
        losses = evaluation.mean_losses(losses_by_corpus)
    else:
        losses = evaluation.losses(engine)
    drop = evaluation.induction_drop(engine)
    if evaluation.settings.documents:
        other_results["by_place"] = evaluation.losses_by_place(engine)
    if run.measures:
        writer.wait()  # so that there is one copy of the weights at a time
        weights = engine.copy_weights(whole=True)
        for name, measure in run.measures.items():
            other_results[name] = measure(step, weights)

    with engine.processes.raising_together():
        metrics.write_heldout(step, losses, drop, other_results)
    if step < run.config.training.num_steps:  # `finish` of loop.py prints those of the last step
        progress.note(
            f"step {step}: held-out loss {format_losses(losses)}; induction drop {drop:.2f}"
        )
        for name, rows in losses_by_corpus.items():
            progress.note(f"step {step}: held-out loss of {name} {format_losses(rows)}")


def save_checkpoint(
    run: PreparedRun, step: int, metrics: Metrics, writer: CheckpointWriter
) -> SaveTime:
    """Copy weights and moments into main memory, from which a thread writes them. Training goes on
    when the copy is complete. Return how long it stood still."""
    engine = run.engine
    processes = engine.processes
    num_parts = processes.world_size
    run.watchdog.expect(f"saving step {step}", "work_timeout_s")
    save_began_s = time.monotonic()
    writer.wait()  # there is memory for one copy
    waited_s = time.monotonic() - save_began_s
    with processes.raising_together():
        if processes.is_first:
            check_not_taken_over(writer.run_folder)
        metrics.flush()  # raises if a loss is not finite, as such weights must not be saved

    # After the flush, which knows the CRC of this step's line.
    state = current_state(run, step, metrics)
    copy_began_s = time.monotonic()
    weights = engine.copy_weights()
    write_moments = engine.copy_moments()
    copied_s = time.monotonic() - copy_began_s
    with processes.raising_together():  # no loss shows the effect of this update yet
        total = sum(float(tensor.sum(dtype=torch.float64)) for tensor in weights.values())
        check_finite(step, {"sum of the weights": total})
    check_replicas(engine, step)

    def write_part(folder: Path) -> list[Path]:
        path = save_weights(weights, folder / part_name(processes.rank, num_parts))
        return [path, write_moments(folder / ENGINE_FOLDER)]

    def write_once(folder: Path) -> None:
        (folder / "config.yaml").write_text(run.config_yaml, encoding="utf-8")
        run.shards.tokenizer.save(str(folder / "tokenizer.json"))
        if num_parts > 1:
            write_index(folder, engine.part_of, num_parts)

    writer.save(state, write_once, write_part, save_began_s)
    return SaveTime(waited_s, copied_s)


def current_state(run: PreparedRun, step: int, metrics: Metrics) -> TrainerState:
    """Return what a checkpoint of a step holds besides weights and moments."""
    state = TrainerState(
        step=step,
        tokens=step * run.step_work.tokens,
        data_fingerprint=run.shards.fingerprint,
        metrics_crc32=metrics.last_crc32,
        skipped_batches=list(run.batches.skipped),
    )
    if run.jump_detector:
        state.recent = run.jump_detector.recent
        state.num_skipped = run.jump_detector.num_skipped
    return state
