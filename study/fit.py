"""The training loop of tasks and of theory's bridge."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

Batch = TypeVar("Batch")


def fit(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    *,
    loss_of: Callable[[Batch], Tensor],
    rate: Callable[[int], float],
    max_grad_norm: float,
    report: Callable[[int, float], None],
) -> None:
    """Train on one device, without checkpoints: one step per batch. `rate` and `report` get the
    number of the step, from 1."""
    for step, batch in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        report(step, loss.item())
