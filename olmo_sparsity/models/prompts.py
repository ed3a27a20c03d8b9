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
        """Return a value that is equal for equal prompts."""
        return tuple(self.prefix.tolist()), tuple(self.continuation.tolist())

    @property
    def inputs(self) -> np.ndarray:
        """Return all tokens that predict one of the continuation, or precede one that does."""
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
"""Prompts share the states of a beginning if it has at least so many more tokens than what they
share already; a forward of fewer tokens takes about as long as one of so many."""


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


def _tree(rows: Sequence[np.ndarray], ends: Sequence[int], num: int, indices: list[int]) -> Node:
    """Return the node of the longest beginning that some texts share. `rows`: tokens of `num`
    prompts, and last those of the text that is known; `ends`: how many of each may be shared;
    `indices`: numbers of the texts, in the order of their tokens."""
    limit = min(ends[index] for index in indices)
    # Sorted texts share what the first and the last of them share.
    first = rows[indices[0]][:limit]
    last = rows[indices[-1]][:limit]
    differing = np.flatnonzero(first != last)
    if len(differing):
        depth = int(differing[0])
        by_next_token = groupby(indices, lambda index: rows[index][depth])
        parts = [list(part) for _, part in by_next_token]
    else:
        depth = limit
        parts = [indices]
    leaves = list[int]()
    children = list[Node]()
    for part in parts:
        child = None
        if 1 < len(part) < len(indices):
            child = _tree(rows, ends, num, part)
        if child is not None and child.depth - depth >= LEAST_SHARED:
            children.append(child)
        else:
            leaves += [index for index in part if index < num]
    return Node(indices, depth, num in indices, leaves, children)


def plan(
    prompts: Sequence[Prompt], known: np.ndarray | None = None
) -> tuple[Node, list[np.ndarray]]:
    """Return the tree of different prompts, and the tokens of each. `known`: a text whose states
    are kept."""
    rows = [prompt.inputs for prompt in prompts]
    # Not the last token of a prefix: its state predicts the first token of the continuation, so it
    # is computed with the tokens that are not shared.
    ends = [len(prompt.prefix) - 1 for prompt in prompts]
    if known is not None:
        rows.append(known)
        ends.append(len(known))
    order = sorted(range(len(rows)), key=lambda index: rows[index].tolist())
    return _tree(rows, ends, len(prompts), order), rows


def scores_along(
    node: Node,
    rows: Sequence[np.ndarray],
    prompts: Sequence[Prompt],
    extended: Callable[[Any, Node, int], Any],
    scored: Callable[[Any, np.ndarray, list[int]], Iterable[Any]],
    states: Any = None,
    before: int = 0,
) -> Iterator[tuple[int, Any]]:
    """Yield the number of each prompt below a node, and its log-probabilities. `extended`: states
    of the node, from those of its first `before` tokens; `scored`: log-probabilities of prompts
    of one shape, whose other tokens are rows of an array."""
    if node.depth > before:
        states = extended(states, node, before)
    # Prompts of one shape are rows of one forward, without padding.
    by_shape = defaultdict[tuple[int, int], list[int]](list)
    for index in node.leaves:
        shape = (len(rows[index]), len(prompts[index].continuation))
        by_shape[shape].append(index)
    for indices in by_shape.values():
        tokens_BL = np.stack([rows[index][node.depth :] for index in indices])
        yield from zip(indices, scored(states, tokens_BL, indices), strict=True)
    for child in node.children:
        yield from scores_along(child, rows, prompts, extended, scored, states, node.depth)
