"""Choose the engine of a run, and check that it fits the number of processes.

Place in the flow: called by training/loop.py before the first step.
"""

from __future__ import annotations

import os
from typing import Any

from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.errors import ConfigError
from olmo_sparsity.training.deepspeed_engine import ZeroEngine, deepspeed_settings
from olmo_sparsity.training.distributed import Processes
from olmo_sparsity.training.engine import DDPEngine, Engine


def build_engine(model: Any, config: RunConfig, processes: Processes) -> Engine:
    """The engine named by `engine.name`."""
    name, world_size = config.engine.name, processes.world_size
    if name == "auto":
        name = "single" if world_size == 1 else "ddp"
    if name == "single":
        return Engine(model, config, processes)
    if name == "ddp":
        return DDPEngine(model, config, processes)
    return ZeroEngine(model, config, processes)


def check_engine(config: RunConfig, processes: Processes) -> None:
    """Check engine and batch size against the number of processes."""
    name, world_size = config.engine.name, processes.world_size
    training = config.training
    if name == "single" and world_size > 1:
        raise ConfigError(
            f"engine.name=single, but {world_size} processes were launched; set engine.name=ddp or "
            "zero1, zero2, zero3, or launch one"
        )
    if name == "ddp" and world_size == 1 and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "engine.name=ddp, but this is one process; launch several (torchrun "
            "--nproc_per_node=N scripts/train.py …), or set engine.name=auto"
        )
    if training.batch_size % world_size:
        raise ConfigError(
            f"training.batch_size={training.batch_size} cannot be shared equally by {world_size} "
            "processes; launch a number that divides it, or change it"
        )
    share = training.batch_size // world_size
    micro = training.micro_batch_size
    if micro and share % micro:
        raise ConfigError(
            f"training.batch_size={training.batch_size} leaves {share} sequences for each of "
            f"{world_size} processes, no multiple of training.micro_batch_size={micro}; set that "
            f"to {share} or a divisor of it"
        )
    if name.startswith("zero"):
        deepspeed_settings(config, processes)
