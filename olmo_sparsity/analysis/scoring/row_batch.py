"""Compute one batch of rows: put rows of one group into tensors, and call the model once.

    rows of a RowGroup → `hidden_of_batch` → hidden states at the tokens that predict targets

scorer.py calls it, and computes losses or log-probabilities from the hidden states.

How a row gets the distant states that it attends to depends on its group (row_groups.py). With
states of four distant tokens, of which the first row attends to 0 and 2 and the second to 1 and 3:

    copied    the states of each row, stacked: [s0 s2], [s1 s3]
    masked    all four states for both rows, and a bias that hides the others:
              [0 −∞ 0 −∞], [−∞ 0 −∞ 0]

Dimension key: B rows of a batch, L tokens of a row, W targets of a row or block, F distant tokens,
D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.analysis.scoring.rows import Row
from olmo_sparsity.analysis.scoring.tensors import as_tensors
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.language_model import LanguageModel
from olmo_sparsity.text.units import NO_INDICES


def hidden_of_batch(
    model: LanguageModel, device: torch.device, batch: Sequence[Row], is_masked: bool
) -> Tensor:
    """Return hidden_BWD at the tokens that predict the evaluated targets of each row.

    Args:
        model: The model that computes the forward.
        device: The device of its inputs.
        batch: Rows of one `RowGroup`, which all have distant states of one context, or none.
        is_masked: Whether rows get all states of their context, under a mask that hides those that
            they do not attend to. Otherwise each row gets copies of those that it attends to.
    """
    first_row = batch[0]
    states = None if first_row.attended is None else first_row.context.states
    # Which states each row attends to: their indices, or under a mask whether it is each of them.
    attended = [NO_INDICES if row.attended is None else row.attended for row in batch]
    if is_masked:
        assert states is not None, "a mask hides states"
        attended = list(_visibility(attended, states.num_tokens))
    evaluated = [np.arange(*row.evaluated_span) for row in batch]

    # One copy for all four arrays: each copy makes the host wait.
    tokens_BL, positions_BL, attended_on_device, evaluated_BW = as_tensors(
        batch, device, attended, evaluated
    )
    distant = None
    if states is not None:
        if not is_masked:
            distant = states.choose(attended_on_device)
        elif all(is_visible_F.all() for is_visible_F in attended):
            # Without a bias faster kernels apply.
            distant = states.expand(len(batch))
        else:
            distant = _with_mask(states, attended_on_device)
    hidden_BWD = model.hidden(
        tokens_BL, positions_BL, distant=distant, num_last=first_row.num_targets
    )
    if first_row.span is None:
        return hidden_BWD
    return hidden_BWD.take_along_dim(evaluated_BW[..., None], 1)


def _visibility(attended: Sequence[np.ndarray], num_tokens: int) -> np.ndarray:
    """Return is_visible_BF, whether each row attends to each state of its context."""
    is_visible_BF = np.zeros((len(attended), num_tokens), dtype=bool)
    for is_visible_F, indices in zip(is_visible_BF, attended, strict=True):
        is_visible_F[indices] = True
    return is_visible_BF


def _with_mask(states: DistantStates, is_visible_BF: Tensor) -> DistantStates:
    """Return the states for a batch of rows, with a bias that hides some of them from each row.

    Args:
        states: The states of the context that all rows share.
        is_visible_BF: 1 where a row attends to a state, and 0 elsewhere; `as_tensors` makes
            integers of booleans.
    """
    bias_BF = torch.zeros(is_visible_BF.shape, dtype=torch.float, device=is_visible_BF.device)
    # The lowest number in place of −∞, as in the model's own causal mask.
    bias_BF.masked_fill_(is_visible_BF == 0, torch.finfo(torch.float).min)
    return states.expand(len(is_visible_BF), bias_BF)
