"""Compute once what several prompts have in common: the states of the beginnings that they share.

A tree has a node for each beginning that several prompts share, and a leaf for each prompt. Three
prompts of 130 tokens, of which all share 100 and the first two share 120, are the tree

    root, 100 tokens         "You answer from these sources. …"
    ├─ node, 120 tokens      "You answer from these sources. … Source A. …"
    │  ├─ leaf of prompt 0   10 more tokens
    │  └─ leaf of prompt 1   10 more tokens
    └─ leaf of prompt 2      30 more tokens

The states of a node's tokens are computed once, after those of its parent, and each leaf's tokens
after them. These are 170 tokens in place of 390. How states and log-probabilities are computed is
up to the caller, which passes functions for both:

    tree = PrefixTree.of(prompts)
    tree.count_forwards()                             # 170, before anything is computed
    dict(tree.scores(extend_states, score_rows))      # log-probabilities, by the prompt's index

The callers are `ModelLogprobs` (analysis/scoring/logprobs.py) and `WholePrompts`
(huggingface/whole_prompts.py). A caller may keep the states of a text from an earlier call, the
*known text*: what prompts share with it is not computed again.

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
    """Whether the known text begins with these tokens, too, so that they need not be computed."""

    leaves: list[int]
    """The indices of prompts that are in no child: their further tokens are computed by
    themselves."""

    children: list[Node]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class ExtendStates(Protocol):
    """A function that computes the states of a node's tokens, in whatever form its model has."""

    def __call__(self, states: Any, node: Node, num_computed: int, /) -> Any:
        """Return the states of all tokens of a node.

        Args:
            states: What this function has returned for the parent of the node: the states of its
                first tokens. None if the parent has no tokens.
            node: The node.
            num_computed: The number of these first tokens.
        """


class ScoreRows(Protocol):
    """A function that scores prompts of one shape: they begin with the tokens of one node, and
    their prefixes and continuations are equally long."""

    def __call__(self, states: Any, tokens_BL: np.ndarray, indices: list[int], /) -> Iterable[Any]:
        """Return the log-probabilities of each prompt.

        Args:
            states: What `ExtendStates` has returned for the node; None if it has no tokens.
            tokens_BL: The tokens of each prompt after those of the node.
            indices: The index of each prompt among the prompts of the tree.
        """


@dataclass(frozen=True)
class PrefixTree:
    """Prompts, and the beginnings that they share."""

    prompts: Sequence[Prompt]
    inputs: list[np.ndarray]
    """The tokens that a model reads of each prompt (`Prompt.inputs`)."""

    root: Node

    @staticmethod
    def of(prompts: Sequence[Prompt], known: np.ndarray | None = None) -> PrefixTree:
        """Return the tree of prompts, of which no two may be equal. `known`: the tokens of the
        known text; None if there is none."""
        # The last token of a prefix is never shared: the first token of the continuation is
        # predicted from its output, which states do not hold.
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
        """Return the number for a node and all below it. `num_computed`: the number of its first
        tokens that its parent has."""
        num_forwards = 0 if node.is_known else node.num_tokens - num_computed
        for index in node.leaves:
            num_forwards += len(self.inputs[index]) - node.num_tokens
        for child in node.children:
            num_forwards += self._count_forwards(child, num_computed=node.num_tokens)
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
        """Yield what `scores` yields for the prompts of a node and of all below it. `states`,
        `num_computed`: as for `ExtendStates`."""
        # Only the root may have no tokens; then `states` stays None.
        if node.num_tokens > num_computed:
            states = extend_states(states, node, num_computed)

        # Prompts of one shape are rows of one forward pass. Others are not padded to that shape, as
        # padding may change a state.
        indices_by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index in node.leaves:
            shape = (len(self.inputs[index]), len(self.prompts[index].continuation))
            indices_by_shape[shape].append(index)
        for indices in indices_by_shape.values():
            tokens_BL = np.stack([self.inputs[index][node.num_tokens :] for index in indices])
            yield from zip(indices, score_rows(states, tokens_BL, indices), strict=True)

        for child in node.children:
            yield from self._scores(child, extend_states, score_rows, states, node.num_tokens)


# --- build the tree -------------------------------------------------------------------------------


class _Sequence(NamedTuple):
    """A sequence of tokens whose beginning may be shared."""

    prompt_index: int | None
    """The index of the prompt. None means that the sequence is the known text."""

    tokens: np.ndarray
    max_shared: int
    """How many tokens of its beginning may be shared."""


class _Branches(NamedTuple):
    """How sequences go on after the beginning that all of them share."""

    num_shared: int
    """The number of tokens of that beginning."""

    groups: list[list[_Sequence]]
    """A group for each token that follows it."""


def _node_of(sequences: list[_Sequence]) -> Node:
    """Return the node of the longest beginning that all sequences share, with the nodes below it.
    The sequences must be sorted by their tokens."""
    num_shared, groups = _find_branches(sequences)
    leaves: list[int] = []
    children: list[Node] = []
    for group in groups:
        child = None
        # One sequence by itself shares nothing. A group of all of them shares no more than this
        # node has, so a child would be the same node again, without end.
        if 1 < len(group) < len(sequences):
            child = _node_of(group)
        if child is not None and child.num_tokens - num_shared >= MIN_SHARED_TOKENS:
            children.append(child)
        else:
            # The child, if there is one, would save too little: its prompts become leaves of this
            # node. The known text has no index, and needs no log-probabilities.
            leaves += [
                sequence.prompt_index for sequence in group if sequence.prompt_index is not None
            ]
    return Node(
        tokens=sequences[0].tokens[:num_shared],
        is_known=any(sequence.prompt_index is None for sequence in sequences),
        leaves=leaves,
        children=children,
    )


def _find_branches(sequences: list[_Sequence]) -> _Branches:
    """Return how many tokens all of these sequences share, and the groups of those that go on with
    the same token. The sequences must be sorted by their tokens:

        7 3 1 9 …    all share 2 tokens; the groups
        7 3 1 5 …    are these two, which go on with 1,
        7 3 4 2 …    and this one
    """
    limit = min(sequence.max_shared for sequence in sequences)
    # The first and the last of sorted sequences differ most, so all share what these two share.
    first_tokens = sequences[0].tokens[:limit]
    last_tokens = sequences[-1].tokens[:limit]
    differing = np.flatnonzero(first_tokens != last_tokens)
    if not len(differing):
        # The sequence with the smallest limit ends here, and no next token tells the others apart:
        # all are one group. Some could share more among themselves, which is rare: without such
        # nodes the result is the same, and takes longer.
        return _Branches(limit, [sequences])
    num_shared = int(differing[0])
    by_next_token = groupby(sequences, lambda sequence: sequence.tokens[num_shared])
    return _Branches(num_shared, [list(group) for _, group in by_next_token])
