"""PyTorch's Muon, whose updates are made orthogonal in the precision of the run.

    muon = Muon(matrices, dtype=torch.float32, lr=1e-2, adjust_lr_fn="match_rms_adamw")
    muon.step()

PyTorch's own always computes them in bf16. A CPU without bf16 takes 20 times as long for that as
for fp32: more than half of a step of `make figure2`. In bf16, the updates are PyTorch's to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import _adjust_lr


class Muon(torch.optim.Muon):
    """PyTorch's Muon, with Nesterov's momentum.

    Args:
        matrices: The weights.
        dtype: Number type in which updates are made orthogonal.
        options: What PyTorch's Muon takes.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], dtype: torch.dtype, **options: Any
    ) -> None:
        super().__init__(matrices, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, group)

    def _update(self, matrix: Tensor, group: dict[str, Any]) -> None:
        gradient = cast(Tensor, matrix.grad)
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"])

        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], matrix.shape)
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
    """Return a matrix with the singular vectors of the given one and singular values near 1: 0.7 to
    1.2 after five steps, less where the given one is a thousandth of the matrix's norm or less.

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
