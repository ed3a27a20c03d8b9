"""Say how fast a machine other than this one would measure, for the GPU-hours of a dry run.

    `--speed H100`  → 40% of its stated peak      → token-forwards a second
    `--speed 3e5`   → 300,000 token-forwards a second, as the user has timed them

`machine_of_speed` is the entry point.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from olmo_sparsity.base.gpus import known_gpu

USED_SHARE_OF_PEAK = 0.4
"""The share of its stated peak that a GPU is assumed to reach; never timed on a large one."""


@dataclass(frozen=True)
class Machine:
    """A machine that a measurement may run on, and how fast it computes."""

    forwards_per_s: float
    """Token-forwards a second."""

    origin: str
    """Where this number comes from, for readers."""

    def hours(self, token_forwards: float) -> float:
        """Return how many hours the machine takes for this many token-forwards."""
        return token_forwards / self.forwards_per_s / 3600


def machine_of_speed(num_parameters: int, speed: str | None) -> Machine | None:
    """Return the machine that `speed` describes, or None if `speed` is None.

    Args:
        num_parameters: Parameters of the model, which determine how fast a GPU computes it.
        speed: The name of a GPU, or a number of token-forwards a second.
    """
    if speed is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?(e\d+)?", speed) and float(speed):
        return Machine(float(speed), "given")
    gpu = known_gpu(speed, "--speed", or_else="token-forwards a second above 0, or ")
    flops_per_s = USED_SHARE_OF_PEAK * gpu.tflops * 1e12
    origin = f"predicted: {USED_SHARE_OF_PEAK:.0%} of {gpu.tflops:,.0f} TFLOP/s, without attention"
    # A token-forward takes 2 FLOPs for each parameter, without attention.
    return Machine(flops_per_s / (2 * num_parameters), origin)
