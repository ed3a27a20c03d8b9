"""Describe which tokens a forward sees: the local window of targets, and chosen distant tokens.

    context = scorer.context(block)               # a block, with the states of its distant tokens
    row = context.set_row(np.array([1, 3]))       # its local window, and the distant tokens 1 and 3
    scorer.losses([row])                          # scorer.py evaluates rows

What a row holds depends on how distant states are interpreted (interpretation.py). A block has the
distant tokens d0 … d4, the local window l5 l6 l7 and the targets t8 t9. The row above is:

    isolated     inputs d1 d3 l5 l6 l7 t8, with position IDs 1 3 5 6 7 8
    contextual   inputs l5 l6 l7 t8, which attend to the states of d1 and d3 in the long window
    replaced     inputs u0 d1 u2 d3 u4 l5 l6 l7 t8, where u are tokens of an unrelated text

An input predicts the token after it: here l7 predicts t8, and t8 predicts t9. A *span* says which
targets are evaluated: `context.set_row(np.array([1, 3]), (1, 2))` has the same inputs, and the loss
of t9 alone.

A prefix, if there is one, comes before all of these. Inputs are dense and causal, with gaps in
their position IDs but no mask, so fast attention kernels apply. Nothing here computes with a model.

Dimension key: X unrelated texts, F distant tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.text.windows import Block

TARGETS_OF_ONE_LENGTH = 16
"""Number of neighbouring targets whose rows have the same length, so that they share forwards."""


@dataclass(frozen=True, eq=False)
class Context:
    """A block with one distant text, prepared by `Scorer.context` for evaluation."""

    block: Block
    """The tokens of prefix, distant text, local window and targets."""

    states: DistantStates | None = None
    """States of the prefix and all distant tokens; only for contextual distant states."""

    unrelated_XF: np.ndarray | None = None
    """Unrelated texts that replace distant tokens; only for distant states `replaced`."""

    def long_row(self) -> Row:
        """Return the row of the long window, for all targets of the block."""
        if self.states is None and self.unrelated_XF is None:
            return self.dense_row()
        return self.set_row(np.arange(self.block.num_distant))

    def dense_row(self, num_targets: int | None = None) -> Row:
        """Return the row of the long window, computed in full without stored states, for the first
        `num_targets` targets (default: all)."""
        if num_targets is None:
            num_targets = self.block.num_targets
        return Row(self, np.arange(self.block.num_before + num_targets - 1), num_targets)

    def set_row(self, distant_indices: np.ndarray, span: tuple[int, int] | None = None) -> Row:
        """Return the row of the local window and a set of distant tokens. The interpretations of
        distant states differ only here.

        Args:
            distant_indices: The distant indices of these tokens, in rising order.
            span: The targets to evaluate, as indices into those of the block, from the first to
                one past the last. Default: all.
        """
        if self.unrelated_XF is not None:
            return self._prompt_row(distant_indices, span)

        if span is None:
            first_target, end_target = 0, self.block.num_targets
            span_in_row = None
        else:
            first_target, end_target = self._targets_around(span)
            span_in_row = (span[0] - first_target, span[1] - first_target)
        num_targets = end_target - first_target

        # Position IDs of the prefix and the set.
        earlier = self.block.positions_of_distant(distant_indices)
        local = self.block.positions_of_local(end_target)
        if self.states is not None and len(earlier):
            # Contextual: the row is the local window, which attends to states of earlier tokens.
            return Row(self, local, num_targets, attended=earlier, span=span_in_row)
        # Isolated: earlier tokens are inputs like others, next to the local window.
        return Row(self, np.concatenate([earlier, local]), num_targets, span=span_in_row)

    def _prompt_row(self, distant_indices: np.ndarray, span: tuple[int, int] | None) -> Row:
        """Return the row of a whole prompt, in which all distant tokens except these are replaced.
        Its targets are those of the block up to the end of the span."""
        end_target = self.block.num_targets if span is None else span[1]
        positions = np.arange(self.block.num_before + end_target - 1)
        return Row(
            self,
            positions,
            num_targets=end_target,
            span=span or (0, end_target),
            kept_distant=distant_indices,
        )

    def _targets_around(self, span: tuple[int, int]) -> tuple[int, int]:
        """Return the first target of a row that evaluates a span, and one past the last.

        Inputs after a target do not affect it, so a row may be longer than its target needs. Rows
        of neighbouring targets get one length, and share forwards: those of the targets 16, 17 and
        31 all reach from 16 to 32.
        """
        first, end = span
        first_target = first - first % TARGETS_OF_ONE_LENGTH
        end_target = min(first_target + TARGETS_OF_ONE_LENGTH, self.block.num_targets)
        # A span may reach beyond these 16, as a target of several tokens does.
        return first_target, max(end_target, end)


@dataclass(frozen=True)
class Row:
    """One input sequence: tokens of a context's block. In the example above the isolated row is

    Row(context, positions=[1, 3, 5, 6, 7, 8], num_targets=2)               # of t8 and t9
    Row(context, positions=[1, 3, 5, 6, 7, 8], num_targets=2, span=(1, 2))  # of t9 alone
    """

    context: Context
    positions: np.ndarray
    """The position IDs of the inputs, rising, which are also indices into `block.tokens`."""

    num_targets: int
    """The number of the last inputs that predict targets: the tokens after them in the block."""

    attended: np.ndarray | None = None
    """Position IDs of earlier tokens, of the prefix and distant ones, that the row attends to with
    their states of the long window. None if it attends to its own inputs alone."""

    span: tuple[int, int] | None = None
    """The targets to evaluate, as indices into the row's own targets, not into those of the block:
    from the first to one past the last. None: all."""

    kept_distant: np.ndarray | None = None
    """Indices of the distant tokens that unrelated texts do not replace; None if none are replaced
    at all."""

    @property
    def evaluated_span(self) -> tuple[int, int]:
        """Return the targets to evaluate, as `span` does; all of them if it is None."""
        return self.span or (0, self.num_targets)

    @property
    def targets(self) -> np.ndarray:
        """Return the token IDs of the targets to evaluate."""
        first, end = self.evaluated_span
        inputs = self.positions[-self.num_targets :][first:end]
        return self.context.block.tokens[inputs + 1]

    def within(self, reach: int) -> Row:
        """Return the row without the earlier tokens that no layer sees from a later token, so that
        they have no effect.

        Args:
            reach: The number of position IDs that a layer with a sliding window attends to, the
                token's own included.
        """
        if self.attended is not None:
            attended = self.attended[self.attended > self.positions[0] - reach]
            return replace(self, attended=attended if len(attended) else None)
        # Layer by layer, information passes from one token to the next within reach. It cannot
        # pass a gap as wide as the reach: with a reach of 4, from 10 to 14.
        gaps = np.flatnonzero(np.diff(self.positions) >= reach)
        if not len(gaps):
            return self
        return replace(self, positions=self.positions[gaps[-1] + 1 :])


def distinct_rows(rows: Sequence[Row], reach: int | None) -> tuple[Sequence[Row], Sequence[int]]:
    """Return the different rows to compute, and for each of `rows` the index of the one that serves
    it. Many rows are the same without the tokens that no layer of the model reaches: with a reach
    of 4, those of d0 and of d1 in the example above, both of which are l5 l6 l7 t8.

    Args:
        rows: Rows of any contexts.
        reach: How many position IDs a layer attends to (`Row.within`). None if it attends to all;
            all rows then count as different.
    """
    if reach is None:
        return rows, range(len(rows))
    distinct: list[Row] = []
    index_of_key: dict[Any, int] = {}
    index_of_row = []
    for row in rows:
        reduced = row.within(reach)
        # Arrays have no hash, so their bytes are compared. A context is compared by its identity:
        # its states are large.
        attended = None if reduced.attended is None else reduced.attended.tobytes()
        key = (
            id(reduced.context),
            reduced.positions.tobytes(),
            reduced.num_targets,
            attended,
            reduced.span,
        )
        if key not in index_of_key:
            index_of_key[key] = len(distinct)
            distinct.append(reduced)
        index_of_row.append(index_of_key[key])
    return distinct, index_of_row
