"""Reject a model in which the losses of a row depend on the other rows of its batch.

Prompts are evaluated together, and their losses are compared. So the loss of a row must be its own.
Known models in which it is not:

    int8 activations    `quantize_dynamic` of torch rounds a batch by its largest number
    capacity            experts that are full drop the tokens of later rows
    batch statistics    a BatchNorm without running statistics

To compute one row at a time does not help. Rounded by the largest number of a row, the loss of a
token also depends on tokens after it, and on whether earlier ones are kept as states: with int8
activations by as much as on other rows. So such models are rejected.

compatibility.py and whole_prompts.py call it. Dimension key: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from olmo_sparsity.base.errors import ConfigError

NUM_ROWS = 4
NUM_TOKENS = 8

MOST_NATS = 0.1
"""A loss may change by this much with the texts in other rows: the least gap of a target. Smaller
changes by rounding are reported (`batch_noise`)."""


@torch.no_grad()
def check_rows_are_independent(
    model: Any, losses: Callable[[Tensor], Tensor], vocab_size: int, device: torch.device
) -> None:
    """Raise ConfigError if the last row of a batch has other losses beside other texts than beside
    copies of itself. Both batches have one shape, in which kernels round alike.

    Args:
        model: The model of transformers, for the message.
        losses: Returns the losses of a batch of tokens, a row for each of its rows.
        vocab_size: Number of tokens that the model knows.
        device: The device of its inputs.
    """
    # Multiples of 7, so that rows have different tokens in a small vocabulary, too.
    tokens_BL = torch.arange(NUM_ROWS * NUM_TOKENS, device=device).view(NUM_ROWS, NUM_TOKENS) * 7
    tokens_BL %= vocab_size
    # The last one, as experts with a capacity serve earlier rows first.
    beside_others = losses(tokens_BL)[-1]
    beside_copies = losses(tokens_BL[-1:].repeat(NUM_ROWS, 1))[-1]
    nats = float((beside_others - beside_copies).abs().max())
    if nats > MOST_NATS:
        raise ConfigError(
            f"{type(model).__name__} is not supported: a loss changes by {nats:.2f} nats (at most: "
            f"{MOST_NATS}) with the texts in other rows, as with int8 activations or experts that "
            "drop tokens; pass it unquantized, or with only weights quantized"
        )
