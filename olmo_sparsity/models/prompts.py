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
    """Token IDs. Positions count from 0, without gaps."""

    prefix: np.ndarray
    """All tokens before the continuation, at least one."""

    continuation: np.ndarray

    @cached_property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Equal for equal prompts."""
        return tuple(self.prefix.tolist()), tuple(self.continuation.tolist())

    @property
    def inputs(self) -> np.ndarray:
        """All tokens that predict one of the continuation, or precede one that does."""
        return np.concatenate([self.prefix, self.continuation[:-1]])


class LogprobModel(Protocol):
    @property
    def shares(self) -> bool:
        """Whether prompts that are given together share the states of their beginnings."""

    @property
    def token_forwards(self) -> int:
        """Tokens that forward passes have computed since this object was made."""

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
"""Prompts share the states of a beginning if it has at least so many more tokens; a forward of
fewer tokens takes about as long as one of so many."""


@dataclass(frozen=True)
class Node:
    """Prompts that begin with the same `depth` tokens."""

    indices: list[int]
    depth: int
    is_known: bool
    """Another text begins with these tokens, too, and their states are kept."""

    leaves: list[int]
    """Texts whose other tokens are computed separately."""

    children: list[Node]


def _tree(rows: Sequence[np.ndarray], ends: Sequence[int], num: int, indices: list[int]) -> Node:
    """`rows`: tokens of `num` prompts, and of the text that is known; `ends`: how many of them may
    be shared; `indices`: rows in the order of their tokens."""
    limit = min(ends[index] for index in indices)
    first, last = rows[indices[0]][:limit], rows[indices[-1]][:limit]
    differ = np.flatnonzero(first != last)
    depth = int(differ[0]) if len(differ) else limit
    leaves, children = list[int](), list[Node]()
    parts = [indices]
    if len(differ):
        parts = [list(part) for _, part in groupby(indices, lambda index: rows[index][depth])]
    for part in parts:
        child = _tree(rows, ends, num, part) if 1 < len(part) < len(indices) else None
        if child is not None and child.depth - depth >= LEAST_SHARED:
            children.append(child)
        else:
            leaves += [index for index in part if index < num]
    return Node(indices, depth, num in indices, leaves, children)


def plan(
    prompts: Sequence[Prompt], known: np.ndarray | None = None
) -> tuple[Node, list[np.ndarray]]:
    """The tree of different prompts, and the tokens of each. `known`: a text whose states are
    kept."""
    rows, ends = [prompt.inputs for prompt in prompts], [len(p.prefix) - 1 for p in prompts]
    if known is not None:
        rows, ends = [*rows, known], [*ends, len(known)]
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
    shapes = defaultdict[tuple[int, int], list[int]](list)
    for index in node.leaves:
        shapes[len(rows[index]), len(prompts[index].continuation)].append(index)
    for indices in shapes.values():
        tokens_BL = np.stack([rows[index][node.depth :] for index in indices])
        yield from zip(indices, scored(states, tokens_BL, indices), strict=True)
    for child in node.children:
        yield from scores_along(child, rows, prompts, extended, scored, states, node.depth)
