"""Build AdamW with its parameter groups, and compute the learning-rate schedule.

Place in the flow: used by training/engine.py.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from olmo_sparsity.config.sections import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; which parameters besides matrices are decayed is configured as in OLMo."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if id(parameter) in embeddings:
            decayed = config.decay_embeddings
        else:
            decayed = parameter.ndim > 1 or config.decay_norm_and_bias
        groups[decayed].append(parameter)
    return torch.optim.AdamW(
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

    OLMo: the decay lasts `num_steps` from the end of the warm-up, so it never reaches its final
    rate; here: it ends at the last step, as in transformers' linear scheduler.
    """
    peak, last = config.learning_rate, config.learning_rate * config.final_lr_share
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.schedule == "constant":
        left = num_steps - step
        return peak * left / config.cooldown_steps if left < config.cooldown_steps else peak
    passed = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    if config.schedule == "linear":
        return peak + (last - peak) * passed
    return last + (peak - last) * (1 + math.cos(math.pi * passed)) / 2
