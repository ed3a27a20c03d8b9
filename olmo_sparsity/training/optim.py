"""Build AdamW and compute the learning-rate schedule."""

from __future__ import annotations

import math
import statistics
from inspect import unwrap
from typing import Any, TypeVar

import torch
from torch import nn

from olmo_sparsity.config.sections import OptimizerConfig

Batch = TypeVar("Batch")


class AdamW(torch.optim.AdamW):
    """PyTorch's AdamW. Its methods are wrapped for optimizers that are themselves compiled, and the
    wrappers import PyTorch's compiler, about a second of each start. Ours never is, so the methods
    are called without the wrappers."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        unwrap(torch.optim.AdamW.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        unwrap(torch.optim.AdamW.zero_grad)(self, set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return unwrap(torch.optim.AdamW.step)(self, closure)


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, kind: type[torch.optim.AdamW] = AdamW
) -> torch.optim.AdamW:
    """AdamW; which parameters besides matrices are decayed is configured as in OLMo."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if id(parameter) in embeddings:
            decayed = config.decay_embeddings
        else:
            # A parameter that DeepSpeed has sharded is empty.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            decayed = len(shape) > 1 or config.decay_norm_and_bias
        groups[decayed].append(parameter)
    return kind(
        [
            {"params": parameters, "weight_decay": config.weight_decay if decayed else 0.0}
            for decayed, parameters in groups.items()
            if parameters
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Rate of optimizer step `step` (1 is the first) of `num_steps`.

    The decay ends at the last step, as in OLMo and in transformers' linear scheduler. OLMo warms up
    from a tenth of the peak; here the warm-up starts from 0."""
    peak, last = config.learning_rate, config.learning_rate * config.final_lr_share
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.schedule in ("constant", "wsd"):
        left, decay = num_steps - step, config.cooldown_steps
        return last + (peak - last) * left / decay if left < decay else peak
    passed = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    if config.schedule == "linear":
        return peak + (last - peak) * passed
    return last + (peak - last) * (1 + math.cos(math.pi * passed)) / 2


class Jumps:
    """Finds steps whose loss or gradient norm jumps above those of the last `WINDOW` steps, as
    OLMo-core's optimizers do."""

    WINDOW = 128

    def __init__(self, sigmas: float, recent: list[list[float]], num_skipped: int) -> None:
        """`recent`: loss and gradient norm of the last steps, skipped ones too."""
        self.sigmas, self.recent, self.num_skipped = sigmas, recent, num_skipped

    def found(self, loss: float, norm: float) -> bool:
        if not math.isfinite(loss + norm):
            return True  # the run ends when it writes this step's metrics
        before, self.recent = self.recent, [*self.recent, [loss, norm]][-self.WINDOW :]
        if len(before) < self.WINDOW // 4:
            return False
        return any(
            value > statistics.fmean(earlier) + self.sigmas * statistics.pstdev(earlier)
            for value, earlier in zip((loss, norm), zip(*before, strict=True), strict=True)
        )
