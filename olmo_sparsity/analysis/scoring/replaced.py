"""Losses of whole prompts in which unrelated texts replace distant tokens that a row leaves out.
Nothing is masked and no position is skipped: whatever returns log-probabilities can be measured.

Dimension key: R unrelated texts, F distant places, W targets of a row, B passages, L tokens of a
prompt's continuation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.options import AskSettings, Settings
from olmo_sparsity.analysis.scoring.logprobs import CountingLogprobs, logprobs_of
from olmo_sparsity.analysis.scoring.scorer import Context, Row, Scorer
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.prompts import LogprobModel, Prompt
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import NOTHING, Block, Windows

TOGETHER = 512
"""Tokens whose log-probabilities one prompt returns at most; more take much memory."""

Key = tuple[bytes, int]
"""SHA-1 of a text up to its last target, and the place of its first target."""


@dataclass(frozen=True)
class _Text:
    """A row's text with one of the unrelated texts in it, up to the last target."""

    tokens: np.ndarray
    first: int  # place of the first target

    @cached_property
    def key(self) -> Key:
        return hashlib.sha1(self.tokens.tobytes()).digest(), self.first


def scorer_of(
    model: LoadedModel, settings: Settings | AskSettings, batch_tokens: int | None
) -> Scorer:
    """Return the scorer that the distant states of the settings need."""
    if settings.interpretation.replaces:
        logprobs = logprobs_of(model, batch_tokens)
        return ReplacingScorer(logprobs, model.model, settings.replacements or 1)
    return Scorer(model.model, distant_states=settings.distant_states, batch_tokens=batch_tokens)


class ReplacingScorer(Scorer):
    """Evaluates rows in which distant text is replaced. A loss is the mean over unrelated texts."""

    def __init__(self, logprobs: LogprobModel, model: Any, num_texts: int) -> None:
        self.logprobs = logprobs
        self.model = model
        self.num_texts = num_texts
        self.interpretation = interpretation_of("replaced")
        self.device = torch.device(getattr(model, "device", "cpu"))
        self.token_forwards = 0
        self.after_batch = lambda: None
        self._unrelated: Callable[[Block], np.ndarray] | None = None
        """The unrelated texts of a block, unrelated_RF."""

        self._known: dict[Key, np.ndarray] = {}
        """The losses of texts that were computed for this document: rows often share texts."""

    def of_document(self, document: Document, controls: Controls) -> Self:
        """Draw unrelated texts for this document, and forget what was computed for another."""
        draws = range(self.num_texts)
        self._known = {}
        self._unrelated = lambda block: np.stack(
            [controls.replacement(document, block, draw).tokens_F for draw in draws]
        )
        return self

    def counting(self) -> ReplacingScorer:
        """Return the same scorer with a model that computes nothing, and counts."""
        logprobs = CountingLogprobs(self.logprobs.shares)
        counting = ReplacingScorer(logprobs, None, self.num_texts)
        counting._unrelated = self._unrelated
        return counting

    def context(self, block: Block, states: DistantStates | None = None) -> Context:
        """Return the context of a block, with the unrelated texts that replace its distant tokens.
        It holds no states, as every row is a prompt of its own."""
        assert self._unrelated is not None, "call of_document first"
        return Context(block, unrelated_RF=self._unrelated(block))

    def losses(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return nll_W of each row's targets, in nats."""
        return [nll_RW.mean(0) for nll_RW in self.by_text(rows)]

    def sums(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the sum of each row's losses."""
        return np.array([nll_W.sum() for nll_W in self.losses(rows)])

    def window_losses(
        self, windows: Windows, groups: dict[str, list[Block]]
    ) -> dict[str, np.ndarray]:
        """Return what `Scorer.window_losses` returns. The local window is a prompt, too, in which
        all distant tokens are replaced."""
        blocks = next(iter(groups.values()))
        rows = [self.context(block).set_row(NOTHING) for block in blocks]
        for group in groups.values():
            rows += [self.context(block).long_row() for block in group]
        names = ["loss_short", *(f"{name}loss_long" for name in groups)]
        losses = np.split(np.concatenate(self.losses(rows)), len(names))
        return dict(zip(names, losses, strict=True))

    def by_text(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return nll_RW of each row's targets with each of the unrelated texts."""
        texts = [[_text(row, draw) for draw in range(self.num_texts)] for row in rows]
        unknown: dict[Key, _Text] = {}
        for row_texts in texts:
            for text in row_texts:
                if text.key not in self._known:
                    unknown[text.key] = text
        self._score(unknown)
        return [np.stack([self._known[text.key] for text in row_texts]) for row_texts in texts]

    def _score(self, unknown: dict[Key, _Text]) -> None:
        """Compute the losses of texts, and keep them. A text that begins another one is part of its
        prompt, so that neighbouring targets take one prompt."""
        texts = sorted(unknown.values(), key=lambda text: text.tokens.tobytes(), reverse=True)
        # In this order a text that begins others comes right behind them.
        groups: list[list[_Text]] = []
        for text in texts:
            longest = groups[-1][0].tokens if groups else NOTHING
            begins = longest.tobytes().startswith(text.tokens.tobytes())
            if not begins or len(longest) - text.first > TOGETHER:
                groups.append([])
            groups[-1].append(text)
        prompts = []
        for group in groups:
            longest = group[0].tokens
            first = min(text.first for text in group)
            prompts.append(Prompt(longest[:first], longest[first:]))
        for group, prompt, log_p in zip(groups, prompts, self._log_p(prompts), strict=True):
            begin = len(prompt.prefix)
            for text in group:
                self._known[text.key] = -log_p[text.first - begin : len(text.tokens) - begin]
        self.after_batch()

    def _log_p(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return the log-probabilities of the continuations, and count what the engine computed."""
        before = self.logprobs.token_forwards
        log_p = self.logprobs.score(prompts)
        self.token_forwards += self.logprobs.token_forwards - before
        return log_p

    def repetition(self, passages: Sequence[np.ndarray]) -> np.ndarray:
        """Return loss_B2: the mean loss on each passage and on its repetition, both without the
        first token, which nothing predicts the first time."""
        prompts = [
            Prompt(passage[:1], np.concatenate([passage[1:], passage])) for passage in passages
        ]
        nll_BL = -np.stack(self._log_p(prompts))
        length = len(passages[0])
        # The continuation holds length − 1 tokens of the passage, then all of its repetition.
        return np.stack([nll_BL[:, : length - 1].mean(1), nll_BL[:, length:].mean(1)], 1)


def _text(row: Row, draw: int) -> _Text:
    """Replace the distant tokens of a row that it does not keep, up to its last target."""
    block = row.context.block
    unrelated_RF = row.context.unrelated_RF
    assert unrelated_RF is not None
    assert row.span is not None
    distant_F = unrelated_RF[draw].copy()
    distant_F[row.kept_distant] = block.distant_F[row.kept_distant]
    first, end = row.span
    tokens = block.with_distant(distant_F).tokens[: block.num_before + end].astype(np.int64)
    return _Text(tokens, block.num_before + first)
