"""The arithmetic of an OLMo layer: rotation by given angles, RMSNorm, ALiBi, scaled queries.
B batch, L length (K keys: longer with a cache), D width, H heads, R pairs of coordinates."""

from __future__ import annotations

import math
from typing import Any

import torch
from olmo.model import RMSLayerNorm
from torch import Tensor

from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.models.attention import causal_bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply upstream's rotation to the first 2R coordinates of a head; the rest are unchanged."""
    if torch.compiler.is_compiling():
        # The compiler finds the same gradient by itself. PyTorch 2.11 compiles the gradient of a
        # function as 0 if its forward ends in a `.to` that changes nothing.
        return _turn(x, cos, sin, 1)
    return _Rotation.apply(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """Rotates pairs (i, i + R) by their angle. The gradient is the inverse rotation, so only the
    tables are kept, and it costs no more than the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = cos.shape[-1]
    first, second, kept = x.to(cos.dtype).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    turned = (
        torch.addcmul(first * cos, second, sin, value=-direction),
        torch.addcmul(second * cos, first, sin, value=direction),
    )
    return torch.cat((*turned, kept), dim=-1).to(x.dtype)


class RMSNorm(RMSLayerNorm):
    """Upstream's RMSNorm with an explicit gradient: half the passes over memory, which on CPU saves
    a sixth of a small model's training step. Upstream's two roundings in bf16 are left out."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None or self.bias is not None or x.device.type != "cpu":
            return super().forward(x)
        if not torch.is_grad_enabled():
            return rms_norm(x, self.weight, self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x, without gradients."""
    scaled, _ = _scale(x.to(weight_D.dtype), eps)
    return scaled.mul_(weight_D)


def _scale(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x divided by its root mean square, and the inverse of that."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = (norm.square() / x.shape[-1] + eps).rsqrt()
    return x * inverse, inverse


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that keeps the scaled input for the backward pass, and not each step's result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        scaled, inverse = _scale(x.to(weight_D.dtype), eps)
        ctx.save_for_backward(scaled, inverse, weight_D)
        ctx.dtype = x.dtype
        return scaled * weight_D

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        scaled, inverse, weight_D = ctx.saved_tensors
        product = grad * scaled
        along = (product @ weight_D)[..., None] / product.shape[-1]
        grad_x = torch.addcmul(grad * weight_D, scaled, along, value=-1) * inverse
        return grad_x.to(ctx.dtype), product.flatten(0, -2).sum(0), None


def count_keys(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return counts_1L: how many of `num_keys` places each of the last `num_queries` sees."""
    return torch.arange(num_keys - num_queries + 1, num_keys + 1, device=device)[None]


def first_query_scale(length: int) -> float:
    """Return the s for which s·ln(n) is 1 on average over n = 1 … length."""
    length = max(2, length)  # ln(1) is 0
    sum_of_logs = math.lgamma(length + 1)
    return length / sum_of_logs


def alibi_bias(positions_BK: Tensor, config: ModelConfig, num_queries: int) -> Tensor:
    """Return bias_BHLK: upstream's slopes times the distance between position IDs. It hides later
    places, whatever their position IDs."""
    num_keys = positions_BK.shape[1]
    heads = torch.arange(1, config.n_heads + 1, device=positions_BK.device, dtype=torch.float)
    slopes_H = 2.0 ** (-heads * config.alibi_bias_max / config.n_heads)
    queries_BL = positions_BK[:, -num_queries:]
    distances_BLK = (queries_BL[:, :, None] - positions_BK[:, None, :]).abs().float()
    causal_11LK = causal_bias(num_keys, positions_BK.device, num_queries)
    return causal_11LK - slopes_H[None, :, None, None] * distances_BLK[:, None]
