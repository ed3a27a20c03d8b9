"""Say what a run costs, in the lines of `train --dry-run`.

estimate(config, Hardware.of("h100", 16, nodes=2))
# {"parameters": "1,176,764,416", "tokens per step": "524,288 (512 × 1024)", …,
#  "time": "4.1 hours, 65 GPU-hours", "memory of a process, ddp": "47.4 GiB (fits; …", …}
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.rules import check_config
from olmo_sparsity.config.schema import schema_fields
from olmo_sparsity.config.sections import EngineConfig, RunConfig
from olmo_sparsity.models.huggingface.folder import count_parameters
from olmo_sparsity.training.estimate.cheaper import MIN_SAVING, find_cheaper
from olmo_sparsity.training.estimate.compute import flops_per_token, share_of_peak
from olmo_sparsity.training.estimate.cost import (
    ENGINES,
    RunCost,
    RunTime,
    cost_of_run,
    with_engine,
    with_micro_batches,
)
from olmo_sparsity.training.estimate.failures import failures_of
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.host import (
    Disk,
    disk_of,
    main_memory_at_start,
    main_memory_of,
    predict_save,
    save_copy_bytes,
    task_copy_bytes,
)
from olmo_sparsity.training.estimate.meta_model import without_memory
from olmo_sparsity.training.estimate.network import describe_speed
from olmo_sparsity.training.processes.watchdog import TIMES_LONGEST_STEP

MANY_GPU_HOURS = 1000
"""GPU-hours above which a run should have a limit: one that is requeued or slow may take more."""

MUCH_SENDING = 0.5
"""Share of the time for collectives above which GPUs mostly wait for each other."""

GRACE_S = 30
"""Seconds that clusters give a preempted job before they kill it."""

SIGNAL_LEAD_S = 120
"""Seconds before its time limit at which slurm/train.sbatch has a job signalled to save."""


def estimate(
    config: RunConfig, hardware: Hardware, configured_micro_batch_size: int | None = None
) -> dict[str, str]:
    """Return the lines of `--dry-run`, by their titles.

    Args:
        configured_micro_batch_size: What the user has set, where `config` has the number that was
            chosen for its engine. Each engine is then estimated with the number that fits it. None:
            the number in `config` is the user's.
    """
    size = size_of_run(config)
    lines = {
        "parameters": f"{size.num_parameters:,}",
        "tokens per step": (
            f"{size.tokens_per_step:,} ({config.training.batch_size} × {config.training.length})"
        ),
        "tokens in all": f"{size.num_tokens:,} in {size.num_steps:,} steps",
        "FLOPs in all": f"{size.flops:.3g}",
        "batch": describe_batch(config, hardware),
    }
    if configured_micro_batch_size is not None:
        config = with_micro_batches(config, configured_micro_batch_size)

    cost = cost_of_run(config, hardware)
    if cost.time is not None:
        lines |= _lines_of_time(config, hardware, cost.time)
        if cost.fits:
            lines |= _line_of_cheaper(config, hardware, cost.time)

    # One process has no choice of engines. For several, a line for each shows which ones fit.
    costs = [cost]
    if hardware.num_processes > 1:
        costs = [cost_of_run(with_engine(config, engine), hardware) for engine in ENGINES]
        lines |= _line_of_faster_engine(config, cost, costs)
    for cost_of_engine in costs:
        title = f"memory of a process, {cost_of_engine.engine}"
        lines[title] = _describe_memory(cost_of_engine)
    return lines | _lines_of_host(config, hardware)


@dataclass(frozen=True)
class RunSize:
    """How much a run computes, on whatever hardware."""

    num_parameters: int
    tokens_per_step: int
    num_steps: int
    flops: float
    """FLOPs of the whole run, forward and backward. Layers that are computed again in the backward
    pass count once."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the whole run."""
        return self.tokens_per_step * self.num_steps


