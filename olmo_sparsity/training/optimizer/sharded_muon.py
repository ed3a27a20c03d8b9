"""Muon for matrices that `fully_shard` has divided among processes.

Muon needs whole matrices: its update is made orthogonal. So updates are gathered, one matrix at a
time, made orthogonal on every process, as with DDP, and each process applies its own rows. The
momentum stays sharded.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz


class ShardedMuon(torch.optim.Muon):
    """PyTorch's Muon, whose matrices are DTensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(cast(DTensor, matrix), group)

    def _update(self, matrix: DTensor, group: dict[str, Any]) -> None:
        """Update one matrix, as PyTorch's Muon does."""
        gradient = cast(DTensor, matrix.grad)
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        # Nesterov's momentum, as in PyTorch's step; no other is configured here.
        update = cast(DTensor, gradient.lerp(momentum, group["momentum"]))

        # All processes make it orthogonal: to divide this work, results would be sent once more.
        everywhere = [Replicate()] * update.device_mesh.ndim
        whole = update.redistribute(placements=everywhere).to_local()
        orthogonal = _zeropower_via_newtonschulz(
            whole, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        on_all = DTensor.from_local(orthogonal, matrix.device_mesh, everywhere, run_check=False)
        own_rows = on_all.redistribute(placements=matrix.placements)

        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape)
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(own_rows, alpha=-rate)
