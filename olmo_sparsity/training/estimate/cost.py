"""Compute what a run costs with its engine: memory of a device, seconds of a step, GPU-hours.

cost = cost_of_run(config, Hardware.of("h100", 16, nodes=2))
cost.memory.total_bytes    # on each device, at the peak
cost.time.gpu_hours        # `time` is None where the speed of the GPU is not known
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.training.estimate.compute import computing_seconds
from olmo_sparsity.training.estimate.device_memory import (
    DeviceMemory,
    device_memory_of,
    fitting_micro_batch_size,
)
from olmo_sparsity.training.estimate.hardware import Hardware
from olmo_sparsity.training.estimate.network import sending_seconds
from olmo_sparsity.training.estimate.pauses import Pauses, pauses_of

EngineName = Literal["ddp", "fsdp", "zero1", "zero2", "zero3"]

ENGINES: tuple[EngineName, ...] = ("ddp", "fsdp", "zero1", "zero2", "zero3")
"""The engines for several processes."""


@dataclass(frozen=True)
class RunTime:
    """The time of a run on GPUs whose speed is known."""

    computing_s: float
    """Seconds of a step in which the GPUs compute."""

    sending_s: float
    """Seconds of a step in which the GPUs send, if they do not compute meanwhile."""

    pauses: Pauses
    """Evaluations and saves of the run."""

    hours: float
    """Hours of all steps, evaluations and saves."""

    gpu_hours: float
    """These hours, times the number of GPUs."""

    @property
    def step_s(self) -> float:
        """Return the seconds of a step, if nothing is sent while the GPUs compute."""
        return self.computing_s + self.sending_s

    def __str__(self) -> str:
        return f"{self.hours:,.1f} hours, {self.gpu_hours:,.0f} GPU-hours"


@dataclass(frozen=True)
class RunCost:
    """The cost of a run with one engine."""

    engine: str
    is_compiled: bool
    micro_batch_size: int
    memory: DeviceMemory
    fits: bool
    """Whether the memory is at most what the hardware has."""

    time: RunTime | None
    """None if the speed of the GPU is not known, as for a CPU."""


def cost_of_run(config: RunConfig, hardware: Hardware) -> RunCost:
    """Return the cost of a run with its engine. `training.micro_batch_size` may still be auto."""
    # Time and memory depend on the micro-batches, so their size comes first.
    micro_batch_size = fitting_micro_batch_size(config, hardware)
    config = with_micro_batches(config, micro_batch_size)
    memory = device_memory_of(config, hardware, micro_batch_size)
    return RunCost(
        engine=config.engine.name,
        is_compiled=config.training.compile,
        micro_batch_size=micro_batch_size,
        memory=memory,
        fits=memory.peak_bytes <= hardware.usable_bytes,
        time=_time_of_run(config, hardware) if hardware.has_known_speed else None,
    )


def _time_of_run(config: RunConfig, hardware: Hardware) -> RunTime:
    """Return the time of a run. The size of its micro-batches must be known."""
    computing_s = computing_seconds(config, hardware)
    sending_s = sending_seconds(config, hardware)
    step_s = computing_s + sending_s
    pauses = pauses_of(config, hardware, step_s)
    hours = (config.training.num_steps * step_s + pauses.total_s) / 3600
    return RunTime(
        computing_s=computing_s,
        sending_s=sending_s,
        pauses=pauses,
        hours=hours,
        gpu_hours=hours * hardware.num_processes,
    )


def with_engine(config: RunConfig, engine: EngineName) -> RunConfig:
    """Return a copy of a config with another engine. `zero3` does not run a compiled model, so that
    its copy is not compiled."""
    training = config.training
    if engine == "zero3":
        # The budget is the compiler's.
        training = replace(training, compile=False, activation_memory_budget=None)
    return replace(config, engine=replace(config.engine, name=engine), training=training)


def with_micro_batches(config: RunConfig, micro_batch_size: int | None) -> RunConfig:
    """Return a copy of a config with another size of micro-batches."""
    return replace(config, training=replace(config.training, micro_batch_size=micro_batch_size))
