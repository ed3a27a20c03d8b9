"""Map the output of a model's last linear map to its logits: some families scale it, some cap it.

    Cohere     logit_scale 0.0625             logits = 0.0625 · x
    Granite    logits_scaling 8               logits = x / 8
    Gemma 2    final_logit_softcapping 30     logits = 30 · tanh(x / 30)

Names of fields do not tell whether a family multiplies or divides. So `possible_logit_maps` returns
all candidates, and the trial of a model (compatibility.py) takes the one that gives its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitMap:
    """A map from the output x of the last linear map to logits: cap · tanh(scale · x / cap), or
    scale · x without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        # Most models have neither. A product with 1 would copy logits, the largest tensor there is.
        if self.scale != 1.0:
            x = x * self.scale
        if self.cap is not None:
            x = torch.tanh(x / self.cap) * self.cap
        return x


def possible_logit_maps(config: Any) -> list[LogitMap]:
    """Return the maps that a config of transformers may mean: with each cap and scale that it
    names, by product and by quotient."""
    text = config.get_text_config()

    def read_fields(*names: str) -> list[float]:
        values = [getattr(text, name, None) for name in names]
        return [value for value in values if value is not None]

    caps: Sequence[float | None]
    caps = read_fields("final_logit_softcapping", "logits_soft_cap") or [None]
    scales = read_fields("logit_scale", "logits_scaling", "lm_head_multiplier") or [1.0]
    maps: list[LogitMap] = []
    for cap in caps:
        for scale in scales:
            maps += [LogitMap(scale, cap), LogitMap(1 / scale, cap)]
    return maps
