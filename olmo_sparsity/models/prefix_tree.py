"""Compute once what several prompts have in common: the states of the beginnings that they share.

A tree has a node for each beginning that prompts share. Two prompts that begin alike are

    "Sources: A B. Q: …"  ─┐
    "Sources: A C. Q: …"  ─┴─ node "Sources: A " ─┬─ leaf "B. Q: …"
                                                  └─ leaf "C. Q: …"

so the node's tokens are computed once, and each leaf's after their states:

    tree = PrefixTree.of(prompts)
    tree.count_forwards()                             # token-forwards, before anything is computed
    dict(tree.scores(extend_states, score_rows))      # log-probabilities, by the prompt's index

Here is no model: both callers, `ModelLogprobs` and `WholePrompts`, pass functions that extend
states and score rows.

Dimension key: B prompts of one shape, L tokens of each after its node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np

from olmo_sparsity.models.prompts import Prompt

MIN_SHARED_TOKENS = 16
"""A node gets a child only if the prompts of the child share at least this many more tokens: a
forward pass of fewer tokens saves no time."""


@dataclass(frozen=True)
class Node:
    """A beginning that several prompts share."""

    tokens: np.ndarray
    """The tokens of the beginning, from the first token of the prompts on. A child repeats those of
    its parent."""

    is_known: bool
    """Whether the text whose states are kept begins with these tokens, too, so that they need not
    be computed."""

    leaves: list[int]
    """The indices of prompts that are in no child: their further tokens are computed by
    themselves."""

    children: list[Node]

    @property
    def depth(self) -> int:
        """Return the number of tokens of the beginning."""
        return len(self.tokens)


class ExtendStates(Protocol):
    """A function that computes the states of a node's tokens."""

    def __call__(self, states: Any, node: Node, num_computed: int, /) -> Any:
        """Return the states of all tokens of a node. `states`: the states of its first
        `num_computed` tokens; None if there are none."""


class ScoreRows(Protocol):
    """A function that scores prompts of one shape, which begin with the tokens of one node."""

    def __call__(self, states: Any, tokens_BL: np.ndarray, indices: list[int], /) -> Iterable[Any]:
        """Return the log-probabilities of each prompt.

        Args:
            states: The states of the node's tokens; None if it has no tokens.
            tokens_BL: The tokens of each prompt after those of the node.
            indices: The index of each prompt among the prompts of the tree.
        """


@dataclass(frozen=True)
class PrefixTree:
    """Prompts, and the beginnings that they share."""

    prompts: Sequence[Prompt]
    inputs: list[np.ndarray]
    """The tokens that a model reads of each prompt."""

    root: Node

    @staticmethod
    def of(prompts: Sequence[Prompt], known: np.ndarray | None = None) -> PrefixTree:
        """Return the tree of prompts, of which no two may be equal. `known`: the tokens of a text
        whose states are kept; None if none are."""
        # The last token of a prefix is never shared: its state predicts the first token of the
        # continuation, so it is computed with the tokens that are not shared.
        sequences = [
            _Sequence(index, prompt.inputs, max_shared=len(prompt.prefix) - 1)
            for index, prompt in enumerate(prompts)
        ]
        inputs = [sequence.tokens for sequence in sequences]
        if known is not None:
            sequences.append(_Sequence(None, known, max_shared=len(known)))
        sequences.sort(key=lambda sequence: sequence.tokens.tolist())
        return PrefixTree(prompts, inputs, _node_of(sequences))

    @staticmethod
    def without_sharing(prompts: Sequence[Prompt]) -> PrefixTree:
        """Return a tree with the prompts as leaves of its root, so that nothing is shared."""
        no_tokens = np.empty(0, dtype=np.int64)
        root = Node(no_tokens, is_known=False, leaves=[*range(len(prompts))], children=[])
        return PrefixTree(prompts, [prompt.inputs for prompt in prompts], root)

    def count_forwards(self) -> int:
        """Return the number of token-forwards that `scores` takes."""
        return self._count_forwards(self.root, num_computed=0)

    def _count_forwards(self, node: Node, num_computed: int) -> int:
        num_forwards = 0 if node.is_known else node.depth - num_computed
        for index in node.leaves:
            num_forwards += len(self.inputs[index]) - node.depth
        for child in node.children:
            num_forwards += self._count_forwards(child, num_computed=node.depth)
        return num_forwards

    def scores(
        self, extend_states: ExtendStates, score_rows: ScoreRows
    ) -> Iterator[tuple[int, Any]]:
        """Yield the index of each prompt with its log-probabilities."""
        return self._scores(self.root, extend_states, score_rows, states=None, num_computed=0)

    def _scores(
        self,
        node: Node,
        extend_states: ExtendStates,
        score_rows: ScoreRows,
        states: Any,
        num_computed: int,
    ) -> Iterator[tuple[int, Any]]:
        """Yield what `scores` yields for the prompts of a node. `states`: the states of the first
        `num_computed` tokens of the node, which are those of its parent; None if there are none."""
        if node.depth > num_computed:
            states = extend_states(states, node, num_computed)

        # Prompts of one shape are rows of one forward pass. Others are not padded to that shape, as
        # padding may change a state.
        indices_by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index in node.leaves:
            shape = (len(self.inputs[index]), len(self.prompts[index].continuation))
            indices_by_shape[shape].append(index)
        for indices in indices_by_shape.values():
            tokens_BL = np.stack([self.inputs[index][node.depth :] for index in indices])
            yield from zip(indices, score_rows(states, tokens_BL, indices), strict=True)

        for child in node.children:
            yield from self._scores(child, extend_states, score_rows, states, node.depth)


