"""Lay out a prompt with its answer: where its sources and statements are.

Place in the flow: prompt (pieces.py) and answer (answer_tokens.py) → **`lay_out`** → a `Layout`,
with a unit for each source and a target for each statement → verdicts/trials.py.

The words are those of analysis/: sources are the units of the distant tokens, the question is the
local window, and the tokens of the answer are the targets.

    distant tokens                        │ local window        │ targets
    source 0, text in view, …, source S−1 │ question, reasoning │ statement 0, statement 1, …

For example, two sources of 5 and 4 tokens, each followed by a separator of one token, a question of
3 tokens, and an answer of two statements:

    places       0 … 4     5    6 … 9     10   │ 11 … 13   │ 14 … 18      19 … 21
    tokens       source 0  \\n  source 1  \\n   │ question  │ statement 0  statement 1

    units        first [0, 6], end [6, 11]       with their separators
    text_ends    [5, 10]                         without them: what decoys replace
    statements   [(0, 5), (5, 8)]                counted from the start of the answer

Dimension key: W tokens of the answer, R rows of losses, T statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from olmo_sparsity.sources.prompt.answer_tokens import AnswerIds
from olmo_sparsity.sources.prompt.pieces import Piece, SourcePrompt
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import Spans, Units
from olmo_sparsity.text.windows import Block, Windows

FEWER_SOURCES = "give fewer sources, or shorter ones"
"""The remedy for a prompt that is longer than a model supports, for messages."""


class PromptText(NamedTuple):
    """A text of the prompt."""

    text: str
    source: int | None
    """The index of the source that the text is. None means that it is not a source."""


class AnswerText(NamedTuple):
    """A text of the answer."""

    text: str
    statement: int | None
    """The index of the statement that the text is. None means that it is part of no statement."""


class CharacterSpan(NamedTuple):
    """Where a statement is in the answer, in characters."""

    first: int
    end: int


@dataclass(frozen=True)
class Layout:
    """A prompt with its answer, as tokens, and where its sources and statements are."""

    document: Document
    windows: Windows
    statements: Spans
    """First and end token of each statement, counted from the start of the answer."""

    units: Units
    """First and end token of each source, with what separates it from the next text."""

    text_ends: np.ndarray
    """One past the last token of each source's own text, which decoys replace: the separator after
    it stays."""

    @cached_property
    def block(self) -> Block:
        """The answer as targets; all sources are among the distant tokens."""
        start = int(self.windows.short) + self.num_distant
        return self.windows.block(self.document.tokens, start, len(self.document.tokens))

    @property
    def num_distant(self) -> int:
        """Number of tokens up to the end of the last source."""
        return int(self.units.end.max())

    @property
    def before_question(self) -> np.ndarray:
        """The tokens up to the last source, with the prefix."""
        return self.block.tokens[: self.block.num_prefix + self.block.num_distant]

    def source_text(self, index: int) -> str:
        """Return the text of a source, as the model reads it, without what follows it."""
        return "".join(self.document.texts[self.units.first[index] : self.text_ends[index]])

    def prompt_texts(self, prompt: SourcePrompt) -> list[PromptText]:
        """Return the texts that precede the answer, without the separators between them."""
        # Decoded from tokens, as the model reads them, and not as the user has written them.
        texts = self.document.texts
        question = Piece(prompt.local_ids, after_ids=[])
        prompt_texts: list[PromptText] = []
        first = 0
        for piece in [*prompt.pieces, question]:
            end = first + len(piece.text_ids)
            prompt_texts.append(PromptText("".join(texts[first:end]), piece.source))
            first = end + len(piece.after_ids)
        return prompt_texts

    def answer_texts(self) -> list[AnswerText]:
        """Return texts that together are the answer: its statements, and what is between them."""
        texts = self.document.texts[self.block.start :]
        answer_texts: list[AnswerText] = []
        last_end = 0
        for statement_index, (first, end) in enumerate(self.statements):
            answer_texts.append(AnswerText("".join(texts[last_end:first]), None))
            answer_texts.append(AnswerText("".join(texts[first:end]), statement_index))
            last_end = end
        answer_texts.append(AnswerText("".join(texts[last_end:]), None))
        # Between two statements there is often nothing.
        return [item for item in answer_texts if item.text or item.statement is not None]

    def by_statement(self, losses_RW: np.ndarray) -> np.ndarray:
        """Return losses_TR: the loss of each statement, which is the sum over its tokens.
        `losses_RW`: losses of the answer's tokens, with a row for each prompt."""
        # Summed in fp64: many small numbers in fp32 would lose digits.
        losses_RW = losses_RW.astype(float)
        return np.stack([losses_RW[:, first:end].sum(1) for first, end in self.statements])


def character_spans(answer_texts: Sequence[AnswerText]) -> list[CharacterSpan]:
    """Return where each statement is in the answer, without the white space around it:

    texts   "It opened." (statement 0), " " (none), "It closed. " (statement 1)
    spans   (0, 10), (11, 21)
    """
    spans: list[CharacterSpan] = []
    text_first = 0
    for text, statement in answer_texts:
        if statement is not None:
            words = text.strip()
            first = text_first + text.find(words)
            spans.append(CharacterSpan(first, first + len(words)))
        text_first += len(text)
    return spans


def lay_out(prompt: SourcePrompt, answer: AnswerIds) -> Layout:
    """Return the prompt with this answer, and where its sources and statements are."""
    # Where sources are.
    num_sources = len(prompt.names)
    first = np.zeros(num_sources, dtype=np.int64)
    end = np.zeros(num_sources, dtype=np.int64)
    text_ends = np.zeros(num_sources, dtype=np.int64)
    piece_first = 0
    for piece in prompt.pieces:
        text_end = piece_first + len(piece.text_ids)
        piece_end = text_end + len(piece.after_ids)
        if piece.source is not None:
            first[piece.source] = piece_first
            text_ends[piece.source] = text_end
            end[piece.source] = piece_end
        piece_first = piece_end

    # All tokens, in one document.
    tokens = prompt.ids_before_answer
    answer_start = len(tokens)
    for ids in answer.pieces:
        tokens += ids
    document = Document(np.array(tokens, dtype=np.int64), tokenizer=prompt.model.tokenizer)

    # The local window is what follows the last source, so that all sources are distant.
    num_local = answer_start - int(end.max())
    num_targets = len(tokens) - answer_start
    # One block with the whole answer as its targets, so that one forward gives all losses.
    windows = Windows("all", num_local, num_targets, tuple(prompt.prefix_ids))
    windows.check()
    prompt.model.check_positions(windows.num_positions(len(tokens)), FEWER_SOURCES)

    # Statements are found in the answer by itself, so that an open quotation or code of a source
    # does not reach into it.
    statements = answer.statement_spans(prompt.model.tokenizer)
    return Layout(
        document=document,
        windows=windows,
        statements=statements,
        units=Units(first, end),
        text_ends=text_ends,
    )
