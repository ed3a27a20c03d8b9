"""Say above printed verdicts what their words mean, and how often such verdicts are right.

Place in the flow: `Attribution.describe` (attribution.py) prints **`how_to_read`** first.
"""

from __future__ import annotations

import re

from olmo_sparsity.base.errors import printable

HOW_TO_READ = (
    "A nat is a unit of loss: 1 nat less means that the words are 2.7 times as likely. A decoy is "
    "an unrelated text that replaces a source. A statement rests on a source if it loses much more "
    "without it than decoys explain. How often this is right: of 52 test questions that lost 2 "
    "nats or more without the right source, SmolLM2-135M's verdicts named that source, and no "
    "other, in 92%. Of 83 whose right source was missing, they named another one in 0%."
)
"""The rates are those of docs/sources.md, for SmolLM2-135M."""

MEASURED_MODEL = re.compile(r"\bsmollm2(-135m| \(|$)", re.IGNORECASE)
"""Matches the names of the model whose rates these are, such as `smollm2`, `smollm2 (Q4_1)` and
`HuggingFaceTB/SmolLM2-135M-Instruct`. Larger models of the family have rates of their own."""


def how_to_read(model_name: str) -> str:
    """Return what is printed above the verdicts of a model."""
    if MEASURED_MODEL.search(model_name):
        return HOW_TO_READ
    name = printable(model_name)
    return f"{HOW_TO_READ} {name} has rates of its own, which are not known until you measure them."
