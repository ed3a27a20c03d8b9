"""Compute the learning rate of a step (`optimizer.schedule`).

With a peak of 1.0, 300 warm-up steps of 20,000, and final_lr_share=0.1:

    step        150     300     10,150    20,000
    linear      0.50    1.00    0.55      0.10
    cosine      0.50    1.00    0.55      0.10      but flatter at both ends
    wsd         0.50    1.00    1.00      0.10      falls in the last cooldown_steps alone
    constant    0.50    1.00    1.00      1.00      or 0 at the end, if it has cooldown_steps

The rate is a function of the step alone, so a resumed run needs no state of it. steps.py calls it
in each step.
"""

from __future__ import annotations

import math

from olmo_sparsity.config.sections import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the rate of optimizer step `step` (1 is the first) of `num_steps`.

    The decay ends at the last step, as in OLMo and in transformers' linear scheduler. OLMo warms up
    from a tenth of the peak; here the warm-up starts from 0.
    """
    peak = config.learning_rate
    final = peak * config.final_lr_share
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps

    # "constant" may have a cooldown of no steps, which never begins. Its `final_lr_share` is 0.
    if config.schedule in ("constant", "wsd"):
        num_left = num_steps - step
        if num_left >= config.cooldown_steps:
            return peak
        return final + (peak - final) * num_left / config.cooldown_steps

    # A run that is shorter than its warm-up has no decay.
    num_decaying = max(1, num_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / num_decaying)
    if config.schedule == "linear":
        return peak + (final - peak) * progress
    assert config.schedule == "cosine"
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2
