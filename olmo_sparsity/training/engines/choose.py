"""Choose the engine of a run, and check that it fits the number of processes.

    engine.name          processes    build_engine returns
    auto, single         1            Engine (engine.py)
    auto, ddp            4            DDPEngine (ddp.py)
    fsdp                 4            FSDPEngine (fsdp.py)
    zero1, zero2, zero3  4            ZeroEngine (deepspeed.py)

setup/inputs.py calls `check_engine` before anything is read, restore.py `build_engine` with a
model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.sections import EngineConfig, OptimizerConfig, TrainingConfig
from olmo_sparsity.training.engines.ddp import DDPEngine
from olmo_sparsity.training.engines.deepspeed import ZeroEngine
from olmo_sparsity.training.engines.deepspeed_settings import deepspeed_settings
from olmo_sparsity.training.engines.engine import Engine
from olmo_sparsity.training.processes.distributed import Processes


def build_engine(
    model: Any,
    engine: EngineConfig,
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    processes: Processes,
    source: Mapping[str, Tensor] | None = None,
) -> Engine:
    """Return the engine that `engine.name` names.

    Args:
        source: The weights of a model without memory (deferred.py), which `fsdp` and ZeRO fill
            weight by weight. None: the model has memory.
    """
    name = engine.name
    world_size = processes.world_size
    if name.startswith("zero"):
        settings = deepspeed_settings(engine, training, world_size)
        return ZeroEngine(model, training, optimizer, processes, settings, source)
    if name == "fsdp":
        from olmo_sparsity.training.engines.fsdp import FSDPEngine  # imports DTensor, for a second

        return FSDPEngine(model, training, optimizer, processes, engine, source)
    if name == "ddp" or (name == "auto" and world_size > 1):
        return DDPEngine(model, training, optimizer, processes)
    return Engine(model, training, optimizer, processes)


def check_engine(engine: EngineConfig, training: TrainingConfig, world_size: int) -> None:
    """Raise ConfigError if engine or batch size do not fit the number of processes."""
    name = engine.name
    batch_size = training.batch_size
    if name == "single" and world_size > 1:
        raise ConfigError(f"engine.name=single, but {world_size} processes run; set it to auto")
    # torchrun with one process is a way to try DDP, and sets WORLD_SIZE.
    if name == "ddp" and world_size == 1 and "WORLD_SIZE" not in os.environ:
        raise ConfigError("engine.name=ddp, but this is one process; use torchrun, or set auto")
    if batch_size % world_size:
        # The multiples next to it. The one below may be 0.
        below = batch_size - batch_size % world_size
        nearest = f"pass {below} or {below + world_size}" if below else f"pass {world_size}"
        raise ConfigError(
            f"training.batch_size={batch_size} is not a multiple of the {world_size} processes; "
            f"{nearest}"
        )
    if name.startswith("zero"):
        deepspeed_settings(engine, training, world_size)  # reads and checks the JSON file