def size_of_run(config: RunConfig) -> RunSize:
    """Return how much a run computes. The vocabulary of the config must be known."""
    training = config.training
    model = without_memory(config.model)
    tokens_per_step = training.batch_size * training.length
    flops_per_step = flops_per_token(model, config.model, training.length) * tokens_per_step
    return RunSize(
        num_parameters=count_parameters(model),
        tokens_per_step=tokens_per_step,
        num_steps=training.num_steps,
        flops=flops_per_step * training.num_steps,
    )


def describe_batch(config: RunConfig, hardware: Hardware) -> str:
    """Return how the batch is divided among processes, or which batches they would divide."""
    batch_size = config.training.batch_size
    num_processes = hardware.num_processes
    num_sequences, remainder = divmod(batch_size, num_processes)
    if remainder == 0:
        return f"{batch_size} = {num_processes} processes × {num_sequences}"
    smaller = batch_size - remainder
    larger = smaller + num_processes
    return f"{num_processes} processes do not divide it; {smaller} and {larger} do"


def _lines_of_time(config: RunConfig, hardware: Hardware, time: RunTime) -> dict[str, str]:
    """Return lines about the time and the price of a run on known GPUs."""
    training = config.training
    pauses = time.pauses
    tokens_per_s = training.batch_size * training.length / time.step_s
    lines = {
        "time": str(time),
        "of this time": (
            f"{pauses.evaluating_s / 3600:,.2f} hours for {pauses.num_evaluations:,} evaluations, "
            f"{pauses.saving_s / 3600:,.2f} for {pauses.num_saves:,} saves"
        ),
        "with failures": _describe_failures(config, hardware, time),
        "tokens per second": f"{tokens_per_s:,.0f} ({_explain_speed(config, hardware, time)})",
    }
    sending_share = time.sending_s / time.step_s
    if sending_share > MUCH_SENDING:
        lines["collectives"] = (
            f"{sending_share:.0%} of a step goes into collectives, if none overlaps; fewer GPUs "
            "or a larger training.batch_size take fewer GPU-hours for as many tokens"
        )
    if time.step_s > config.engine.step_timeout_s:
        lines["a step"] = _describe_long_step(time.step_s, config.engine)
    if training.max_gpu_hours is None and time.gpu_hours > MANY_GPU_HOURS:
        # A fifth more than is estimated, rounded to two digits: 1.2 · 4,321 is 5,200.
        limit = float(f"{1.2 * time.gpu_hours:.2g}")
        lines["limit"] = (
            f"none, restarts and a slow network count, too: --training.max_gpu_hours={limit:.0f} "
            "saves and ends the run there"
        )
    if hardware.price is not None:
        # In the currency of the option, which the user knows.
        price = time.gpu_hours * hardware.price
        lines["price"] = f"{price:,.2f}, at {hardware.price:g} a GPU-hour"
    return lines


def _describe_failures(config: RunConfig, hardware: Hardware, time: RunTime) -> str:
    """Return a line about the hours that failures add."""
    failures = failures_of(config, hardware, time)
    return (
        f"{failures.hours:,.1f} hours, {failures.gpu_hours:,.0f} GPU-hours: {failures.num:.2g} "
        f"failures, at one in {hardware.gpu_hours_per_failure:,.0f} GPU-hours "
        f"(--gpu-hours-per-failure); each loses {failures.lost_s / 60:,.1f} min of work, half of "
        f"the time between saves, and takes {failures.start_s / 60:,.1f} min to start (assumed)"
    )


def _explain_speed(config: RunConfig, hardware: Hardware, time: RunTime) -> str:
    """Return in words what the speed of a run is computed from."""
    gpu = hardware.gpu
    assert gpu is not None
    num_parameters = count_parameters(without_memory(config.model))
    expected = share_of_peak(num_parameters, config.training.compile)
    line = f"predicted: {expected.share:.0%} of {gpu.tflops:.0f} TFLOP/s, {expected.origin}"
    if hardware.num_processes > 1:
        waits = f"{time.sending_s / time.step_s:.0%} of the time for collectives"
        line += f"; {waits} at {describe_speed(config, hardware)}, if none overlaps"
    return line


