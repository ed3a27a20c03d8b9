"""Sort rows into groups that share forwards, so that few forwards evaluate many rows.

    for group in RowGrouping(model, device, batch_tokens).groups(rows):
        group_rows = [rows[index] for index in group.indices]
        # scorer.py cuts these into batches, each of which is one forward (row_batch.py)

Most rows are short, so what counts is how many of them one forward takes: to launch a forward on a
GPU, or to read the weights on a CPU, takes longer than to compute a few rows. Five rows, the last
four of which attend to states of one context, may make two groups or three:

    row 0   8 inputs                                    group: 0
    row 1   4 inputs, attends to 10 of 500 states       group: 1, 3    copies of 10 states each
    row 2   4 inputs, attends to 20 of 500 states       group: 2, 4    copies of 20 states each
    row 3   4 inputs, attends to 10 of 500 states       or, if it is a single forward,
    row 4   4 inputs, attends to 20 of 500 states       group: 1, 2, 3, 4 under a mask
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from olmo_sparsity.analysis.scoring.rows import Context, Row
from olmo_sparsity.models.language_model import LanguageModel

FEW_PAIRS = 2**15
"""On a CPU, rows that attend to different numbers of distant tokens share a forward if they have at
most this many pairs of a token and a distant token: more would cost more in attention."""


class RowGroup(NamedTuple):
    """Rows that can share forwards."""

    indices: list[int]

    is_masked: bool
    """Whether each row gets all states of its context, under a mask that hides those that it does
    not attend to. Otherwise it gets copies of those that it attends to."""

    num_keys: int
    """The memory that a row takes, as a number of keys: those of its own tokens, and copies of
    distant states. The size of batches follows from it."""


class _Shape(NamedTuple):
    """The properties of a row that all rows of one forward must share."""

    num_inputs: int
    num_targets: int
    num_evaluated: int | None
    """The number of targets that are evaluated. None if all are."""

    context: Context | None
    """The context whose distant states the row attends to; None without distant states."""


@dataclass(frozen=True)
class RowGrouping:
    """The rules by which rows share forwards of one model on one device."""

    model: LanguageModel
    device: torch.device
    batch_tokens: Callable[[], int]
    """Returns the largest number of tokens of a forward now: it falls when memory runs out, which
    may happen between two groups."""

    def groups(self, rows: Sequence[Row]) -> Iterator[RowGroup]:
        """Sort rows into groups that share forwards.

        - Rows of one shape that attend to no distant states share forwards, whatever their context.
        - Rows with distant states share forwards if these are of one context and, in general, as
          many, so that copies of them stack.
        - Rows with different numbers of them share a forward as well, under a mask, if it is a
          single forward and costs no copies.
        """
        # Shape → number of attended states → indices of rows.
        indices_by_shape: dict[_Shape, dict[int, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for index, row in enumerate(rows):
            num_attended = 0 if row.attended is None else len(row.attended)
            indices_by_shape[_shape_of(row)][num_attended].append(index)

        for shape, indices_by_number in indices_by_shape.items():
            if shape.context is None:
                all_indices = list(chain(*indices_by_number.values()))
                yield RowGroup(all_indices, is_masked=False, num_keys=shape.num_inputs)
            else:
                yield from self._groups_with_states(shape, shape.context, indices_by_number)

    def _groups_with_states(
        self, shape: _Shape, context: Context, indices_by_number: dict[int, list[int]]
    ) -> Iterator[RowGroup]:
        """Sort rows of one shape that attend to states of one context into groups.

        Args:
            shape: The shape of all rows.
            context: The context of all rows.
            indices_by_number: Number of attended states → indices of rows.
        """
        assert context.states is not None, "these rows attend to states"
        length = shape.num_inputs
        num_states = context.states.num_tokens
        # Whether the model attends to the states of a context without a copy for each row.
        needs_no_copies = self.model.shares_distant(num_states, length)

        # All rows in one forward, if it is a single one.
        all_indices = list(chain(*indices_by_number.values()))
        num_tokens = len(all_indices) * length
        is_one_forward = num_tokens <= self.batch_tokens()
        if self.device.type == "cpu":
            is_one_forward &= num_tokens * num_states <= FEW_PAIRS
        if needs_no_copies and len(indices_by_number) > 1 and is_one_forward:
            yield RowGroup(all_indices, is_masked=True, num_keys=length)
            return

        # Otherwise rows that attend to equally many states, whose copies stack.
        for num_attended, indices in indices_by_number.items():
            is_masked = self._prefers_mask(num_attended, num_states)
            if not is_masked:
                num_copied = num_attended
            elif needs_no_copies:
                num_copied = 0
            else:
                num_copied = num_states
            yield RowGroup(indices, is_masked=is_masked, num_keys=length + num_copied)

    def _prefers_mask(self, num_attended: int, num_states: int) -> bool:
        """Return whether rows that attend to `num_attended` of `num_states` states get all states
        under a mask, and not copies of those that they attend to."""
        # A model that scales its queries by the number of keys would count the masked ones.
        config = getattr(self.model, "config", None)
        counts_keys = getattr(config, "scales_queries", False)
        # A mask avoids a copy of nearly all states for each row; below half a copy is smaller.
        return 2 * num_attended > num_states and not counts_keys


def _shape_of(row: Row) -> _Shape:
    """Return the shape of a row."""
    return _Shape(
        num_inputs=len(row.positions),
        num_targets=row.num_targets,
        num_evaluated=None if row.span is None else row.span[1] - row.span[0],
        context=None if row.attended is None else row.context,
    )
