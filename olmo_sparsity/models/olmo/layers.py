"""The arithmetic of an OLMo layer: rotation by given angles, RMSNorm, ALiBi, scaled queries.

Dimension key: B batch, L length, S keys (more than L where earlier tokens are attended to), D
width, H heads, R pairs of rotated coordinates of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from olmo.model import RMSLayerNorm
from torch import Tensor

from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.models.attention import causal_bias

FORWARD = 1
BACK = -1
"""Directions of a rotation: by the angles, or by minus the angles."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2R coordinates of each head, pair (i, i + R) by the i-th angle, as upstream
    does. The other coordinates stay as they are. `cos`, `sin`: (…, R), see rope.py."""
    if torch.compiler.is_compiling():
        # The compiler finds the same gradient by itself. PyTorch 2.11 compiles the gradient of a
        # function as 0 if its forward ends in a `.to` that changes nothing.
        return _rotate_pairs(x, cos, sin, FORWARD)
    return _Rotation.apply(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """Rotation with an explicit gradient: the inverse rotation of the gradient. So only the tables
    are kept for it, and it costs no more than the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_pairs(x, cos, sin, FORWARD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (grad,) = grads
        return _rotate_pairs(grad, cos, sin, BACK), None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Return (a · cos − b · sin, b · cos + a · sin) for each pair (a, b), computed in the dtype of
    the tables. `direction`: FORWARD or BACK, which multiplies the sines."""
    num_pairs = cos.shape[-1]
    num_unrotated = x.shape[-1] - 2 * num_pairs
    a, b, unrotated = x.to(cos.dtype).split((num_pairs, num_pairs, num_unrotated), dim=-1)
    rotated_a = torch.addcmul(a * cos, b, sin, value=-direction)
    rotated_b = torch.addcmul(b * cos, a, sin, value=direction)
    return torch.cat((rotated_a, rotated_b, unrotated), dim=-1).to(x.dtype)


class RMSNorm(RMSLayerNorm):
    """Upstream's RMSNorm; on CPU, with an explicit gradient. This has half the passes over memory,
    which saves a sixth of a small model's training step, and leaves out upstream's two roundings
    in bf16. Other devices, and norms without a weight or with a bias, compute as upstream does."""

    def forward(self, x: Tensor) -> Tensor:
        has_weight_alone = self.weight is not None and self.bias is None
        if x.device.type != "cpu" or not has_weight_alone:
            return super().forward(x)
        if not torch.is_grad_enabled():
            return rms_norm(x, self.weight, self.eps)
        return _RMSNormWithGradient.apply(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return weight · x / sqrt(mean(x²) + eps), without gradients."""
    scaled, _ = _divide_by_rms(x.to(weight_D.dtype), eps)
    return scaled.mul_(weight_D)


def _divide_by_rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x divided by its root mean square, and the inverse of the root mean square."""
    # The norm reads x once; mean(x²) would write the squares to memory first.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = (norm.square() / x.shape[-1] + eps).rsqrt()
    return x * inverse, inverse


class _RMSNormWithGradient(torch.autograd.Function):
    """RMSNorm that keeps the scaled input for the backward pass, and not the result of each step.

    With y = x / rms and g the gradient of the result, the gradient of x is
    (g · weight − y · mean(g · weight · y)) / rms, and that of weight is Σ g · y over all rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        scaled, inverse = _divide_by_rms(x.to(weight_D.dtype), eps)
        ctx.save_for_backward(scaled, inverse, weight_D)
        ctx.dtype = x.dtype
        return scaled * weight_D

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        scaled, inverse, weight_D = ctx.saved_tensors
        product = grad * scaled
        mean = (product @ weight_D)[..., None] / product.shape[-1]
        grad_x = torch.addcmul(grad * weight_D, scaled, mean, value=-1) * inverse
        return grad_x.to(ctx.dtype), product.flatten(0, -2).sum(0), None


def count_keys(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return counts_1L: how many keys each query sees under causal attention, its own included. The
    queries are the last `num_queries` of the `num_keys` tokens: 2 of 5 see 4 and 5 keys."""
    return torch.arange(num_keys - num_queries + 1, num_keys + 1, device=device)[None]


def first_query_scale(length: int) -> float:
    """Return the initial value of a learned query scale: the s for which the factor s · ln(n) of a
    query that sees n keys is 1 on average over n = 1 … length, as without scaling."""
    length = max(2, length)  # ln(1) is 0
    sum_of_logs = math.lgamma(length + 1)  # ln(length!)
    return length / sum_of_logs


def alibi_bias(positions_BS: Tensor, config: ModelConfig, num_queries: int) -> Tensor:
    """Return bias_BHLS of ALiBi for the last `num_queries` tokens: minus the slope of each head
    times the distance between position IDs. It hides later tokens, whatever their position IDs."""
    num_keys = positions_BS.shape[1]
    heads = torch.arange(1, config.n_heads + 1, device=positions_BS.device, dtype=torch.float)
    slopes_H = 2.0 ** (-heads * config.alibi_bias_max / config.n_heads)
    queries_BL = positions_BS[:, -num_queries:]
    distances_BLS = (queries_BL[:, :, None] - positions_BS[:, None, :]).abs().float()
    causal_11LS = causal_bias(num_keys, positions_BS.device, num_queries)
    return causal_11LS - slopes_H[None, :, None, None] * distances_BLS[:, None]
