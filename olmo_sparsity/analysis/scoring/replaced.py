"""Losses of whole prompts in which unrelated texts replace distant tokens that a row leaves out.
Nothing is masked and no position is skipped: whatever returns log-probabilities can be measured.

Dimension key: R unrelated texts, F far places, W targets of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch

from olmo_sparsity.analysis.options import AskSettings, Settings
from olmo_sparsity.analysis.scoring.logprobs import CountingEngine, logprobs_of
from olmo_sparsity.analysis.scoring.scorer import Context, Row, Scorer
from olmo_sparsity.models.distant_states import FarStates
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.prompts import LogprobModel, Prompt
from olmo_sparsity.text.documents import Controls, Document
from olmo_sparsity.text.windows import NOTHING, Block

TOGETHER = 512  # tokens whose log-probabilities one prompt returns at most; more take much memory
Key = tuple[bytes, int]  # SHA-1 of a text up to its last target, and the place of its first


def scorer_of(
    model: LoadedModel, settings: Settings | AskSettings, batch_tokens: int | None
) -> Scorer:
    if settings.far_states == "replaced":
        engine = logprobs_of(model, batch_tokens)
        return ReplacingScorer(engine, model.model, settings.replacements or 1)
    return Scorer(model.model, far_states=settings.far_states, batch_tokens=batch_tokens)


class ReplacingScorer(Scorer):
    """Evaluates rows in which distant text is replaced. A loss is the mean over unrelated texts."""

    def __init__(self, engine: LogprobModel, model: Any, num_texts: int) -> None:
        self.engine, self.model, self.num_texts = engine, model, num_texts
        self.far_states, self.device = "replaced", torch.device(getattr(model, "device", "cpu"))
        self.token_forwards, self.after_batch = 0, lambda: None
        self._others: Callable[[Block], np.ndarray] | None = None
        self._known: dict[Key, np.ndarray] = {}

    def of_document(self, document: Document, controls: Controls) -> Self:
        """Draw unrelated texts for this document, and forget what was computed for another."""
        draws = range(self.num_texts)
        self._known = {}
        self._others = lambda block: np.stack(
            [controls.replacement(document, block, draw).tokens_F for draw in draws]
        )
        return self

    def counting(self) -> ReplacingScorer:
        """The same with an engine that computes nothing, and counts."""
        engine = CountingEngine(self.engine.shares)
        found = ReplacingScorer(engine, None, self.num_texts)
        found._others = self._others
        return found

    def context(self, block: Block, states: FarStates | None = None) -> Context:
        assert self._others is not None, "call of_document first"
        return Context(block, others_RF=self._others(block))

    def losses(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """nll_W of each row's targets, in nats."""
        return [nll_RW.mean(0) for nll_RW in self.by_text(rows)]

    def sums(self, rows: Sequence[Row]) -> np.ndarray:
        return np.array([nll_W.sum() for nll_W in self.losses(rows)])

    def by_text(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """nll_RW of each row's targets with each of the unrelated texts."""
        texts = [[_text(row, draw) for draw in range(self.num_texts)] for row in rows]
        new = {key: one for of_row in texts for key, one in of_row if key not in self._known}
        self._score(new)
        return [np.stack([self._known[key] for key, _ in of_row]) for of_row in texts]

    def _score(self, new: Mapping[Key, tuple[np.ndarray, int]]) -> None:
        """A text that begins another one is part of its prompt."""
        groups = list[list[Key]]()
        for key in sorted(new, key=lambda key: new[key][0].tobytes(), reverse=True):
            tokens, first = new[key]
            longest = new[groups[-1][0]][0] if groups else NOTHING
            begins = longest.tobytes().startswith(tokens.tobytes())
            if not begins or len(longest) - first > TOGETHER:
                groups.append([])
            groups[-1].append(key)
        prompts = []
        for group in groups:
            tokens, first = new[group[0]][0], min(new[key][1] for key in group)
            prompts.append(Prompt(tokens[:first], tokens[first:]))
        for group, prompt, log_p in zip(groups, prompts, self._log_p(prompts), strict=True):
            for key in group:
                (tokens, first), begin = new[key], len(prompt.prefix)
                self._known[key] = -log_p[first - begin : len(tokens) - begin]
        self.after_batch()

    def _log_p(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        before, log_p = self.engine.token_forwards, self.engine.score(prompts)
        self.token_forwards += self.engine.token_forwards - before
        return log_p

    def repetition(self, passages: Sequence[np.ndarray]) -> np.ndarray:
        """loss_B2: mean losses of each passage, and of its repetition, without the first token."""
        prompts = [Prompt(one[:1], np.concatenate([one[1:], one])) for one in passages]
        nll_BL, length = -np.stack(self._log_p(prompts)), len(passages[0])
        return np.stack([nll_BL[:, : length - 1].mean(1), nll_BL[:, length:].mean(1)], 1)


def _text(row: Row, draw: int) -> tuple[Key, tuple[np.ndarray, int]]:
    """The text of a row up to its last target, the place of its first target, and their key."""
    block, others_RF = row.context.block, row.context.others_RF
    assert others_RF is not None
    assert row.wanted is not None
    far_F = others_RF[draw].copy()
    far_F[row.seen] = block.far_F[row.seen]
    first, end = (block.num_before + place for place in row.wanted)
    tokens = block.with_far(far_F).tokens[:end].astype(np.int64)
    return (hashlib.sha1(tokens.tobytes()).digest(), first), (tokens, first)
