"""Add up losses by the position of the target, and take their means in ranges of positions.

Two rows of three targets, whose losses are 4 3 2 and 2 1 2, at the positions 1 2 3; ranges [0, 2)
and [2, 4):

    sum_L      0 6 4 4       positions 0 to 3
    count_L    0 2 2 2
    rows       [0, 2): 6 / 2 = 3.0        [2, 4): (4 + 4) / (2 + 2) = 2.0

Sums are kept by position, and not by range, in fp64: processes and batches can be added up in any
order, with the same result to the last digits that are printed.

Called by evaluate.py.

Dimension key: B batch, L length, R ranges of positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from olmo_sparsity.training.metrics.loss_rows import LossRow
from olmo_sparsity.training.processes.distributed import Processes


class PositionSums:
    """Sums of losses, and numbers of targets, by the position of the target. `rows` takes means."""

    def __init__(self, length: int, ranges: list[tuple[int, int]]) -> None:
        """Begin with sums of 0.

        Args:
            length: One more than the largest position of a target.
            ranges: The first and the end position of each range.
        """
        self.ranges = ranges
        self.sum_L = torch.zeros(length, dtype=torch.float64)
        self.count_L = torch.zeros(length, dtype=torch.int64)
        self.num_texts_R = torch.zeros(len(ranges), dtype=torch.int64)
        """The number of texts that have a target in a range."""

    def add(self, nll_BL: Tensor, targets_BL: Tensor, texts_BL: Tensor | None) -> None:
        """Add the losses of a batch.

        Args:
            nll_BL: The loss of each target, in nats.
            targets_BL: The position of each target.
            texts_BL: The number of each target's document in its row, if positions begin at 0 in
                each document. None: each row is one text.
        """
        targets = targets_BL.flatten()
        self.sum_L.index_add_(0, targets, nll_BL.flatten())
        self.count_L.index_add_(0, targets, torch.ones_like(targets))
        for range_index, (first, end) in enumerate(self.ranges):
            is_inside_BL = (targets_BL >= first) & (targets_BL < end)
            self.num_texts_R[range_index] += _count_texts(is_inside_BL, texts_BL)

    def add_up(self, processes: Processes) -> None:
        """Replace the sums of this process by those of all. Every process must call it."""
        processes.sum_in_place(self.sum_L)
        processes.sum_in_place(self.count_L)
        processes.sum_in_place(self.num_texts_R)

    def rows(self, bytes_per_token: float) -> list[LossRow]:
        """Return the row of each range that has a target."""
        rows: list[LossRow] = []
        for range_index, (first, end) in enumerate(self.ranges):
            num_tokens = int(self.count_L[first:end].sum())
            if num_tokens == 0:  # no document is as long (positions.per_document)
                continue
            loss = float(self.sum_L[first:end].sum() / num_tokens)
            bits_per_token = loss / math.log(2)
            rows.append(
                {
                    "from": first,
                    "to": end,
                    "loss": loss,
                    "bits_per_byte": bits_per_token / bytes_per_token,
                    "num_tokens": num_tokens,
                    "num_documents": int(self.num_texts_R[range_index]),
                }
            )
        return rows


def _count_texts(is_inside_BL: Tensor, texts_BL: Tensor | None) -> int:
    """Return how many texts of a batch have a target in a range.

    Args:
        is_inside_BL: Whether a target is in the range.
        texts_BL: The number of each target's document in the row. None: each row is one text.
    """
    if texts_BL is None:
        return int(is_inside_BL.any(1).sum())
    # Numbers begin anew in each row, so documents are counted row by row.
    return sum(
        len(texts[inside].unique()) for texts, inside in zip(texts_BL, is_inside_BL, strict=True)
    )
