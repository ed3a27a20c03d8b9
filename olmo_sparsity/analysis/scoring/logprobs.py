"""Compute the log-probabilities of whole prompts with a model of `transformers`, or of ours.

    scorer = logprobs_of(model, batch_tokens=None)
    scorer.score([Prompt(prefix=[A, B], continuation=[C, D])])   # [array([−2.1, −0.3])]: log p of C
                                                                 # after A B, of D after A B C

Some measurements need no more than this, so that servers and llama.cpp can serve them, too (see
`LogprobModel`). `ModelLogprobs` does it with weights in memory, and computes only once what several
prompts share; `CountingLogprobs` counts what it would compute.

Dimension key: B rows of a batch (prompts of one shape), L tokens of a row, W targets of a row or
block, N items of a list (the targets of all rows), D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.scoring.tensors import to_host
from olmo_sparsity.models.attention import fast_kernels
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.identity.use import in_use
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.prefix_tree import Node, PrefixTree
from olmo_sparsity.models.prompts import LogprobModel, Prompt


def logprobs_of(model: LoadedModel, batch_tokens: int | None) -> LogprobModel:
    """Return an object that computes log-probabilities: the model itself if it is a prompt model,
    or else `ModelLogprobs` with its weights."""
    if model.prompt_model is None:
        return ModelLogprobs(Scorer(model.model, batch_tokens=batch_tokens))
    return model.prompt_model


class ModelLogprobs:
    """Computes log-probabilities with a model of `transformers`, or of ours.

    Prompts are sorted into a tree by their beginnings. The keys and values of a beginning that
    several prompts share are computed once, and not at all if the scorer keeps them from the last
    text. Of the three prompts A B C, A B D and A E, A is computed once, then B once after it:

        A → B → C
              → D
          → E
    """

    shares = True

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    @property
    def token_forwards(self) -> int:
        """Return how many token-forwards the scorer has computed."""
        return self.scorer.token_forwards

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return log p of each prompt's continuation, token by token."""
        if not prompts:
            return []
        distinct_prompts = _without_repeats(prompts)
        with in_use(self.scorer.model), fast_kernels(self.scorer.device):
            known = self.scorer.known_text
            tree = PrefixTree.of(distinct_prompts, None if known is None else known.tokens)

            def extend_states(states: Any, node: Node, num_computed: int) -> DistantStates:
                """Return the states of the beginning that the prompts of a node share."""
                if node.is_known and known is not None:
                    return known.states.first(node.num_tokens)
                return self.scorer.extended(states, node.tokens[num_computed:])

            def score_rows(states: Any, tokens_BL: np.ndarray, indices: list[int]) -> list[Tensor]:
                """Return log p of the continuations of prompts of one shape."""
                targets_BW = np.stack([distinct_prompts[index].continuation for index in indices])
                # A row takes the memory of its whole prompt, whose states it attends to.
                num_tokens = len(tree.inputs[indices[0]])
                return self._log_p_of_rows(states, tokens_BL, targets_BW, num_tokens)

            scores = list(tree.scores(extend_states, score_rows))

        # All are copied at once, so that the host waits for a GPU once.
        log_p_on_host = to_host([log_p for _, log_p in scores])
        log_p_by_key = {}
        for (prompt_index, _), log_p in zip(scores, log_p_on_host, strict=True):
            log_p_by_key[distinct_prompts[prompt_index].key] = log_p.astype(float)
        return [log_p_by_key[prompt.key] for prompt in prompts]

    def _log_p_of_rows(
        self,
        states: DistantStates | None,
        tokens_BL: np.ndarray,
        targets_BW: np.ndarray,
        num_tokens: int,
    ) -> list[Tensor]:
        """Return log p of the targets of each row, on the device.

        Args:
            states: States of the text before all rows; None if there is none.
            tokens_BL: The tokens of each row after that text, without its last target.
            targets_BW: The last tokens of each row.
            num_tokens: The memory that a row takes, as a number of tokens, by which rows are cut
                into batches.
        """

        def log_p_of_batch(batch: Sequence[int]) -> Tensor:
            inputs_BL = tokens_BL[list(batch)]
            batch_targets_BW = targets_BW[list(batch)]
            num_targets = batch_targets_BW.shape[1]
            hidden_BWD = self.scorer.hidden_after(states, inputs_BL, num_targets)
            nll_N = self.scorer.nll_on_device(hidden_BWD.flatten(0, 1), batch_targets_BW.ravel())
            return -nll_N.view(batch_targets_BW.shape)

        batches = self.scorer.in_batches(range(len(targets_BW)), num_tokens, log_p_of_batch)
        return list(chain(*batches))


def _without_repeats(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return each prompt once. Callers may ask for the same prompt several times."""
    return list({prompt.key: prompt for prompt in prompts}.values())


# --- counting -------------------------------------------------------------------------------------


class CountingLogprobs:
    """Counts the token-forwards of prompts, and returns random log-probabilities."""

    def __init__(self, shares: bool, known: np.ndarray | None = None) -> None:
        """Begin to count.

        Args:
            shares: Whether a beginning that several prompts share counts once, as `ModelLogprobs`
                computes it.
            known: A text whose states are kept from the start. Default: none.
        """
        self.shares = shares
        self.known = known
        self.num_prompts = 0
        self.token_forwards = 0 if known is None else len(known)
        self._generator = np.random.default_rng(0)

    def score(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return a random log p for each token of each prompt's continuation."""
        self.num_prompts += len(prompts)
        if self.shares and prompts:
            self.token_forwards += count_forwards(prompts, self.known)
        else:
            self.token_forwards += sum(len(prompt.inputs) for prompt in prompts)
        return [-self._generator.random(len(prompt.continuation)) for prompt in prompts]


def count_forwards(prompts: Sequence[Prompt], known: np.ndarray | None = None) -> int:
    """Return how many token-forwards `ModelLogprobs` computes for these prompts in one call.

    Args:
        prompts: The prompts.
        known: The text whose states the scorer keeps from an earlier call. Default: none.
    """
    return PrefixTree.of(_without_repeats(prompts), known).count_forwards()