# --- build the tree -------------------------------------------------------------------------------


class _Sequence(NamedTuple):
    """A sequence of tokens whose beginning may be shared."""

    prompt_index: int | None
    """The index of the prompt. None means that it is the text whose states are kept."""

    tokens: np.ndarray
    max_shared: int
    """How many tokens of its beginning may be shared."""


class _Branches(NamedTuple):
    """Where sorted sequences part."""

    depth: int
    """The number of tokens that all of them share."""

    groups: list[list[_Sequence]]
    """The sequences by their next token."""


def _node_of(sequences: list[_Sequence]) -> Node:
    """Return the node of the longest beginning that all sequences share, with the nodes below it.
    The sequences must be sorted by their tokens."""
    depth, groups = _find_branches(sequences)
    leaves: list[int] = []
    children: list[Node] = []
    for group in groups:
        child = None
        # One sequence by itself shares nothing. A group of all of them shares no more than this
        # node has, so a child would be the same node again, without end.
        if 1 < len(group) < len(sequences):
            child = _node_of(group)
        if child is not None and child.depth - depth >= MIN_SHARED_TOKENS:
            children.append(child)
        else:
            # The child, if there is one, would save too little: its prompts are computed one by
            # one from this node on. The text whose states are kept has no index, and needs no
            # log-probabilities.
            leaves += [
                sequence.prompt_index for sequence in group if sequence.prompt_index is not None
            ]
    return Node(
        tokens=sequences[0].tokens[:depth],
        is_known=any(sequence.prompt_index is None for sequence in sequences),
        leaves=leaves,
        children=children,
    )


def _find_branches(sequences: list[_Sequence]) -> _Branches:
    """Return how many tokens all of these sequences share, and the groups of those that go on with
    the same token. The sequences must be sorted by their tokens."""
    limit = min(sequence.max_shared for sequence in sequences)
    # The first and the last of sorted sequences differ most, so all share what these two share.
    first_tokens = sequences[0].tokens[:limit]
    last_tokens = sequences[-1].tokens[:limit]
    differing = np.flatnonzero(first_tokens != last_tokens)
    if not len(differing):
        # The sequence with the smallest limit ends here. Those with a larger one could share more
        # among themselves, which is rare: without such nodes the result is the same, and takes
        # longer.
        return _Branches(limit, [sequences])
    depth = int(differing[0])
    by_next_token = groupby(sequences, lambda sequence: sequence.tokens[depth])
    return _Branches(depth, [list(group) for _, group in by_next_token])
