"""The interface of models that return log-probabilities of whole prompts, which is all that a
verdict needs; and the order in which prompts share the states of their beginnings."""

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
    """Token IDs of a text, and of the continuation whose log-probabilities are asked for. Positions
    count from 0, without gaps."""

    prefix: np.ndarray
    """All tokens before the continuation, at least one."""

    continuation: np.ndarray

    @cached_property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the prompt as a key of a dictionary, which arrays cannot be: equal for equal
        prompts."""
        return tuple(self.prefix.tolist()), tuple(self.continuation.tolist())

    @property
    def inputs(self) -> np.ndarray:
        """Return the tokens to feed to a model: all but the last, which predicts nothing that is
        asked for."""
        return np.concatenate([self.prefix, self.continuation[:-1]])


class LogprobModel(Protocol):
    """Returns log-probabilities of whole prompts: a `PromptModel`, or `ModelLogprobs` with the
    states of a model in memory."""

    @property
    def shares(self) -> bool:
        """Return whether prompts that are given together share the states of their beginnings."""

    @property
    def token_forwards(self) -> int:
        """Return how many tokens forward passes have computed since this object was made."""

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return log p, in nats, of each token of each prompt's continuation, given all tokens
        before it. Prompts that are given together may share what they have in common."""


class PromptModel(ABC):
    """A `LogprobModel` without states that could be read: a server, llama.cpp, a recurrent model of
    transformers."""

    token_forwards = 0
    shares = False

    @property
    @abstractmethod
    def device(self) -> torch.device: ...
    @property
    @abstractmethod
    def dtype_name(self) -> str: ...
    @property
    @abstractmethod
    def vocab_size(self) -> int: ...
    @abstractmethod
    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]: ...
    @abstractmethod
    def generate(self, ids: list[int], max_new_tokens: int) -> list[int]:
        """Return the tokens that follow, chosen greedily."""

    def recognize_in(self, folder: Path) -> None:  # noqa: B027 (files have a fingerprint)
        """Raise if the results in this folder are of a model that is no longer there."""


if not TYPE_CHECKING:  # else mypy accepts any name of this module
    __getattr__ = getattr_with_old_names(__name__, {"Engine": "PromptModel"})


LEAST_SHARED = 16
"""A child node is made only if its prompts share at least this many more tokens than those of its
parent: a forward pass of fewer tokens saves no time."""


@dataclass(frozen=True)
class Node:
    """A beginning that several prompts share, of `depth` tokens. Nodes form a tree: a child's
    prompts share more tokens."""

    indices: list[int]
    """All texts that begin with these tokens, also those of children."""

    depth: int
    is_known: bool
    """Another text begins with these tokens, too, and their states are kept."""

    leaves: list[int]
    """Prompts whose other tokens are computed separately."""

    children: list[Node]


def _prefix_tree(
    rows: Sequence[np.ndarray],
    most_shared: Sequence[int],
    known_index: int,
    sorted_indices: list[int],
) -> Node:
    """Return the node of the longest beginning that some texts share, and the nodes below it.

    rows: Tokens of all prompts, and last, at `known_index`, of the text whose states are kept.
    most_shared: How many tokens of each text may be shared.
    sorted_indices: Numbers of these texts, in the order of their tokens.
    """
    limit = min(most_shared[index] for index in sorted_indices)
    # Sorted texts share what the first and the last of them share.
    first = rows[sorted_indices[0]][:limit]
    last = rows[sorted_indices[-1]][:limit]
    differing = np.flatnonzero(first != last)
    if len(differing):
        depth = int(differing[0])
        by_next_token = groupby(sorted_indices, lambda index: rows[index][depth])
        parts = [list(part) for _, part in by_next_token]
    else:
        depth = limit
        # The shortest text ends here. The others share no more, which is rare and costs only time.
        parts = [sorted_indices]
    leaves = list[int]()
    children = list[Node]()
    for part in parts:
        child = None
        if 1 < len(part) < len(sorted_indices):
            child = _prefix_tree(rows, most_shared, known_index, part)
        if child is not None and child.depth - depth >= LEAST_SHARED:
            children.append(child)
        else:
            leaves += [index for index in part if index != known_index]
    return Node(sorted_indices, depth, known_index in sorted_indices, leaves, children)


def plan_shared_prefixes(
    prompts: Sequence[Prompt], known: np.ndarray | None = None
) -> tuple[Node, list[np.ndarray]]:
    """Return the tree of different prompts, and the tokens of each. `known`: a text whose states
    are kept."""
    rows = [prompt.inputs for prompt in prompts]
    # Not the last token of a prefix: its state predicts the first token of the continuation, so it
    # is computed with the tokens that are not shared.
    most_shared = [len(prompt.prefix) - 1 for prompt in prompts]
    if known is not None:
        rows.append(known)
        most_shared.append(len(known))
    order = sorted(range(len(rows)), key=lambda index: rows[index].tolist())
    return _prefix_tree(rows, most_shared, len(prompts), order), rows


def scores_along(
    node: Node,
    rows: Sequence[np.ndarray],
    prompts: Sequence[Prompt],
    extend_states: Callable[[Any, Node, int], Any],
    score_rows: Callable[[Any, np.ndarray, list[int]], Iterable[Any]],
    states: Any = None,
    num_computed: int = 0,
) -> Iterator[tuple[int, Any]]:
    """Yield the number of each prompt below a node, and its log-probabilities.

    extend_states: Returns the states of a node, from those of its first `num_computed` tokens.
    score_rows: Returns log-probabilities of prompts of one shape, whose other tokens are rows of
        an array.
    """
    if node.depth > num_computed:
        states = extend_states(states, node, num_computed)
    # Prompts of one shape are rows of one forward, without padding.
    by_shape = defaultdict[tuple[int, int], list[int]](list)
    for index in node.leaves:
        shape = (len(rows[index]), len(prompts[index].continuation))
        by_shape[shape].append(index)
    for indices in by_shape.values():
        tokens_BL = np.stack([rows[index][node.depth :] for index in indices])
        yield from zip(indices, score_rows(states, tokens_BL, indices), strict=True)
    for child in node.children:
        yield from scores_along(child, rows, prompts, extend_states, score_rows, states, node.depth)
