"""Say what a run costs, in the lines of `train --dry-run`."""

from __future__ import annotations

import math

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.models.transformers_folder import count_parameters
from olmo_sparsity.training.estimate.cheaper import find_cheaper
from olmo_sparsity.training.estimate.compute import flops_per_token, share_of_peak
from olmo_sparsity.training.estimate.cost import (
    ENGINES,
    Cost,
    cost_with,
    with_engine,
    with_micro_batches,
)
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.host import (
    copied_for_save,
    copied_for_tasks,
    disk_of,
    main_memory_at_start,
    main_memory_of,
    save_time,
)
from olmo_sparsity.training.estimate.memory_formulas import without_memory
from olmo_sparsity.training.estimate.network import describe_speed

GRACE_S = 30
"""Seconds that clusters give a preempted job before they kill it."""

SIGNAL_LEAD_S = 120
"""Seconds before its time limit at which slurm/train.sbatch has a job signalled to save."""


def estimate(
    config: RunConfig, hardware: Hardware, micro_batch_size: int | None = None
) -> dict[str, str]:
    """Return the lines of `--dry-run`, by their titles. `micro_batch_size`: the configured number,
    where `config` has the number that was chosen for its engine. Each engine is then estimated with
    the number that fits it."""
    lines = _lines_of_size(config) | _line_of_batch(config, hardware)
    if micro_batch_size is not None:
        config = with_micro_batches(config, micro_batch_size)
    cost = cost_with(config, hardware)
    if cost.hours:
        lines |= _lines_of_time(config, hardware, cost)
    if cost.fits:
        lines |= _line_of_cheaper(config, hardware, cost)
    costs = [cost]
    if hardware.num_processes > 1:
        costs = [cost_with(with_engine(config, engine), hardware) for engine in ENGINES]
    for cost_of_engine in costs:
        title = f"memory of a process, {cost_of_engine.engine}"
        lines[title] = _describe_memory(cost_of_engine)
    return lines | _lines_of_host(config, hardware)


def _lines_of_size(config: RunConfig) -> dict[str, str]:
    """Return lines about the model, and about the tokens and FLOPs of the run."""
    training = config.training
    model = without_memory(config.model)
    tokens_per_step = training.batch_size * training.length
    flops_per_step = flops_per_token(model, config.model, training.length) * tokens_per_step
    tokens = tokens_per_step * training.num_steps
    return {
        "parameters": f"{count_parameters(model):,}",
        "tokens per step": f"{tokens_per_step:,} ({training.batch_size} × {training.length})",
        "tokens in all": f"{tokens:,} in {training.num_steps:,} steps",
        "FLOPs in all": f"{flops_per_step * training.num_steps:.3g}",
    }


def _line_of_batch(config: RunConfig, hardware: Hardware) -> dict[str, str]:
    """Return a line about how the batch is divided among processes."""
    batch_size = config.training.batch_size
    count = hardware.num_processes
    share, rest = divmod(batch_size, count)
    if rest == 0:
        return {"batch": f"{batch_size} = {count} processes × {share}"}
    divisible = batch_size - rest
    return {"batch": f"{count} processes do not divide it; {divisible} and {divisible + count} do"}


def _lines_of_time(config: RunConfig, hardware: Hardware, cost: Cost) -> dict[str, str]:
    """Return lines about the time and the price of a run on known GPUs."""
    training = config.training
    gpu = hardware.gpu
    assert gpu is not None
    expected = share_of_peak(count_parameters(without_memory(config.model)), training.compile)
    reason = f"predicted: {expected.share:.0%} of {gpu.tflops:.0f} TFLOP/s, {expected.origin}"
    if hardware.num_processes > 1:
        waits = f"{cost.sending_s / cost.step_s:.0%} of the time for collectives"
        reason += f"; {waits} at {describe_speed(config, hardware)}, if none overlaps"
    tokens_per_s = training.batch_size * training.length / cost.step_s
    pauses = cost.pauses
    lines = {
        "time": f"{cost.hours:,.1f} hours, {cost.gpu_hours:,.0f} GPU-hours",
        "of this time": (
            f"{pauses.evaluating_s / 3600:,.2f} hours for {pauses.num_evaluations:,} evaluations, "
            f"{pauses.saving_s / 3600:,.2f} for {pauses.num_saves:,} saves"
        ),
        "tokens per second": f"{tokens_per_s:,.0f} ({reason})",
    }
    if hardware.price is not None:
        price = cost.gpu_hours * hardware.price
        lines["price"] = f"{price:,.2f}, at {hardware.price:g} a GPU-hour"
    return lines


