"""Compute losses where unrelated text replaces the distant tokens that a row leaves out.

A row is then a whole prompt: nothing is masked and no position is skipped. So any model can be
measured that returns log-probabilities, such as one on a server, in llama.cpp, or a recurrent one.
A loss is the mean over several unrelated texts. With two of them, u and v, the row that keeps the
distant token d2 takes two prompts:

    u0 u1 d2 u3 | local window | target      loss 3.0
    v0 v1 d2 v3 | local window | target      loss 3.4     the loss of the row is 3.2 nats

`scorer_of` chooses between this scorer and `Scorer` by the option `distant_states`. A call of
`ReplacingScorer.losses` goes these steps:

    rows → texts, one for each row and unrelated text → those whose losses are not known yet
         → groups of texts that one prompt serves → log-probabilities of the prompts → losses

Dimension key: X unrelated texts, F distant tokens, W targets of a row or block, T targets, B rows
of a batch (passages), L tokens of a row, N items of a list (the targets of all rows).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.options import ExplainSettings, Settings
from olmo_sparsity.analysis.scoring.logprobs import CountingLogprobs, logprobs_of
from olmo_sparsity.analysis.scoring.rows import Context, Row
from olmo_sparsity.analysis.scoring.scorer import Scorer, WindowLosses
from olmo_sparsity.models.distant_states import DistantStates
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.prompts import LogprobModel, Prompt
from olmo_sparsity.text.controls import Controls
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import NO_INDICES
from olmo_sparsity.text.windows import Block, Windows

MAX_CONTINUATION = 512
"""The largest number of tokens whose log-probabilities one prompt returns; more take much
memory."""


class _Key(NamedTuple):
    """Identifies the losses of a `_Text`: texts with equal keys have equal losses."""

    digest: bytes
    """SHA-1 of the text up to its last target."""

    first: int
    """Place of its first target."""


@dataclass(frozen=True)
class _Text:
    """The text of a row with one of the unrelated texts in it, up to the last target."""

    tokens: np.ndarray
    first: int
    """Place of the first target."""

    @cached_property
    def key(self) -> _Key:
        """Return the key under which the losses of this text are kept."""
        return _Key(hashlib.sha1(self.tokens.tobytes()).digest(), self.first)


def scorer_of(
    model: LoadedModel, settings: Settings | ExplainSettings, batch_tokens: int | None
) -> Scorer:
    """Return the scorer that suits the option `distant_states` of the settings."""
    if settings.interpretation.replaces:
        logprobs = logprobs_of(model, batch_tokens)
        return ReplacingScorer(logprobs, model.model, settings.replacements or 1)
    return Scorer(model.model, distant_states=settings.distant_states, batch_tokens=batch_tokens)


class ReplacingScorer(Scorer):
    """Evaluates rows in which distant text is replaced. A loss is the mean over `num_texts`
    unrelated texts."""

    def __init__(self, logprobs: LogprobModel, model: Any, num_texts: int) -> None:
        self.logprobs = logprobs
        self.model = model
        self.num_texts = num_texts
        self.interpretation = interpretation_of("replaced")
        self.device = torch.device(getattr(model, "device", "cpu"))
        self.token_forwards = 0
        self.after_batch = lambda: None
        self._draw_unrelated: Callable[[Block], np.ndarray] | None = None
        """Returns the unrelated texts of a block, unrelated_XF. None before `of_document`."""

        self._known_losses: dict[_Key, np.ndarray] = {}
        """The losses of texts that were computed for this document, as rows often share texts."""

    def of_document(self, document: Document, controls: Controls) -> Self:
        """Take the unrelated texts for this document from `controls`, and forget the losses of the
        last document. Return this scorer."""
        draws = range(self.num_texts)
        self._known_losses = {}
        self._draw_unrelated = lambda block: np.stack(
            [controls.replacement(document, block, draw).tokens_F for draw in draws]
        )
        return self

    def counting_scorer(self) -> ReplacingScorer:
        """Return a scorer for the same unrelated texts that counts token-forwards and computes
        nothing."""
        logprobs = CountingLogprobs(self.logprobs.shares)
        counting = ReplacingScorer(logprobs, None, self.num_texts)
        counting._draw_unrelated = self._draw_unrelated
        return counting

    def context(self, block: Block, states: DistantStates | None = None) -> Context:
        """Return the context of a block, with the unrelated texts that replace its distant tokens.
        It holds no states, as every row is a prompt of its own."""
        assert self._draw_unrelated is not None, "call of_document first"
        return Context(block, unrelated_XF=self._draw_unrelated(block))

    def losses(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return nll_W of each row's targets, in nats."""
        return [nll_XW.mean(0) for nll_XW in self.losses_by_text(rows)]

    def sums(self, rows: Sequence[Row]) -> np.ndarray:
        """Return the sum of each row's losses."""
        return np.array([nll_W.sum() for nll_W in self.losses(rows)])

    def window_losses(
        self, windows: Windows, blocks: list[Block], placebo_blocks: list[Block] | None = None
    ) -> WindowLosses:
        """Return the losses of all targets of a document; see `Scorer.window_losses`. For the loss
        with the local window, all distant tokens of a prompt are replaced."""
        rows_by_kind = [
            [self.context(block).set_row(NO_INDICES) for block in blocks],
            [self.context(block).long_row() for block in blocks],
        ]
        if placebo_blocks is not None:
            rows_by_kind.append([self.context(block).long_row() for block in placebo_blocks])
        # Rows of all kinds are scored together, so that those with one text share prompts. All
        # kinds have the same targets, so their losses are of one length.
        losses_N = np.concatenate(self.losses(list(chain(*rows_by_kind))))
        short_T, long_T, *placebo_long = np.split(losses_N, len(rows_by_kind))
        return WindowLosses(short_T, long_T, placebo_long[0] if placebo_long else None)

    def losses_by_text(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return nll_XW for each row: the losses of its targets with each of the unrelated
        texts."""
        texts_of_rows = [
            [_text_of_row(row, draw) for draw in range(self.num_texts)] for row in rows
        ]
        unknown_texts: dict[_Key, _Text] = {}
        for text in chain(*texts_of_rows):
            if text.key not in self._known_losses:
                unknown_texts[text.key] = text
        self._score(list(unknown_texts.values()))
        return [
            np.stack([self._known_losses[text.key] for text in texts]) for texts in texts_of_rows
        ]

    def _score(self, texts: list[_Text]) -> None:
        """Compute the losses of different texts, and keep them under their keys."""
        groups = _group_by_prompt(texts)
        prompts = []
        for group in groups:
            longest = group[0].tokens  # of which the other texts are beginnings
            first = min(text.first for text in group)
            prompts.append(Prompt(longest[:first], longest[first:]))
        for group, prompt, log_p in zip(groups, prompts, self._log_p(prompts), strict=True):
            # log_p has a number for each place from this one on.
            first_scored = len(prompt.prefix)
            for text in group:
                end = len(text.tokens)
                self._known_losses[text.key] = -log_p[
                    text.first - first_scored : end - first_scored
                ]
        self.after_batch()

    def _log_p(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return the log-probabilities of the continuations, and count their token-forwards."""
        forwards_before = self.logprobs.token_forwards
        log_p = self.logprobs.score(prompts)
        self.token_forwards += self.logprobs.token_forwards - forwards_before
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


def _group_by_prompt(texts: list[_Text]) -> list[list[_Text]]:
    """Group texts that one prompt can serve: each is a beginning of the first of its group. So
    neighbouring targets of a block take one prompt: the texts A B, A B C and D make the groups
    [D] and [A B C, A B]."""
    # In this order a text comes directly after those that it begins. All tokens take 8 bytes, so a
    # text's bytes begin another's only if its tokens do.
    sorted_texts = sorted(texts, key=lambda text: text.tokens.tobytes(), reverse=True)
    groups: list[list[_Text]] = []
    for text in sorted_texts:
        longest = groups[-1][0].tokens if groups else NO_INDICES
        is_beginning = longest.tobytes().startswith(text.tokens.tobytes())
        num_scored = len(longest) - text.first
        if not is_beginning or num_scored > MAX_CONTINUATION:
            groups.append([])
        groups[-1].append(text)
    return groups


def _text_of_row(row: Row, draw: int) -> _Text:
    """Return the text of a row up to its last target, in which the unrelated text `draw` replaces
    the distant tokens that the row does not keep."""
    block = row.context.block
    unrelated_XF = row.context.unrelated_XF
    assert unrelated_XF is not None, "the context must be of a ReplacingScorer"
    assert row.span is not None, "`Context.set_row` sets it for such a context"
    distant_F = unrelated_XF[draw].copy()
    distant_F[row.kept_distant] = block.distant_F[row.kept_distant]
    first, end = row.span
    tokens = block.with_distant(distant_F).tokens[: block.num_before + end].astype(np.int64)
    return _Text(tokens, block.num_before + first)
