"""Import DeepSpeed such that it starts no compiler, uses our process group, and is new enough."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from packaging.version import Version

from olmo_sparsity.base.errors import ConfigError

MIN_VERSION = "0.19.7"
"""The oldest version of DeepSpeed. Older ones divide gradients by the number of micro-batches."""


def import_deepspeed(device: torch.device) -> Any:
    """Return the module `deepspeed`, ready to be used. Raise ConfigError if it is missing or
    old."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # torch renamed collectives that DeepSpeed calls each step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"engine.name requires DeepSpeed, which cannot be imported ({error}): "
            f"pip install 'deepspeed>={MIN_VERSION}'"
        ) from None
    if Version(deepspeed.__version__) < Version(MIN_VERSION):
        raise ConfigError(
            f"engine.name requires a newer DeepSpeed than the installed {deepspeed.__version__}: "
            f"pip install 'deepspeed>={MIN_VERSION}'"
        )
    # Disables shared-memory collectives, which are for inference, and the search for extensions,
    # which starts compilers. They would be compiled on first use, under a lock that a killed
    # process never releases.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(auto_mpi_discovery=False, dist_init_required=False)
    return deepspeed
