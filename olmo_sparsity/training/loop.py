"""Train a model: the training loop, its evaluations and its checkpoints.

The config determines a run, and its checkpoints hold all state that must survive a kill."""

from __future__ import annotations

import contextlib
import gc
import re
import signal
import statistics
import time
from collections.abc import Generator, Iterator
from enum import IntEnum
from pathlib import Path
from types import FrameType

import numpy as np
import torch

from olmo_sparsity.base.devices import peak_memory_gib
from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.base.launch import EXIT_STOPPED, STOP_SIGNALS, handling
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.config.sections import CheckpointConfig, RunConfig
from olmo_sparsity.data.background import in_background
from olmo_sparsity.data.batches import Batch, TrainingBatches
from olmo_sparsity.models.checkpoint_files import part_name, save_weights, write_index
from olmo_sparsity.models.exchange import describe_angles, export
from olmo_sparsity.training.checkpoint import ENGINE_FOLDER, CheckpointWriter, TrainerState
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.training.evaluate import format_losses
from olmo_sparsity.training.metric_writers import open_metric_writers
from olmo_sparsity.training.metrics import Metrics, check_finite
from olmo_sparsity.training.optim import learning_rate
from olmo_sparsity.training.preflight import attempt
from olmo_sparsity.training.run_folder import skip_batch_of
from olmo_sparsity.training.start import Start, prepare


class Outcome(IntEnum):
    """Exit codes of `olmo-sparsity train`; see ending.py for the others."""

    FINISHED = 0
    STOPPED_BY_SIGNAL = EXIT_STOPPED
    """Saved and stopped by SIGTERM, SIGINT or SIGUSR2; the same command resumes."""


def train(
    config: RunConfig, processes: Processes | None = None, profile: str | None = None
) -> Outcome:
    """Train until the last step or a signal, from the run folder's last checkpoint if it has one.
    `profile`: FIRST:LAST, the steps of which a Chrome trace is written."""
    processes = processes or Processes()
    while True:
        outcome = train_until_nan(config, processes, profile)
        if outcome is not None:
            return outcome
        # A batch is skipped: all begins again as in a new process, for any engine.
        gc.collect()
        profile = None  # its steps may be done


def train_until_nan(
    config: RunConfig, processes: Processes, profile: str | None = None
) -> Outcome | None:
    """Train from the last checkpoint. Return None when a number was not finite and the batch of its
    step is noted as one to leave out (`training.on_nan=skip`)."""
    with contextlib.ExitStack() as held:  # locks the run folder until all is written
        start = prepare(config, processes, held)
        run_folder = Path(start.config.run_folder)
        num_steps = start.config.training.num_steps
        try:
            with (
                attempt(run_folder, start.config.checkpoint.max_starts, processes),
                Progress("training", num_steps, "steps", enabled=processes.is_first) as progress,
                stop_signals() as stop,
                CheckpointWriter(run_folder, start.config.checkpoint, processes) as writer,
            ):
                with processes.agree():
                    profiled = Profile(profile, start)
                    held.callback(profiled.stop)
                    writers = []
                    if processes.is_first:
                        writers = open_metric_writers(
                            start.config.logging, run_folder, start.step, start.settings
                        )
                    metrics = Metrics(run_folder, start.step, writers, writes=processes.is_first)
                outcome = run_steps(start, metrics, writer, progress, stop, profiled)
        except UserError as error:
            training = start.config.training
            if error.diverged_at is None or training.on_nan == "stop":
                raise
            with processes.agree():
                if processes.is_first:
                    problem = str(error).partition(";")[0]
                    skipped = skip_batch_of(error.diverged_at, run_folder, training.max_skips)
                    start.report(f"{problem}: {skipped}")
            return None
        if outcome is Outcome.FINISHED:
            start.watchdog.expect("the export", "work_timeout_s")
            finish(start, metrics, processes)
        return outcome


