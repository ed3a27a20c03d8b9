"""Encode an answer, or have the model generate one, and split it into statements.

Place in the flow: prompt (pieces.py) and answer → **`encode_answer`** → `AnswerIds` → layout.py.
A dry run, which generates nothing, lays out the `longest_answer` in place of a generated one.
What a user may pass, and what its statements are:

    None                                     the model generates a text, which is treated as below
    "<think>…</think> It opened. Thanks."    each sentence; what precedes is the reasoning
    ["It opened.", "Thanks."]                each text of the list
    Answer("It opened. Thanks.", [(0, 10)])  the spans of characters; the rest stays in view
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.analysis.explain.generation import generate
from olmo_sparsity.base.errors import ConfigError, DataError, printable
from olmo_sparsity.base.progress import Progress
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.sources.prompt.pieces import SourcePrompt
from olmo_sparsity.sources.reading.answer_pieces import Answer, AnswerPiece
from olmo_sparsity.sources.reading.reasoning import num_reasoning_tokens
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import Spans


@dataclass(frozen=True)
class AnswerIds:
    """An answer as tokens."""

    pieces: list[list[int]]
    """The tokens of texts that together are the answer."""

    are_statements: list[bool] | None = None
    """Which pieces are statements. None means that there is one piece, which is split into
    sentences."""

    reasoning: list[int] = field(default_factory=list)
    """Tokens of the reasoning, between the question and the answer."""

    def statement_spans(self, tokenizer: Tokenizer | None) -> Spans:
        """Return first and end token of each statement, counted from the start of the answer."""
        if self.are_statements is None:
            (ids,) = self.pieces
            return _sentence_spans(Document(np.array(ids), tokenizer=tokenizer))
        spans: list[tuple[int, int]] = []
        first = 0
        for ids, is_statement in zip(self.pieces, self.are_statements, strict=True):
            end = first + len(ids)
            if is_statement:
                spans.append((first, end))
            first = end
        return spans


def encode_answer(
    prompt: SourcePrompt,
    answer: Any,
    max_new_tokens: int,
    *,
    quiet: bool = False,
    reasoning: str | None = None,
) -> AnswerIds:
    """Return the tokens of an answer. Raise an error if it has another type, or is empty.

    Args:
        prompt: What precedes the answer, also for generating it.
        answer: A text, a list of statements, or an `Answer`. None means that the model generates
            it.
        max_new_tokens: Length limit of a generated answer.
        quiet: Show no progress.
        reasoning: What precedes the answer. None means what a text has up to `</think>`.
    """
    # Encoded as what follows another text, so that no space is put before it.
    encode = partial(prompt.model.encode, follow=True)
    reasoning_ids = _encode_reasoning(prompt, reasoning)
    if answer is None:
        text_ids = _generate(prompt, reasoning_ids, max_new_tokens, quiet)
        ids = _without_reasoning(text_ids, reasoning_ids, prompt.model.tokenizer)
    elif isinstance(answer, str):
        ids = _without_reasoning(encode([answer])[0], reasoning_ids, prompt.model.tokenizer)
    else:
        # Pieces are encoded one by one, so that no token lies across the end of a statement.
        pieces = _pieces_of(answer)
        ids = AnswerIds(
            pieces=encode([piece.text for piece in pieces]),
            are_statements=[piece.is_statement for piece in pieces],
            reasoning=reasoning_ids,
        )
    _check_not_empty(answer, ids)
    return ids


def _pieces_of(answer: Any) -> list[AnswerPiece]:
    """Return the pieces of an `Answer` or of a list of statements. Raise ConfigError for anything
    else."""
    if isinstance(answer, Answer):
        return answer.pieces()
    if not isinstance(answer, Sequence) or not all(isinstance(text, str) for text in answer):
        raise ConfigError(
            f"answer={printable(repr(answer))[:60]} must be a text, a list of texts (its "
            "statements) or an Answer; quote a number"
        )
    # What a user lists are statements, so no white space of its own belongs to one. A space
    # between statements belongs to the later one, as in a tokenizer's words.
    texts = [text.strip() for text in answer]
    texts = [*texts[:1], *(f" {text}" for text in texts[1:])]
    return [AnswerPiece(text, is_statement=True) for text in texts]


def longest_answer(prompt: SourcePrompt, num_tokens: int, reasoning: str | None) -> AnswerIds:
    """Return an answer of this many tokens, as a single statement, to count what a generated one
    costs at most. Its tokens have no meaning."""
    any_token = prompt.local_ids[:1]
    return AnswerIds(
        pieces=[any_token * num_tokens],
        are_statements=[True],
        reasoning=_encode_reasoning(prompt, reasoning),
    )


def _encode_reasoning(prompt: SourcePrompt, reasoning: str | None) -> list[int]:
    """Return the tokens of reasoning that a user has passed; none for None."""
    return prompt.model.encode([reasoning or ""], follow=True)[0]


def _without_reasoning(
    text_ids: list[int], reasoning_ids: list[int], tokenizer: Tokenizer | None
) -> AnswerIds:
    """Return the tokens of a text as one piece. What it has up to `</think>` is its reasoning,
    unless the user has passed some."""
    if reasoning_ids:
        return AnswerIds(pieces=[text_ids], reasoning=reasoning_ids)
    num_tokens = num_reasoning_tokens(text_ids, tokenizer)
    return AnswerIds(pieces=[text_ids[num_tokens:]], reasoning=text_ids[:num_tokens])


def _check_not_empty(answer: Any, ids: AnswerIds) -> None:
    """Raise DataError unless each piece has tokens, and each statement a letter."""
    # A blank statement may have tokens, such as a line break, and would get a verdict.
    if isinstance(answer, list | tuple):
        for number, statement in enumerate(answer):
            if _is_blank(statement):
                raise DataError(
                    f"statement {number} of the answer is empty (they count from 0); leave it out"
                )
    is_blank = isinstance(answer, str) and _is_blank(answer)
    if not ids.pieces or not all(ids.pieces) or is_blank:
        raise DataError("the answer is empty, or the model ends the text at once; give one")


def _is_blank(text: str) -> bool:
    """Return whether a text has no letter: white space, or the mark of a file's byte order."""
    return not text.replace("\ufeff", "").strip()


