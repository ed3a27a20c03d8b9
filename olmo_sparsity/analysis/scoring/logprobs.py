"""Return the log-probabilities of whole prompts from a model of `transformers`, or of ours.

Dimension key: L tokens of a prompt without its last one, W tokens of a continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.analysis.scoring.scorer import Scorer, to_host
from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.models.attention import fast_kernels
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.prompts import (
    LogprobModel,
    Node,
    Prompt,
    plan_shared_prefixes,
    scores_along,
)
from olmo_sparsity.models.use import in_use


def count_forwards(prompts: Sequence[Prompt], known: np.ndarray | None = None) -> int:
    """Return how many token-forwards `ModelLogprobs` computes for prompts given together. `known`:
    a text of which the scorer keeps the states."""

    def count(node: Node, above: int) -> int:
        shared = 0 if node.is_known else node.depth - above
        ends = sum(len(rows[index]) - node.depth for index in node.leaves)
        return shared + ends + sum(count(child, node.depth) for child in node.children)

    root, rows = plan_shared_prefixes(_different(prompts), known)
    return count(root, 0)


class CountingLogprobs:
    """Counts what `ModelLogprobs` computes, or a prompt model that shares nothing. Its
    log-probabilities are random. `known`: as in `count_forwards`."""

    def __init__(self, shares: bool, known: np.ndarray | None = None) -> None:
        self.shares = shares
        self.known = known
        self.num_prompts = 0
        self.token_forwards = 0 if known is None else len(known)
        self._generator = np.random.default_rng(0)

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        self.num_prompts += len(prompts)
        if self.shares and prompts:
            self.token_forwards += count_forwards(prompts, self.known)
        else:
            self.token_forwards += sum(len(prompt.inputs) for prompt in prompts)
        return [-self._generator.random(len(prompt.continuation)) for prompt in prompts]


def logprobs_of(model: LoadedModel, batch_tokens: int | None) -> LogprobModel:
    """Return what computes log-probabilities: the model itself if it is a prompt model, or
    `ModelLogprobs` with its weights."""
    if model.prompt_model is None:
        return ModelLogprobs(Scorer(model.model, batch_tokens=batch_tokens))
    if batch_tokens is not None:
        raise ConfigError(
            f"batch_tokens={batch_tokens}: '{model.name}' forms batches by itself; "
            "omit batch_tokens"
        )
    return model.prompt_model


def _different(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return each prompt once, as several questions may ask for the same one."""
    return list({prompt.key: prompt for prompt in prompts}.values())


class ModelLogprobs:
    """A model of `transformers`, or of ours. Prompts are ordered as a tree: the keys and values of
    a beginning that several of them share are computed once, and not at all if the scorer still has
    them of the last text."""

    shares = True

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    @property
    def token_forwards(self) -> int:
        return self.scorer.token_forwards

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return log p of each prompt's continuation, token by token."""
        if not prompts:
            return []
        different = _different(prompts)
        with in_use(self.scorer.model), fast_kernels(self.scorer.device):
            known_tokens, known_states = self.scorer.last_text
            root, rows = plan_shared_prefixes(different, known_tokens)

            def extend_states(states: Any, node: Node, num_computed: int) -> DistantStates:
                if node.is_known and known_states is not None:
                    return known_states.first(node.depth)
                return self.scorer.extended(
                    states, rows[node.indices[0]][num_computed : node.depth]
                )

            def score_rows(states: Any, tokens_BL: np.ndarray, indices: list[int]) -> list[Tensor]:
                targets_BW = np.stack([different[index].continuation for index in indices])

                def log_p(batch: Sequence[int]) -> Tensor:
                    batch_targets_BW = targets_BW[list(batch)]
                    num_targets = batch_targets_BW.shape[1]
                    inputs_BL = tokens_BL[list(batch)]
                    hidden_BWD = self.scorer.hidden_after(states, inputs_BL, num_targets)
                    nll_N = self.scorer.nll_of(hidden_BWD.flatten(0, 1), batch_targets_BW.ravel())
                    return -nll_N.view(batch_targets_BW.shape)

                num_tokens = len(rows[indices[0]])
                batches = self.scorer.in_batches(range(len(indices)), num_tokens, log_p)
                return list(chain(*batches))  # log p of each prompt's continuation

            pairs = list(scores_along(root, rows, different, extend_states, score_rows))
        # All are copied at once, so that the host waits for a GPU once.
        log_p_of_prompts = to_host([log_p for _, log_p in pairs])
        by_key = {}
        for (index, _), log_p in zip(pairs, log_p_of_prompts, strict=True):
            by_key[different[index].key] = log_p.astype(float)
        return [by_key[prompt.key] for prompt in prompts]
