"""Return the log-probabilities of whole prompts from a model of `transformers`, or of ours.

Dimension key: L tokens of a prompt without its last one, W tokens of a continuation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from olmo_sparsity.analysis.kernels.attention import fast_kernels
from olmo_sparsity.analysis.kernels.engine import LogprobModel, Prompt
from olmo_sparsity.analysis.kernels.far_states import FarStates
from olmo_sparsity.analysis.models.load import LoadedModel
from olmo_sparsity.analysis.models.use import in_use
from olmo_sparsity.analysis.scoring.scorer import Scorer, to_host
from olmo_sparsity.errors import ConfigError

LEAST_SHARED = 16
"""Prompts share the states of a beginning if it has at least so many more tokens; a forward of
fewer tokens takes about as long as one of so many."""


@dataclass(frozen=True)
class _Node:
    """Prompts that begin with the same `depth` tokens."""

    indices: list[int]
    depth: int
    is_known: bool
    """Another text begins with these tokens, too, and their states are kept."""

    leaves: list[int]
    """Texts whose other tokens are computed separately."""

    children: list[_Node]


def _tree(rows: Sequence[np.ndarray], ends: Sequence[int], num: int, indices: list[int]) -> _Node:
    """`rows`: tokens of `num` prompts, and of the text that is known; `ends`: how many of them may
    be shared; `indices`: rows in the order of their tokens."""
    limit = min(ends[index] for index in indices)
    first, last = rows[indices[0]][:limit], rows[indices[-1]][:limit]
    differ = np.flatnonzero(first != last)
    depth = int(differ[0]) if len(differ) else limit
    leaves, children = list[int](), list[_Node]()
    parts = [indices]
    if len(differ):
        parts = [list(part) for _, part in groupby(indices, lambda index: rows[index][depth])]
    for part in parts:
        child = _tree(rows, ends, num, part) if 1 < len(part) < len(indices) else None
        if child is not None and child.depth - depth >= LEAST_SHARED:
            children.append(child)
        else:
            leaves += [index for index in part if index < num]
    return _Node(indices, depth, num in indices, leaves, children)


def _plan(prompts: Sequence[Prompt], known: np.ndarray | None) -> tuple[_Node, list[np.ndarray]]:
    """The tree of prompts, and the tokens of each."""
    rows, ends = [prompt.inputs for prompt in prompts], [len(p.prefix) - 1 for p in prompts]
    if known is not None:
        rows, ends = [*rows, known], [*ends, len(known)]
    order = sorted(range(len(rows)), key=lambda index: rows[index].tolist())
    return _tree(rows, ends, len(prompts), order), rows


def count_forwards(prompts: Sequence[Prompt], known: np.ndarray | None = None) -> int:
    """Return how many token-forwards `ModelLogprobs` computes for prompts given together. `known`:
    a text of which the scorer keeps the states."""

    def count(node: _Node, above: int) -> int:
        own = 0 if node.is_known else node.depth - above
        own += sum(len(rows[index]) - node.depth for index in node.leaves)
        return own + sum(count(child, node.depth) for child in node.children)

    root, rows = _plan(_different(prompts), known)
    return count(root, 0)


class CountingEngine:
    """Counts what `ModelLogprobs` computes, or an engine that shares nothing. Its log-probabilities
    are random. `known`: as in `count_forwards`."""

    def __init__(self, shares: bool, known: np.ndarray | None = None) -> None:
        self.shares, self.known = shares, known
        self.num_prompts, self.token_forwards = 0, 0 if known is None else len(known)
        self._generator = np.random.default_rng(0)

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        self.num_prompts += len(prompts)
        if self.shares and prompts:
            self.token_forwards += count_forwards(prompts, self.known)
        else:
            self.token_forwards += sum(len(prompt.inputs) for prompt in prompts)
        return [-self._generator.random(len(prompt.continuation)) for prompt in prompts]


def logprobs_of(model: LoadedModel, batch_tokens: int | None) -> LogprobModel:
    """The engine that a model is, or one of its states."""
    if model.engine is None:
        return ModelLogprobs(Scorer(model.model, batch_tokens=batch_tokens))
    if batch_tokens is not None:
        raise ConfigError(f"batch_tokens={batch_tokens}: '{model.name}' has its own")
    return model.engine


def _different(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list({prompt.key: prompt for prompt in prompts}.values())


class ModelLogprobs:
    """A model of `transformers`, or of ours. Prompts are ordered as a tree: the keys and values of
    a beginning that several of them share are computed once, and not at all if the scorer still has
    them of the last text."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    @property
    def token_forwards(self) -> int:
        return self.scorer.token_forwards

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        if not prompts:
            return []
        different = _different(prompts)
        with in_use(self.scorer.model), fast_kernels(self.scorer.device):
            tokens, known = self.scorer.kept
            root, rows = _plan(different, tokens)
            pairs = list(self._descend(root, None, known, different, rows))
        found = to_host([log_p for _, log_p in pairs])
        of_key = {
            different[index].key: log_p.astype(float)
            for (index, _), log_p in zip(pairs, found, strict=True)
        }
        return [of_key[prompt.key] for prompt in prompts]

    def _descend(
        self,
        node: _Node,
        states: FarStates | None,
        known: FarStates | None,
        prompts: Sequence[Prompt],
        rows: Sequence[np.ndarray],
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """`states`: of a beginning that all prompts of the node share; `known`: of a whole text."""
        before = 0 if states is None else states.num_places
        if node.depth > before and node.is_known and known is not None:
            states = known.first(node.depth)
        elif node.depth > before:
            states = self.scorer.extended(states, rows[node.indices[0]][before : node.depth])
        shapes = defaultdict[tuple[int, int], list[int]](list)
        for index in node.leaves:
            shapes[len(rows[index]), len(prompts[index].continuation)].append(index)
        for (length, num_targets), indices in shapes.items():

            def log_p(batch: Sequence[int], num: int = num_targets) -> torch.Tensor:
                tokens_BL = np.stack([rows[index][node.depth :] for index in batch])
                hidden_BWD = self.scorer.hidden_after(states, tokens_BL, num)
                targets_BW = np.stack([prompts[index].continuation for index in batch])
                nll_N = self.scorer.nll_of(hidden_BWD.flatten(0, 1), targets_BW.ravel())
                return -nll_N.view(targets_BW.shape)

            batches = self.scorer.in_batches(indices, length, log_p)
            rows_W = [row_W for batch_BW in batches for row_W in batch_BW]
            yield from zip(indices, rows_W, strict=True)
        for child in node.children:
            yield from self._descend(child, states, known, prompts, rows)
