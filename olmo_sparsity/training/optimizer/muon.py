"""PyTorch's Muon, whose updates are made orthogonal in the precision of the run.

    muon = Muon(matrices, torch.float32, lr=1e-2, weight_decay=0.1, momentum=0.95)
    muon.step()

PyTorch's own class always makes them orthogonal in bf16. A CPU without bf16 takes 20 times as long
for that as for fp32: more than half of a step of `make figure2`. In bf16, this class and PyTorch's
make the same steps to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


class Muon(torch.optim.Muon):
    """PyTorch's Muon, with Nesterov's momentum, and updates of the size of AdamW's.

    Args:
        matrices: The weights, all of two dimensions.
        dtype: Number type in which updates are made orthogonal.
        lr: Learning rate. One rate suits this class and AdamW.
        weight_decay: As AdamW's.
        momentum: Decay of the mean of gradients.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        dtype: torch.dtype,
        lr: float,
        weight_decay: float,
        momentum: float,
    ) -> None:
        super().__init__(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, group)

    def _update(self, matrix: Tensor, group: dict[str, Any]) -> None:
        """Update one matrix.

        Args:
            group: The options of the matrix's parameter group, as PyTorch names them.
        """
        gradient = cast(Tensor, matrix.grad)
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        # Nesterov's momentum: a mean of this gradient and of the momentum that it has changed.
        update = gradient.lerp(momentum, group["momentum"])

        # A number of an orthogonal n × m matrix is 1/√max(n, m) on average, one of AdamW's update
        # about 0.2 (Liu et al. 2025, https://arxiv.org/abs/2502.16982).
        rate = group["lr"] * (0.2 * math.sqrt(max(matrix.shape)))
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(self._make_orthogonal(update, group), alpha=-rate)

    def _make_orthogonal(self, update: Tensor, group: dict[str, Any]) -> Tensor:
        return make_orthogonal(
            update.to(self.dtype), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )


class ShardedMuon(Muon):
    """Muon for matrices that `fully_shard` has divided among processes.

    Muon needs whole matrices to make an update orthogonal. So updates are gathered, one matrix at
    a time, made orthogonal on every process, as with DDP, and each process applies its own rows.
    The momentum stays sharded.
    """

    def _make_orthogonal(self, update: Tensor, group: dict[str, Any]) -> Tensor:
        sharded = cast(DTensor, update)
        # All processes make it orthogonal: to divide this work, results would be sent once more.
        everywhere = [Replicate()] * sharded.device_mesh.ndim
        whole = sharded.redistribute(placements=everywhere).to_local()
        orthogonal = super()._make_orthogonal(whole, group)
        on_all = DTensor.from_local(orthogonal, sharded.device_mesh, everywhere, run_check=False)
        return on_all.redistribute(placements=sharded.placements)


def make_orthogonal(
    matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> Tensor:
    """Return a matrix with the singular vectors of the given one and singular values near 1. With
    PyTorch's coefficients and five steps they are between 0.6 and 1.3 where those of the given one
    are at least 0.002 times its norm. Smaller ones stay below.

    With `X` of a norm of 1, each step of Newton and Schulz's iteration is

        X  ←  a·X + (b·XXᵀ + c·(XXᵀ)²)·X

    which maps every singular value s to a·s + b·s³ + c·s⁵, and brings it near 1.

    Args:
        coefficients: `(a, b, c)`.
        eps: The least norm by which the matrix is divided, so that one of zeros stays so.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix  # XXᵀ is then the smaller of the two products
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x
