"""Read the options that describe the GPUs of a dry run: --gpus, --gpu, --nodes and more.

Place in the flow: options → **`hardware_of`** → the dry runs of `train` and `experiment`.
"""

from __future__ import annotations

import argparse
from typing import Any

from olmo_sparsity.base.errors import ConfigError


def check_gpus_are_of_a_dry_run(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option that describes GPUs if there is no `--dry-run --gpus N`: it
    would have no effect."""
    for name in ("gpus", "gpu", "nodes", "nics_per_node", "gpu_hour", "disk_speed"):
        is_given = getattr(options, name, None) is not None
        if is_given and not (options.dry_run and options.gpus is not None):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} describes the GPUs of a dry run: use --dry-run --gpus N")


def hardware_of(options: argparse.Namespace) -> Any:
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
    )