def _describe_long_step(step_s: float, limits: EngineConfig) -> str:
    """Return a line about a step that takes longer than its time-out."""
    line = (
        f"{step_s:.0f} s, more than engine.step_timeout_s={limits.step_timeout_s}: after the first "
        f"step the limit is {TIMES_LONGEST_STEP} times the longest one, at most "
        f"engine.work_timeout_s={limits.work_timeout_s}"
    )
    if 2 * step_s <= limits.work_timeout_s:
        return line
    # Three times a step, in whole ten minutes: the start also builds the model, and may compile.
    enough_s = 600 * math.ceil(3 * step_s / 600)
    return f"{line}, which the start with the first step needs: --engine.work_timeout_s={enough_s}"


def _line_of_cheaper(config: RunConfig, hardware: Hardware, time: RunTime) -> dict[str, str]:
    """Return a line with other settings that would save time; none if there are none."""
    cheaper = find_cheaper(config, hardware, time)
    if cheaper is None:
        return {}
    saved_share = 1 - cheaper.time.hours / time.hours
    return {
        "cheaper": (
            f"{' '.join(cheaper.options)} takes {cheaper.time.hours:,.1f} hours, "
            f"{saved_share:.0%} less (predicted; micro-batches of {cheaper.micro_batch_size})"
        )
    }


def _line_of_faster_engine(
    config: RunConfig, cost: RunCost, costs: list[RunCost]
) -> dict[str, str]:
    """Return a line with the engine that would save the most time; none if it saves too little.

    Args:
        cost: The cost with the engine of the run.
        costs: The cost with each of `ENGINES`, and otherwise the same settings.
    """
    if cost.time is None or not cost.fits:
        return {}
    fastest: RunCost | None = None
    limit = (1 - MIN_SAVING) * cost.time.hours
    for engine, other in zip(ENGINES, costs, strict=True):
        assert other.time is not None  # the same GPUs as those of `cost`
        # The hours of an engine that cannot run a compiled model are assumed.
        is_comparable = other.fits and other.is_compiled == cost.is_compiled
        is_faster = other.time.hours < limit
        if is_comparable and is_faster and _is_accepted(with_engine(config, engine)):
            fastest = other
            limit = other.time.hours
    if fastest is None:
        return {}
    choice = f"--engine.name={fastest.engine}"
    for name in ("shard_over", "reduce_every_micro_batch"):  # they are of fsdp alone
        if getattr(config.engine, name) != schema_fields(EngineConfig)[name].default:
            choice += f" without engine.{name}"
    return {
        "faster engine": (
            f"{choice} takes {limit:,.1f} hours, {1 - limit / cost.time.hours:.0%} less "
            f"(predicted; micro-batches of {fastest.micro_batch_size}); it was never tried on "
            "several GPUs: run slurm/accept.sbatch before"
        )
    }


def _is_accepted(config: RunConfig) -> bool:
    """Return whether the settings of a run can be combined with its engine."""
    try:
        check_config(config, "")
    except ConfigError:
        return False
    return True


def _describe_memory(cost: RunCost) -> str:
    """Return a line about the memory of a process with one engine, and the hours with it."""
    memory = cost.memory
    fits = "fits" if cost.fits else "DOES NOT FIT"
    line = (
        f"{_gib(memory.total_bytes)} GiB ({fits}; state {_gib(memory.state_bytes)}, "
        f"activations {_gib(memory.activation_bytes)}, start {_gib(memory.start_bytes)}, "
        f"evaluation {_gib(memory.evaluation_bytes)}), micro-batches of {cost.micro_batch_size}"
    )
    if cost.time is None:
        return line
    line += f", {cost.time.hours:,.1f} hours"
    return line if cost.is_compiled else f"{line} (not compiled, which is assumed to be slower)"


