"""What each engine holds and sends in one step, from formulas: docs/scaling.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """Bytes on one process."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def state_bytes(engine: str, parameters: int, world_size: int, precision: str) -> State:
    """In bf16 DDP keeps fp32 weights and casts a copy of them at each step; DeepSpeed keeps bf16
    weights, and fp32 ones with the moments."""
    part = parameters / world_size
    if engine in ("single", "ddp"):
        cast = 2 if precision == "bf16" else 0
        return State((4 + cast) * parameters, 4 * parameters, 8 * parameters)
    size = 2 if precision == "bf16" else 4
    return State(
        weights=size * (part if engine == "zero3" else parameters),
        gradients=size * (parameters if engine == "zero1" else part),
        optimizer=12 * part,
    )


def collective_bytes(
    engine: str, parameters: int, precision: str, num_micro_batches: int
) -> dict[str, float]:
    """Bytes that each kind of collective is called on in one optimizer step."""
    size = parameters * (2 if precision == "bf16" and engine != "ddp" else 4)
    if engine == "single":
        return {}
    if engine == "ddp":
        return {"all_reduce": size}
    if engine == "zero1":  # gradients once per step, then the updated weights
        return {"all_reduce": size, "all_gather": size}
    if engine == "zero2":  # gradients after each micro-batch
        return {"all_reduce": size * num_micro_batches, "all_gather": size}
    # Weights for the forward and again for the backward pass.
    return {"all_gather": 2 * size * num_micro_batches, "reduce_scatter": size * num_micro_batches}
