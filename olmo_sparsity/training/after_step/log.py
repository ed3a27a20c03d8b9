"""Compute the numbers of a step for the log: speed, waits, memory, and how often text was read.

    {"step": 10, "loss": 4.21, …,                           each step
     "tokens_per_s": 354210, "epochs": 0.01,                each logging interval
     "data_wait_s": 0.02, "save_s": 1.6, "evaluation_s": 0.0, "peak_memory_gib": 10.9,
     "mfu": 0.345, "slowest_process": 3, "slowest_to_median": 1.04}

steps.py adds `count_left_out` to the row of each step, and calls `log_step` at each logging
interval.
"""

from __future__ import annotations

import statistics

from olmo_sparsity.base.devices import peak_memory_gib
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.training.after_step.clock import Clock
from olmo_sparsity.training.checkpoints.writer import CheckpointWriter
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.metrics.metrics import Metrics
from olmo_sparsity.training.prepared_run import PreparedRun, StepWork


def count_left_out(run: PreparedRun, writer: CheckpointWriter) -> dict[str, float]:
    """Return the numbers of skipped updates, skipped batches and failed saves, for the row of a
    step. What has never happened is left out. (With `optimizer.skip_sigmas` the number of skipped
    updates is always there, as a curve from 0.)"""
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