def _line_of_cheaper(config: RunConfig, hardware: Hardware, cost: Cost) -> dict[str, str]:
    """Return a line with other settings that would save time; none if there are none."""
    cheaper = find_cheaper(config, hardware, cost)
    if cheaper is None:
        return {}
    saved = 1 - cheaper.cost.hours / cost.hours
    return {
        "cheaper": (
            f"{' '.join(cheaper.options)} takes {cheaper.cost.hours:,.1f} hours, {saved:.0%} less "
            f"(predicted; micro-batches of {cheaper.cost.micro_batch_size})"
        )
    }


def _describe_memory(cost: Cost) -> str:
    """Return a line about the memory of a process with one engine."""
    parts = [
        f"state {cost.state / 2**30:.1f}",
        f"activations {cost.activations / 2**30:.1f}",
        f"start {cost.start / 2**30:.1f}",
        f"evaluation {cost.evaluation / 2**30:.1f}",
    ]
    fits = "fits" if cost.fits else "DOES NOT FIT"
    line = f"{cost.peak / 2**30:.1f} GiB ({fits}; {', '.join(parts)}), micro-batches of "
    line += str(cost.micro_batch_size)
    if not cost.hours:
        return line
    line += f", {cost.hours:,.1f} hours"
    return line if cost.is_compiled else f"{line} (not compiled, which is assumed to be slower)"


def _lines_of_host(config: RunConfig, hardware: Hardware) -> dict[str, str]:
    """Return lines about main memory, disks, and the duration of a save."""
    of_process = main_memory_of(config, hardware)
    of_node = of_process * hardware.num_processes / hardware.num_nodes
    for_tasks = copied_for_tasks(config, hardware)
    parts = (
        f"the start takes {main_memory_at_start(config) / 2**30:.1f}, a copy for a save "
        f"{copied_for_save(config, hardware) / 2**30:.1f}"
    )
    if for_tasks:
        parts += f", one for lm_eval {for_tasks / 2**30:.1f}"

    disk = disk_of(config)
    return {
        "main memory": (
            f"{of_process / 2**30:.1f} GiB a process ({parts}); {of_node / 2**30:.0f} GiB a node"
        ),
        "disk": (
            f"text {disk.text / 1e9:.1f} GB if read once; a checkpoint {disk.checkpoint / 1e9:.1f} "
            f"GB, the run folder {disk.run_folder / 1e9:.1f} GB"
        ),
        "a save": _describe_save(config, hardware),
    }


def _describe_save(config: RunConfig, hardware: Hardware) -> str:
    """Return a line about the time of a save, beside the times that a cluster gives a job."""
    save = save_time(config, hardware)
    within_grace = "within" if save.total_s <= GRACE_S else "more than"
    line = (
        f"{save.total_s:.0f} s at {hardware.disk_bytes_per_s / 1e9:g} GB/s of the file system "
        f"(--disk-speed), {within_grace} the {GRACE_S} s that clusters give a preempted job; up to "
        f"{save.longest_s:.0f} s if another save is under way, "
    )
    if save.longest_s <= SIGNAL_LEAD_S:
        line += f"within the {SIGNAL_LEAD_S} s of slurm/train.sbatch before a time limit"
    else:
        lead_s = 60 * math.ceil(save.longest_s / 60)
        line += (
            f"more than the {SIGNAL_LEAD_S} s of slurm/train.sbatch before a time limit: pass "
            f"sbatch --signal=USR2@{lead_s}"
        )
    return f"{line}; training stands still for {save.pause_s:.1f} s"
