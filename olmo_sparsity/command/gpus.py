"""Read the options that describe the GPUs of a dry run: --gpus, --gpu, --nodes and more.

    train mine.yaml --dry-run --gpus 16 --nodes 2     hardware_of: 16 H100 on two nodes
    train mine.yaml --dry-run                         hardware_of: None, the machine here
    train mine.yaml --gpus 16                         an error: --gpus would have no effect

The commands `train` and `experiment` call it.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from olmo_sparsity.base.errors import ConfigError

if TYPE_CHECKING:
    from olmo_sparsity.training.estimate.hardware import Hardware


def check_gpus_are_of_a_dry_run(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option that describes GPUs if there is no `--dry-run --gpus N`: it
    would have no effect."""
    names = ("gpus", "gpu", "nodes", "nics_per_node", "gpu_hour", "disk_speed")
    for name in (*names, "gpu_hours_per_failure"):
        is_given = getattr(options, name, None) is not None
        if is_given and not (options.dry_run and options.gpus is not None):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} describes the GPUs of a dry run: use --dry-run --gpus N")


def hardware_of(options: argparse.Namespace) -> Hardware | None:
    """Return the hardware that these options describe; None without --gpus."""
    from olmo_sparsity.training.estimate.hardware import Hardware

    if options.gpus is None:
        return None
    return Hardware.of(
        options.gpu or "h100",
        options.gpus,
        options.nodes,
        nics_per_node=options.nics_per_node,
        price=options.gpu_hour,
        disk_speed=options.disk_speed,
        # Of `train` alone.
        gpu_hours_per_failure=getattr(options, "gpu_hours_per_failure", None),
    )
