"""Reject a run that does not fit into the memory of its devices, and name what would fit.

    check_fits(config, Hardware.of("l4", 8, nodes=1))
    # ConfigError: engine.name=ddp needs 21.7 GiB a device, of 18.5; use --engine.name=fsdp or …

Called by `train --dry-run` and by `experiment --dry-run`. A run itself is not rejected: it may fit
all the same, and else PyTorch reports it.
"""

from __future__ import annotations

from dataclasses import replace

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.training.estimate.cost import ENGINES, with_engine
from olmo_sparsity.training.estimate.device_memory import device_memory_of
from olmo_sparsity.training.estimate.hardware import Hardware

MAX_GPUS = 4096
"""Largest number of GPUs that a message proposes."""


def check_fits(config: RunConfig, hardware: Hardware) -> None:
    """Raise ConfigError for a run that does not fit with a single sequence at a time."""
    if _fits_one_sequence(config, hardware):
        return
    needed_bytes = _bytes_of_one_sequence(config, hardware)
    of_room = f"{needed_bytes / 2**30:.1f} GiB a device, of {hardware.usable_bytes / 2**30:.1f}"
    batch_size = _find_batch_of_evaluation(config, hardware)
    if batch_size is not None:
        raise ConfigError(
            f"an evaluation needs {of_room}; use --evaluation.batch_size={batch_size}"
        )
    raise ConfigError(
        f"engine.name={config.engine.name} needs {of_room}; {_remedy(config, hardware)}"
    )


def _fits_one_sequence(config: RunConfig, hardware: Hardware) -> bool:
    """Return whether a run fits with a single sequence at a time."""
    return _bytes_of_one_sequence(config, hardware) <= hardware.usable_bytes


def _bytes_of_one_sequence(config: RunConfig, hardware: Hardware) -> float:
    """Return the peak of a run on each device, with a single sequence at a time."""
    return device_memory_of(config, hardware, micro_batch_size=1).peak_bytes


def _find_batch_of_evaluation(config: RunConfig, hardware: Hardware) -> int | None:
    """Return the largest `evaluation.batch_size`, after one or several halvings, with which a run
    fits. Return None if it fits with none, so that evaluations are not what is too large."""
    batch_size = config.evaluation.batch_size
    while batch_size > 1:
        batch_size //= 2
        smaller = replace(config, evaluation=replace(config.evaluation, batch_size=batch_size))
        if _fits_one_sequence(smaller, hardware):
            return batch_size
    return None


def _remedy(config: RunConfig, hardware: Hardware) -> str:
    """Return the end of a message: the engines that fit, or the number of GPUs on which one
    does."""
    fitting = _options_of_fitting_engines(config, hardware)
    if fitting:
        return f"use {' or '.join(fitting)}"

    # Twice as many GPUs, and twice again: batch sizes are mostly powers of two, which they divide.
    count = hardware.num_processes
    most = min(MAX_GPUS, config.training.batch_size)  # each GPU takes a sequence at least
    while 2 * count <= most:
        count *= 2
        more_hardware = replace(hardware, num_processes=count)
        fitting = _options_of_fitting_engines(config, more_hardware)
        if fitting:
            # The last engine shards most, so it leaves the most room.
            num_given = hardware.num_processes
            return f"no engine fits {num_given} of these; use {fitting[-1]} on {count}"
    return f"no engine fits, on up to {count} of these; {_remedy_for_activations(config)}"


def _remedy_for_activations(config: RunConfig) -> str:
    """Return the end of a message where activations alone are too large for a device, whatever the
    engine shards: the next option that makes them smaller."""
    training = config.training
    budget = training.activation_memory_budget
    if budget is not None and budget > 0:
        return "lower training.activation_memory_budget"
    if budget is None and not training.activation_checkpointing:
        return "pass --training.activation_checkpointing=true"
    # Layers keep their inputs alone by now.
    return "shorten training.length"


def _options_of_fitting_engines(config: RunConfig, hardware: Hardware) -> list[str]:
    """Return the options of the engines with which a single sequence at a time fits."""
    if hardware.num_processes == 1:
        return []
    fitting = []
    for engine in ENGINES:
        options = f"--engine.name={engine}"
        changed = with_engine(config, engine)
        if changed.training.compile != config.training.compile:
            options += " --training.compile=false"
        if _fits_one_sequence(changed, hardware):
            fitting.append(options)
    return fitting
