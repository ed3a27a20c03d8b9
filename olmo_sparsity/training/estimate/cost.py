"""Compute what a run costs with its engine: memory of a device, seconds of a step, GPU-hours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.training.estimate.compute import computing_seconds
from olmo_sparsity.training.estimate.device_memory import (
    bytes_at_start,
    bytes_in_evaluation,
    bytes_of_state,
    fitting_micro_batch_size,
    peak_bytes,
)
from olmo_sparsity.training.estimate.hardware import CUDA_CONTEXT_BYTES, Hardware
from olmo_sparsity.training.estimate.memory_formulas import activation_bytes
from olmo_sparsity.training.estimate.network import sending_seconds
from olmo_sparsity.training.estimate.pauses import Pauses, pauses_of

EngineName = Literal["ddp", "fsdp", "zero1", "zero2", "zero3"]

ENGINES: tuple[EngineName, ...] = ("ddp", "fsdp", "zero1", "zero2", "zero3")
"""The engines for several processes."""


@dataclass(frozen=True)
class Cost:
    """The cost of a run with one engine. Memory is in bytes on each device."""

    engine: str
    is_compiled: bool
    micro_batch_size: int
    state: float
    """Bytes of weights, gradients and optimizer."""

    activations: float
    """Bytes at the peak of a step, beside the state."""

    start: float
    """Bytes at the peak of the start, before the first step."""

    evaluation: float
    """Bytes at the peak of an evaluation."""

    context: float
    """Bytes that CUDA takes for itself."""

    fits: bool
    computing_s: float
    """Seconds of a step in which the GPUs compute; 0 if the GPU is not known."""

    sending_s: float
    """Seconds of a step in which the GPUs send, if they do not compute meanwhile."""

    pauses: Pauses
    """Evaluations and saves of the run; none if the GPU is not known."""

    hours: float
    """Hours of all steps, evaluations and saves; 0 if the GPU is not known."""

    gpu_hours: float

    @property
    def peak(self) -> float:
        """Return the bytes on each device at the peak of the run."""
        return max(self.state + self.activations, self.start, self.evaluation) + self.context

    @property
    def step_s(self) -> float:
        """Return the seconds of a step, if nothing is sent while the GPUs compute."""
        return self.computing_s + self.sending_s


def cost_with(config: RunConfig, hardware: Hardware) -> Cost:
    """Return the cost of a run with its engine. `training.micro_batch_size` may still be auto."""
    micro_batch_size = fitting_micro_batch_size(config, hardware)
    config = with_micro_batches(config, micro_batch_size)
    computing_s = 0.0
    sending_s = 0.0
    pauses = Pauses()
    if hardware.gpu and hardware.gpu.tflops:
        computing_s = computing_seconds(config, hardware)
        sending_s = sending_seconds(config, hardware)
        pauses = pauses_of(config, hardware, computing_s + sending_s)
    steps_s = config.training.num_steps * (computing_s + sending_s)
    hours = (steps_s + pauses.total_s) / 3600
    return Cost(
        engine=config.engine.name,
        is_compiled=config.training.compile,
        micro_batch_size=micro_batch_size,
        state=bytes_of_state(config, hardware, micro_batch_size),
        activations=activation_bytes(
            config.model, config.training, micro_batch_size, hardware.device_type
        ),
        start=bytes_at_start(config, hardware),
        evaluation=bytes_in_evaluation(config, hardware),
        context=CUDA_CONTEXT_BYTES if hardware.gpu else 0,
        fits=peak_bytes(config, hardware, micro_batch_size) <= hardware.usable_bytes,
        computing_s=computing_s,
        sending_s=sending_s,
        pauses=pauses,
        hours=hours,
        gpu_hours=hours * hardware.num_processes,
    )


def gpu_hours(config: RunConfig, hardware: Hardware) -> float:
    """Return the GPU-hours of a run on a known GPU."""
    return cost_with(config, hardware).gpu_hours


def with_engine(config: RunConfig, engine: EngineName) -> RunConfig:
    """Return a copy of a config with another engine. `zero3` does not run a compiled model, so that
    its copy is not compiled."""
    training = config.training
    if engine == "zero3":
        training = replace(training, compile=False, activation_memory_budget=None)
    return replace(config, engine=replace(config.engine, name=engine), training=training)


def with_micro_batches(config: RunConfig, micro_batch_size: int | None) -> RunConfig:
    """Return a copy of a config with another size of micro-batches."""
    return replace(config, training=replace(config.training, micro_batch_size=micro_batch_size))