def run_steps(
    start: Start,
    metrics: Metrics,
    writer: CheckpointWriter,
    progress: Progress,
    stop: StopRequest,
    profile: Profile,
) -> Outcome:
    """Train step by step, and log, evaluate and save when it is due."""
    config = start.config
    engine = start.engine
    processes = engine.processes
    watchdog = start.watchdog
    num_steps = config.training.num_steps
    saves = SaveSteps(config.checkpoint, start.step, num_steps)
    progress.resume_at(start.step)
    clock = Clock(start.step)
    drawn = draw(start.batches, start.step, num_steps, engine.device)
    with contextlib.closing(in_background(drawn, depth=1)) as batches:
        for step, batch in enumerate(batches, start=start.step + 1):
            if step > start.step + 1:  # kernels may be compiled in the first
                watchdog.expect(f"step {step}", "step_timeout_s")
            if step == start.step + 1 or step in config.training.first_steps:
                set_angles(start, step, progress)
            seed_step(config.seed, step, processes.rank, engine.device)
            rate = learning_rate(config.optimizer, step, num_steps)
            profile.before(step)
            loss, norm = engine.step(batch, rate, start.jumps)
            skipped = {}
            if start.jumps:
                skipped["skipped_steps"] = float(start.jumps.num_skipped)
            if start.batches.skipped:
                skipped["skipped_batches"] = float(len(start.batches.skipped))
            metrics.add(step, loss=loss, gradient_norm=norm, learning_rate=rate, **skipped)

            if step % config.logging.interval_steps == 0 or step == num_steps:
                log_step(start, step, rate, clock.steps_per_s(step), metrics, progress)
            with clock.paused():
                if due(step, config.evaluation.interval_steps, num_steps):
                    evaluate_step(start, step, metrics, writer, progress)
                # If one process gets a signal or cannot write, all stop at the same step.
                reason = processes.first_text(stop.requested or writer.failure)
                if reason or saves.due(step):
                    began = time.perf_counter()
                    save_checkpoint(start, step, metrics, writer)
                    next_save = saves.after_save(step, time.perf_counter() - began, processes)
                    if next_save:
                        progress.note(f"step {step}: {next_save}")
                if reason and step < num_steps:
                    writer.wait()
                    progress.note(f"{reason}: saved step {step}; the same command goes on")
                    return Outcome.STOPPED_BY_SIGNAL
        writer.wait()
    return Outcome.FINISHED


def set_angles(start: Start, step: int, progress: Progress) -> None:
    """Have the model turn by the base and the scaling of RoPE of a step's stage."""
    model = start.config.at(step).model
    # A new model turns as the run's own `model` and `positions` say.
    previous = start.config.model if step == start.step + 1 else start.config.at(step - 1).model
    if model != previous:
        start.engine.losses.model.set_angles(model)
        progress.note(f"step {step}: RoPE turns with {describe_angles(model)}")


def log_step(
    start: Start, step: int, rate: float, steps_per_s: float, metrics: Metrics, progress: Progress
) -> None:
    """Write the rows of the steps since the last call, with speed and memory, and show progress."""
    speed = {"tokens_per_s": steps_per_s * start.tokens_per_step}
    reads = start.batches.order.count_reads(step)
    speed["epochs"] = max(reads.values())
    speed |= {f"epochs/{name}": times for name, times in reads.items() if name}
    speed["peak_memory_gib"] = peak_memory_gib(start.engine.device)
    if start.stated_flops:
        speed["mfu"] = steps_per_s * start.flops_per_step / start.stated_flops
        speed["mfu_whole_attention"] = steps_per_s * start.whole_flops_per_step / start.stated_flops
    speed |= slowest_process(start.engine)
    with start.engine.processes.agree():
        shown = metrics.flush(**speed)
    progress.update(
        step,
        loss=f"{shown['loss']:.4f}",
        lr=f"{rate:.2e}",
        tokens_per_s=f"{steps_per_s * start.tokens_per_step:,.0f}",
    )


def slowest_process(engine: Engine) -> dict[str, float]:
    """Name the process whose forward passes took longest since the last call, and how many times as
    long as those of the median process: a slow GPU or node delays all others."""
    if engine.processes.world_size == 1:
        return {}
    seconds = engine.processes.gather(engine.losses.clock.take())
    slowest = max(seconds)
    ratio = slowest / max(statistics.median_low(seconds), 1e-9)
    return {"slowest_process": float(seconds.index(slowest)), "slowest_to_median": ratio}


