"""Run the commands that make a model: `configs`, `prepare`, `train` and `export`.

What a user runs, in this order:

    configs   a config that is installed   → a file of the user's
    prepare   the config's text            → shards of tokens
    train     shards                       → a run folder with checkpoints
    export    a checkpoint                 → a folder that transformers loads

cli.py calls the functions `run_…`. The packages `data`, `training` and `models` are imported inside
them, as they take seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_sparsity.base.errors import UserError
from olmo_sparsity.base.launch import EXIT_LOST_PROCESS
from olmo_sparsity.command.ending import print_error
from olmo_sparsity.command.gpus import check_gpus_are_of_a_dry_run, hardware_of
from olmo_sparsity.command.memory import give_back_freed_memory
from olmo_sparsity.command.share import parse_shard

if TYPE_CHECKING:
    from olmo_sparsity.config.run import RunConfig

LARGE_ACTIVATIONS = 2**22
"""If the activations of one layer and sequence have this many numbers, 16 MiB in fp32, freed ones
are given back to the system."""


def run_configs(options: argparse.Namespace) -> int:
    """List the installed configs, or print one; return the exit code."""
    from olmo_sparsity.config.installed import list_configs, read_config

    if options.name is None:
        print(list_configs())
    else:
        print(read_config(options.name).rstrip())
    return 0


def run_prepare(options: argparse.Namespace) -> int:
    """Turn a corpus into token shards; return the exit code."""
    from olmo_sparsity.config.run import load_config
    from olmo_sparsity.data.prepare import prepare

    shard = parse_shard(options.shard, by_launch=False)
    prepare(load_config(options.config, options.overrides).data, shard)
    return 0


def run_train(options: argparse.Namespace) -> int:
    """Train a model, or print the cost of it; return the exit code."""
    from olmo_sparsity.base.launch import read_launch
    from olmo_sparsity.config.run import load_config

    check_gpus_are_of_a_dry_run(options)
    read_config = partial(load_config, options.config, options.overrides)
    is_alone = options.dry_run or read_launch().world_size == 1
    # A mistake in the config is reported before the imports below, which take seconds.
    config = read_config() if is_alone else _read_without_report(read_config)
    from olmo_sparsity.training import dry_run, loop
    from olmo_sparsity.training.processes.distributed import LostProcess
    from olmo_sparsity.training.processes.process_group import connect

    if options.dry_run:
        dry_run.dry_run(config or read_config(), hardware_of(options))
        return 0
    try:
        with connect(config.engine if config else None) as processes:
            with processes.raising_together():
                # Raises the mistake that was not reported yet.
                config = config or read_config()
            _tune_memory(config)
            return int(loop.train(config, processes, getattr(options, "profile", None)))
    except LostProcess as lost:
        again = "the same command goes on from the last checkpoint"
        message = f"another process of this run is gone ({lost}); {again}"
        return print_error(message, EXIT_LOST_PROCESS)


def _read_without_report(read_config: Callable[[], RunConfig]) -> RunConfig | None:
    """Return the config; None if it has a mistake. One of several processes must not report it
    alone: the others would wait for a process that has ended."""
    try:
        return read_config()
    except UserError:
        return None


def _tune_memory(config: RunConfig) -> None:
    """Have glibc return freed tensors to the system where keeping them would cost much memory."""
    if config.engine.name.startswith(("fsdp", "zero")):
        # glibc would keep twice what is in use: shards are smaller than the usual limit.
        give_back_freed_memory(2**20)
    elif config.training.length * config.model.d_model >= LARGE_ACTIVATIONS:
        give_back_freed_memory()


def run_export(options: argparse.Namespace) -> int:
    """Write a checkpoint as a folder that transformers loads; return the exit code."""
    from olmo_sparsity.models.huggingface import exchange

    name = exchange.export(Path(options.checkpoint), Path(options.out), options.dtype)
    print(f"{options.out}: {name}; transformers.AutoModelForCausalLM.from_pretrained reads it")
    return 0