def _gib(num_bytes: float) -> str:
    """Return a number of bytes in GiB, with one digit after the point."""
    return f"{num_bytes / 2**30:.1f}"


def _lines_of_host(config: RunConfig, hardware: Hardware) -> dict[str, str]:
    """Return lines about main memory, disks, and the duration of a save."""
    # These are not added up: a process needs the largest of them (`main_memory_of`).
    uses = [
        f"the start takes {_gib(main_memory_at_start(config))}",
        f"a copy for a save {_gib(save_copy_bytes(config, hardware))}",
    ]
    bytes_for_tasks = task_copy_bytes(config, hardware)
    if bytes_for_tasks:
        uses.append(f"one for lm_eval {_gib(bytes_for_tasks)}")
    bytes_of_process = main_memory_of(config, hardware)
    bytes_of_node = bytes_of_process * hardware.num_processes / hardware.num_nodes

    disk = disk_of(config)
    lines = {
        "main memory": (
            f"{_gib(bytes_of_process)} GiB a process ({', '.join(uses)}); "
            f"{bytes_of_node / 2**30:.0f} GiB a node"
        ),
        "disk": (
            f"text {disk.text_bytes / 1e9:.1f} GB if read once; a checkpoint "
            f"{disk.checkpoint_bytes / 1e9:.1f} GB, the run folder "
            f"{disk.run_folder_bytes / 1e9:.1f} GB ({_describe_kept(config)})"
        ),
    }
    if disk.num_set_aside or config.start_over:
        lines["set aside"] = _describe_set_aside(config, disk)
    return lines | {"a save": _describe_save(config, hardware)}


def _describe_set_aside(config: RunConfig, disk: Disk) -> str:
    """Return a line about checkpoints that are not counted in those of the run folder."""
    parts = []
    if disk.num_set_aside:
        gigabytes = disk.num_set_aside * disk.checkpoint_bytes / 1e9
        parts.append(
            f"up to about {disk.num_set_aside} more checkpoints, {gigabytes:.1f} GB, if numbers "
            "that are not finite come back (training.on_nan=skip); deleted when the disk is full"
        )
    if config.start_over:
        parts.append(
            f"up to {disk.run_folder_bytes / 1e9:.1f} GB more in set_aside_1 if all checkpoints "
            "are damaged (start_over=true); never deleted"
        )
    return "; ".join(parts)


def _describe_kept(config: RunConfig) -> str:
    """Return which checkpoints stay, and how to keep fewer."""
    checkpoint = config.checkpoint
    last = f"the last {checkpoint.keep} checkpoints"
    if not checkpoint.keep_every_steps:
        return f"{last}, and those of keep_steps, if any"
    return (
        f"{last}, and one each {checkpoint.keep_every_steps:,} steps to branch from; "
        "--checkpoint.keep_every_steps=null keeps none of these"
    )


def _describe_save(config: RunConfig, hardware: Hardware) -> str:
    """Return a line about the time of a save, beside the times that a cluster gives a job."""
    save = predict_save(config, hardware)
    within_grace = "within" if save.total_s <= GRACE_S else "more than"
    line = (
        f"{save.total_s:.0f} s at {hardware.disk_bytes_per_s / 1e9:g} GB/s of the file system "
        f"(--disk-speed), {within_grace} the {GRACE_S} s that clusters give a preempted job; up to "
        f"{save.longest_s:.0f} s if another save is under way, "
    )
    if save.longest_s <= SIGNAL_LEAD_S:
        line += f"within the {SIGNAL_LEAD_S} s of slurm/train.sbatch before a time limit"
    else:
        # Rounded up to whole minutes, as the estimate is not exact to the second.
        lead_s = 60 * math.ceil(save.longest_s / 60)
        line += (
            f"more than the {SIGNAL_LEAD_S} s of slurm/train.sbatch before a time limit: pass "
            f"sbatch --signal=USR2@{lead_s}"
        )
    return f"{line}; training stands still for {save.pause_s:.1f} s"