def evaluate_step(
    start: Start, step: int, metrics: Metrics, writer: CheckpointWriter, progress: Progress
) -> None:
    """Measure held-out losses, and what else the config names, and log them."""
    config = start.config
    engine = start.engine
    evaluation = start.evaluation
    start.watchdog.expect(f"the evaluation of step {step}", "work_timeout_s")
    measured: dict[str, list | dict] = {}
    by_corpus: dict[str, list[dict]] = {}
    if evaluation.corpora:
        by_corpus = evaluation.losses_by_corpus(engine)
        measured["by_corpus"] = by_corpus
        losses = evaluation.mean_losses(by_corpus)
    else:
        losses = evaluation.losses(engine)
    drop = evaluation.induction_drop(engine)
    if evaluation.settings.documents:
        measured["by_place"] = evaluation.losses_by_place(engine)
    if start.measures:
        writer.wait()  # so that there is one copy of the weights at a time
        weights = engine.copy_weights(whole=True)
        for name, measure in start.measures.items():
            measured[name] = measure(step, weights)
    with engine.processes.agree():
        metrics.write_heldout(step, losses, drop, measured)
    if step < config.training.num_steps:
        progress.note(
            f"step {step}: held-out loss {format_losses(losses)}; induction drop {drop:.2f}"
        )
        for name, rows in by_corpus.items():
            progress.note(f"step {step}: held-out loss of {name} {format_losses(rows)}")


def save_checkpoint(start: Start, step: int, metrics: Metrics, writer: CheckpointWriter) -> None:
    """Copy weights and moments into main memory, and have a thread write them."""
    engine = start.engine
    processes = engine.processes
    count = processes.world_size
    start.watchdog.expect(f"saving step {step}", "work_timeout_s")
    begun = time.monotonic()
    writer.wait()  # there is memory for one copy
    with processes.agree():
        metrics.flush()  # also rejects to save after a loss that is not a number
    tokens = step * start.tokens_per_step
    state = TrainerState(step, tokens, start.shards.fingerprint, metrics.last_crc32)
    if start.jumps:
        state.recent = start.jumps.recent
        state.num_skipped = start.jumps.num_skipped
    state.skipped_batches = list(start.batches.skipped)
    weights = engine.copy_weights()
    write_moments = engine.copy_moments()
    with processes.agree():  # the effect of this update is not in any loss yet
        total = sum(float(tensor.sum(dtype=torch.float64)) for tensor in weights.values())
        check_finite(step, {"sum of the weights": total})

    def write_part(folder: Path) -> list[Path]:
        path = save_weights(weights, folder / part_name(processes.rank, count))
        return [path, write_moments(folder / ENGINE_FOLDER)]

    def write_once(folder: Path) -> None:
        (folder / "config.yaml").write_text(start.text, encoding="utf-8")
        start.shards.tokenizer.save(str(folder / "tokenizer.json"))
        if count > 1:
            write_index(folder, engine.part_of)

    writer.save(state, write_once, write_part, begun)


class SaveSteps:
    """Decides at which steps to save. With `interval_steps=auto` the first process chooses the next
    one after each save."""

    FIRST = 10
    """Steps before the first save, which measures how long steps and saves take."""

    PAUSE_S = 600.0
    """Work that a crash may lose."""

    SHARE = 0.02
    """Share of the time that training may stand still for saves."""

    def __init__(self, settings: CheckpointConfig, step: int, num_steps: int) -> None:
        self.settings = settings
        self.num_steps = num_steps
        self.first_step = step + 1
        self.next = step + self.FIRST
        self.counted_from = step, time.perf_counter()
        self.reported_steps = 0

    def due(self, step: int) -> bool:
        """Return whether to save after this step. Called after each step, as it times them."""
        if step == self.first_step:  # which compiles, and tells nothing of the others
            self.counted_from = step, time.perf_counter()
        if self.settings.stays(step):
            return True
        if self.settings.interval_steps == 0:
            return step >= self.next or step == self.num_steps
        return due(step, self.settings.interval_steps, self.num_steps)

    def after_save(self, step: int, stood_still_s: float, processes: Processes) -> str:
        """Decide when to save next. Return a line that says so, if it is news."""
        if self.settings.interval_steps != 0:  # not `auto`
            return ""
        first, began = self.counted_from
        if step == first:  # no step was measured
            self.next = step + self.FIRST
            return ""
        seconds = (time.perf_counter() - began) / (step - first)
        pause_s = max(self.PAUSE_S, stood_still_s / self.SHARE)
        # By the first process, as clocks of the others differ, and all must save together.
        num_steps = processes.gather(max(1, round(pause_s / seconds)))[0]
        self.next = step + num_steps
        self.counted_from = step, time.perf_counter()
        is_news = not self.reported_steps / 2 < num_steps < 2 * self.reported_steps
        if not is_news or self.next >= self.num_steps:
            return ""
        self.reported_steps = num_steps
        minutes = num_steps * seconds / 60
        return (
            f"the next checkpoint is in {num_steps:,} steps, about {minutes:,.0f} min of training "
            "(interval_steps=auto)"
        )


