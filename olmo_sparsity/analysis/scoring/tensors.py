"""Copy rows to the device of the model, and losses from it, each in one transfer.

    tokens_BL, positions_BL = as_tensors(batch, device)      # host → device
    loss_of_batches = to_host([loss_BW, other_loss_BW])      # device → host
    check_finite(loss_of_batches[0], "targets")

Every transfer makes the host wait for the device, so one transfer of several arrays is faster than
a transfer of each.

Dimension key: B rows of a batch, L tokens of a row, W targets of a row or block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.analysis.scoring.rows import Row
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.models.distant_states import to_device


def as_tensors(
    batch: Sequence[Row], device: torch.device, *arrays: Sequence[np.ndarray]
) -> list[Tensor]:
    """Return tokens_BL and positions_BL of rows of equal length, then a tensor for each of
    `arrays`. All are copied to the device together.

    Args:
        batch: The rows.
        device: The device of the model.
        arrays: Each is a list with an array for each row, all of one length, which are stacked.
    """
    positions = [row.positions for row in batch]
    tokens = [row.context.block.tokens[row.positions] for row in batch]
    return to_device([np.stack(row_arrays) for row_arrays in (tokens, positions, *arrays)], device)


def to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Copy tensors to arrays of the same shapes, all in one transfer."""
    if not tensors:
        return []
    numbers = torch.cat([tensor.flatten() for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])
    pieces = np.split(numbers, ends[:-1])
    return [piece.reshape(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def check_finite(losses: np.ndarray, noun: str) -> None:
    """Raise DataError if a loss is NaN or infinite. The error names what has losses by `noun`, in
    the plural, such as "targets"."""
    is_finite = np.isfinite(losses.astype(float))
    if not is_finite.all():
        raise DataError(
            f"{(~is_finite).sum()} of {is_finite.size} losses of {noun} are not finite: weights "
            "hold NaN, or the dtype overflows; check the weights, or pass dtype=fp32"
        )