def _generate(
    prompt: SourcePrompt, reasoning_ids: list[int], max_new_tokens: int, quiet: bool
) -> list[int]:
    """Return the tokens that the model writes after the prompt and the reasoning, greedily."""
    context_ids = [*prompt.prefix_ids, *prompt.ids_before_answer, *reasoning_ids]
    with Progress("answering", max_new_tokens, "tokens", enabled=not quiet) as progress:
        return generate(
            prompt.model,
            context_ids,
            max_new_tokens,
            lambda generated: progress.update(len(generated)),
        )


def _sentence_spans(document: Document) -> Spans:
    """Return first and end token of each sentence of a document."""
    units = document.units("sentences", 0, len(document.tokens))
    return list(zip(units.first.tolist(), units.end.tolist(), strict=True))


def statement_texts(model: LoadedModel, answer: str | Sequence[str] | Answer) -> list[str]:
    """Return the statements of an answer whose prompt has no sources, split as others are."""
    if isinstance(answer, Answer):
        return [piece.text.strip() for piece in answer.pieces() if piece.is_statement]
    if not isinstance(answer, str):
        return [text.strip() for text in answer]
    ids = model.encode([answer])[0]
    num_tokens = num_reasoning_tokens(ids, model.tokenizer)
    document = Document(np.array(ids[num_tokens:]), tokenizer=model.tokenizer)
    spans = _sentence_spans(document)
    return ["".join(document.texts[first:end]).strip() for first, end in spans]