def finish(start: Start, metrics: Metrics, processes: Processes) -> None:
    """Export the model if the config says so, and report the last held-out losses."""
    run_folder = Path(start.config.run_folder)
    with processes.agree():
        if processes.is_first and start.config.checkpoint.export_at_end:
            out = run_folder / "huggingface"
            if not out.exists():  # a finished run may be started again
                export(run_folder, out)
    if processes.is_first:
        losses = metrics.last_heldout()
        shown = format_losses(losses) if losses else "lost, with its line of metrics.jsonl"
        start.report(f"held-out loss by position: {shown}")


class Profile:
    """Writes a Chrome trace of some steps, of the first process, into the run folder."""

    def __init__(self, steps: str | None, start: Start) -> None:
        self.first = 0
        self.last = 0
        match = re.fullmatch(r"(\d+):(\d+)", steps or "")
        if match:
            self.first = int(match[1])
            self.last = int(match[2])
        num_steps = start.config.training.num_steps
        if steps is not None and not start.step < self.first <= self.last <= num_steps:
            raise ConfigError(
                f"--profile={steps} must be FIRST:LAST, two steps from {start.step + 1} to "
                f"{num_steps}, such as 10:15"
            )
        self.path = Path(start.config.run_folder) / f"trace_{self.first}_{self.last}.json"
        self.is_here = steps is not None and start.engine.processes.is_first
        self.profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        if self.is_here and step == self.first:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if step > self.last:
            self.stop()

    def stop(self) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.path))
            self.profiler = None


class Clock:
    """Measures the speed of training, without evaluations and saves."""

    def __init__(self, step: int) -> None:
        self.began = time.perf_counter()
        self.first_step = step

    def steps_per_s(self, step: int) -> float:
        """Return the steps per second since the last call."""
        now = time.perf_counter()
        speed = (step - self.first_step) / (now - self.began)
        self.began = now
        self.first_step = step
        return speed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time inside this block."""
        pause_began = time.perf_counter()
        yield
        self.began += time.perf_counter() - pause_began


def draw(
    batches: TrainingBatches, start: int, num_steps: int, device: torch.device
) -> Generator[Batch, None, None]:
    """Yield the batches of the steps after `start`, for a thread to iterate."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else the thread would use memory of the first GPU
    for step in range(start, num_steps):
        yield batches[step].pinned() if device.type == "cuda" else batches[step]


def due(step: int, interval_steps: int | None, num_steps: int) -> bool:
    """Return whether something is done after this step: at an interval, and after the last one."""
    return step == num_steps or (interval_steps is not None and step % interval_steps == 0)


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed the random numbers of a step. Dropout then depends only on (seed, step, process), so a
    resumed run repeats it."""
    (mixed,) = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    # torch.manual_seed formats the stack at each call, for each kind of device that is not there.
    torch.default_generator.manual_seed(int(mixed))
    if device.type == "cuda":
        torch.cuda.manual_seed(int(mixed))


class StopRequest:
    """Whether a signal has asked this process to stop."""

    requested = ""
    """The name of the signal."""


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Let SIGTERM, SIGINT and SIGUSR2 ask the run to save and stop after the current step. A second
    SIGINT interrupts at once, except while a checkpoint is being written."""
    stop = StopRequest()

    def request(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.requested:
            raise KeyboardInterrupt
        stop.requested = signal.Signals(number).name

    with handling(STOP_SIGNALS, request):
        yield stop
