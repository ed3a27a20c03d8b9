"""Define the interface of models that return log-probabilities of whole prompts, and plan which
beginnings of prompts are computed once.

`LogprobModel` is all that a verdict on sources needs; servers and llama.cpp implement it as
`PromptModel`. For models that keep states, `plan_shared_prefixes` builds a tree of the beginnings
that prompts share, and `scores_along` walks it:

    "Sources: A B. Q: …"  ─┐
    "Sources: A C. Q: …"  ─┴─ node "Sources: A " ─┬─ leaf "B. Q: …"
                                                  └─ leaf "C. Q: …"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from olmo_sparsity.base.renamed import getattr_with_old_names


@dataclass(frozen=True, eq=False)
class Prompt:
    """The token IDs of a text, and of the continuation whose log-probabilities are wanted. Position
    IDs count from 0, without gaps."""

    prefix: np.ndarray
    """All tokens before the continuation, at least one."""

    continuation: np.ndarray

    @cached_property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a key for dictionaries that is equal for equal prompts. (Arrays cannot be
        keys.)"""
        return tuple(self.prefix.tolist()), tuple(self.continuation.tolist())

    @property
    def inputs(self) -> np.ndarray:
        """Return the tokens that a model reads: all but the last, after which nothing is
        predicted."""
        return np.concatenate([self.prefix, self.continuation[:-1]])


class LogprobModel(Protocol):
    """A model that returns log-probabilities of whole prompts: a `PromptModel`, or `ModelLogprobs`,
    which uses the states of a model in memory."""

    @property
    def shares(self) -> bool:
        """Return whether prompts of one call share the states of their beginnings."""

    @property
    def token_forwards(self) -> int:
        """Return how many tokens forward passes have computed since this object was made."""

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return for each prompt the log-probabilities of its continuation's tokens, in nats. Each
        token is predicted from all tokens before it."""


class PromptModel(ABC):
    """A `LogprobModel` whose states cannot be read: a server, llama.cpp, a recurrent model of
    transformers."""

    token_forwards = 0
    shares = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return the device of the inputs; the CPU where the model computes elsewhere."""

    @property
    @abstractmethod
    def dtype_name(self) -> str:
        """Return the dtype or quantization of the weights, which is part of the identity."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Return one more than the largest token ID."""

    @abstractmethod
    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return log-probabilities, as `LogprobModel.score` describes."""

    @abstractmethod
    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        """Return the tokens that follow, chosen greedily."""

    def recognize_in(self, folder: Path) -> None:  # noqa: B027 (files have a fingerprint)
        """Raise if the results in this folder were computed by another model than the one that can
        be reached now."""


if not TYPE_CHECKING:  # otherwise mypy accepts any name of this module
    __getattr__ = getattr_with_old_names(__name__, {"Engine": "PromptModel"})


MIN_SHARED_TOKENS = 16
"""A node gets a child only if the prompts of the child share at least this many more tokens: a
forward pass of fewer tokens saves no time."""


@dataclass(frozen=True)
class Node:
    """A beginning of `depth` tokens that several prompts share. Nodes form a tree: the prompts of a
    child share more tokens."""

    indices: list[int]
    """The numbers of all prompts that begin with these tokens, also of those in children."""

    depth: int
    is_known: bool
    """Whether the text whose states are kept begins with these tokens, too, so that they need not
    be computed."""

    leaves: list[int]
    """The numbers of prompts that are in no child: their further tokens are computed by
    themselves."""

    children: list[Node]


def _prefix_tree(
    rows: Sequence[np.ndarray],
    max_shared: Sequence[int],
    known_index: int,
    sorted_indices: list[int],
) -> Node:
    """Return the node of the longest beginning that some rows share, with the nodes below it.

    rows: The tokens of all prompts, and last, at `known_index`, of the text whose states are kept.
    max_shared: How many tokens of each row may be shared.
    sorted_indices: The indices of the rows of this node, in the order of their tokens.
    """
    limit = min(max_shared[index] for index in sorted_indices)
    # Sorted rows share the beginning that the first and the last of them share.
    first = rows[sorted_indices[0]][:limit]
    last = rows[sorted_indices[-1]][:limit]
    differing = np.flatnonzero(first != last)
    if len(differing):
        depth = int(differing[0])
        by_next_token = groupby(sorted_indices, lambda index: rows[index][depth])
        branches = [list(indices) for _, indices in by_next_token]
    else:
        depth = limit
        # The shortest row ends here. The others share no more, which is rare and costs only time.
        branches = [sorted_indices]

    leaves = list[int]()
    children = list[Node]()
    for branch in branches:
        child = None
        if 1 < len(branch) < len(sorted_indices):
            child = _prefix_tree(rows, max_shared, known_index, branch)
        if child is not None and child.depth - depth >= MIN_SHARED_TOKENS:
            children.append(child)
        else:
            leaves += [index for index in branch if index != known_index]
    return Node(sorted_indices, depth, known_index in sorted_indices, leaves, children)


def plan_shared_prefixes(
    prompts: Sequence[Prompt], known: np.ndarray | None = None
) -> tuple[Node, list[np.ndarray]]:
    """Return the root of a tree of beginnings that prompts share, and the rows: the tokens that a
    model reads of each prompt. No two prompts may be equal.

    known: The tokens of a text whose states are kept. They are the last of the rows.
    """
    rows = [prompt.inputs for prompt in prompts]
    # Not the last token of a prefix: its state predicts the first token of the continuation, so it
    # is computed with the tokens that are not shared.
    max_shared = [len(prompt.prefix) - 1 for prompt in prompts]
    if known is not None:
        rows.append(known)
        max_shared.append(len(known))
    order = sorted(range(len(rows)), key=lambda index: rows[index].tolist())
    return _prefix_tree(rows, max_shared, len(prompts), order), rows


def scores_along(
    node: Node,
    rows: Sequence[np.ndarray],
    prompts: Sequence[Prompt],
    extend_states: Callable[[Any, Node, int], Any],
    score_rows: Callable[[Any, np.ndarray, list[int]], Iterable[Any]],
    states: Any = None,
    num_computed: int = 0,
) -> Iterator[tuple[int, Any]]:
    """Yield the number of each prompt in a node or below it, with its log-probabilities.

    rows: The tokens that a model reads of each prompt.
    extend_states: Function (states, node, num_computed) that returns the states of all tokens of a
        node, given those of its first `num_computed` tokens.
    score_rows: Function (states, tokens_BL, indices) that returns the log-probabilities of the
        prompts `indices`, which have one shape. tokens_BL are their tokens after those of the node.
    states: The states of the first `num_computed` tokens of the node; None for none.
    """
    if node.depth > num_computed:
        states = extend_states(states, node, num_computed)
    # Prompts of one shape are rows of one forward pass, without padding.
    by_shape = defaultdict[tuple[int, int], list[int]](list)
    for index in node.leaves:
        shape = (len(rows[index]), len(prompts[index].continuation))
        by_shape[shape].append(index)
    for indices in by_shape.values():
        tokens_BL = np.stack([rows[index][node.depth :] for index in indices])
        yield from zip(indices, score_rows(states, tokens_BL, indices), strict=True)
    for child in node.children:
        yield from scores_along(child, rows, prompts, extend_states, score_rows, states, node.depth)
