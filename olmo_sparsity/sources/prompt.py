"""Lay out sources, question and answer as tokens.

Place in the flow: request → **tokens, with a unit for each source and a target for each statement**
→ trials.py.

Sources are encoded one by one, so that the others keep their tokens if a decoy replaces one. All
that is not a source stays in view: the question, earlier messages, texts without a name.

Dimension key: W tokens of the answer, R rows of losses, T statements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

import numpy as np

from olmo_sparsity.analysis.explain.prompt import generate, split_template, through_template
from olmo_sparsity.base.errors import ConfigError, DataError, printable
from olmo_sparsity.base.progress import Progress, say
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.sources.documents import Answer, Segment, Turn, parts_of, read_turns
from olmo_sparsity.sources.reasoning import num_reasoning
from olmo_sparsity.sources.request import AttributeRequest
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.windows import Block, Spans, Units, Windows, span_width

AFTER_SOURCE = "\n\n"
"""Separates a source from what follows it."""

AFTER_QUESTION = "\n"


@dataclass(frozen=True)
class AnswerIds:
    """Tokens of the pieces of an answer."""

    pieces: list[list[int]]
    are_statements: list[bool] | None = None
    """Which pieces are statements. None: there is one piece, which is split into sentences."""

    reasoning: list[int] = field(default_factory=list)
    """Tokens between the question and the answer."""


@dataclass(frozen=True)
class Piece:
    """Tokens of a part of the prompt, and of what separates it from the next."""

    text_ids: list[int]
    after_ids: list[int]
    source: int | None = None
    """The number of the source, or of the judged part of a source. None: it stays in view."""

    whole: int | None = None
    """The number of the source that it is a part of; itself, where sources are judged whole."""


@dataclass(frozen=True)
class Layout:
    """A prompt with its answer."""

    document: Document
    windows: Windows
    statements: Spans
    """First and end token of each statement, within the answer."""

    units: Units
    """The places of each source, with what separates it from the next."""

    text_ends: np.ndarray
    """One past the last place of each source's own text, which decoys replace."""

    @cached_property
    def block(self) -> Block:
        """The answer as targets; all sources lie in the distant part."""
        start = int(self.windows.short) + self.num_distant
        return self.windows.block(self.document.tokens, start, len(self.document.tokens))

    @property
    def num_distant(self) -> int:
        return int(self.units.end.max())

    @property
    def before_question(self) -> np.ndarray:
        """Tokens up to the last source."""
        return self.block.tokens[: self.block.num_prefix + self.block.num_distant]

    def by_statement(self, losses_RW: np.ndarray) -> np.ndarray:
        """Return losses_TR: the losses of the tokens of each statement, added up."""
        losses_RW = losses_RW.astype(float)
        return np.stack([losses_RW[:, first:end].sum(1) for first, end in self.statements])


@dataclass(frozen=True)
class SourcePrompt:
    """Sources and question, encoded, without an answer."""

    model: LoadedModel
    names: list[str]
    """Names of the sources, or of the parts of them that are judged."""

    pieces: list[Piece]
    local_ids: list[int]
    """The question, and what a chat template puts after it."""

    prefix_ids: list[int]
    num_reasoning: int = 0
    """Number of sources at the end that are sentences of the model's reasoning."""

    @staticmethod
    def of(model: LoadedModel, request: AttributeRequest) -> SourcePrompt:
        """Encode the sources and the question of a request."""
        turns = read_turns(request.sources)
        settings = request.settings
        names = _candidate_names(parts_of(turns), request.candidates)
        if settings.chat or any(turn.role for turn in turns):
            parts, closing = _through_template(model, turns, request.question)
            prefix_ids = list[int]()  # the template writes its own
        else:
            parts = [(part, AFTER_SOURCE) for part in parts_of(turns)]
            closing = f"{request.question}{AFTER_QUESTION}"
            first_text = parts[0][0].text
            prefix_ids = model.prefix_ids(request.loading.prefix, first_text)
        after_texts = [after for _, after in parts]
        local_ids, *after_ids = model.encode([closing, *after_texts], follow=True)
        text_ids = _encode_parts(model, [part for part, _ in parts], settings.control_tokens)
        pieces = list[Piece]()
        for number, (part, _) in enumerate(parts):
            source = names.index(part.name) if part.name in names else None
            pieces.append(Piece(text_ids[number], after_ids[number], source, source))
        if settings.units != "sources":
            names, pieces = _divided(model, names, pieces, settings.units)
        return SourcePrompt(model, names, pieces, local_ids, prefix_ids)

    def through(self, ids: list[int], spans: Spans) -> SourcePrompt:
        """Return the prompt continued by the tokens of the reasoning, whose sentences, `spans`, are
        sources, too."""
        if not spans:
            return replace(self, local_ids=[*self.local_ids, *ids])
        sentence_names = [f"reasoning {i + 1}" for i in range(len(spans))]
        duplicates = sorted(set(self.names) & set(sentence_names))
        if duplicates:
            raise ConfigError(
                f"sources: '{duplicates[0]}' names a sentence of the reasoning; rename it"
            )
        # The last token stays in view: the local window must not be empty, and precedes the answer.
        last_end = min(spans[-1][1], len(ids) - 1)
        ends = [*(end for _, end in spans[:-1]), last_end]
        pieces = [*self.pieces, Piece([*self.local_ids, *ids[: spans[0][0]]], [])]
        for number, (first, _) in enumerate(spans):
            source = len(self.names) + number
            pieces.append(Piece(ids[first : ends[number]], [], source, source))
        return replace(
            self,
            names=[*self.names, *sentence_names],
            pieces=pieces,
            local_ids=ids[last_end:],
            num_reasoning=len(spans),
        )

    @cached_property
    def wholes(self) -> list[list[list[int]]]:
        """Tokens of the judged parts of each source, in order."""
        parts_by_source = dict[int | None, list[list[int]]]()
        for piece in self.pieces:
            if piece.source is not None:
                parts_by_source.setdefault(piece.whole, []).append(piece.text_ids)
        return list(parts_by_source.values())

    @cached_property
    def whole_ids(self) -> list[np.ndarray]:
        """Tokens of each source, also where its parts are judged."""
        return [np.array([*chain(*parts)]) for parts in self.wholes]

    @property
    def longest(self) -> int:
        """Tokens of the longest source."""
        return max(map(len, self.whole_ids))

    def lay_out(self, answer: AnswerIds) -> Layout:
        """Return the prompt with this answer, and where its sources and statements are."""
        num_sources = len(self.names)
        first = np.zeros(num_sources, dtype=np.int64)
        end = np.zeros(num_sources, dtype=np.int64)
        text_ends = np.zeros(num_sources, dtype=np.int64)
        tokens = list[int]()
        for piece in self.pieces:
            if piece.source is not None:
                first[piece.source] = len(tokens)
                text_ends[piece.source] = len(tokens) + len(piece.text_ids)
                end[piece.source] = text_ends[piece.source] + len(piece.after_ids)
            tokens += piece.text_ids
            tokens += piece.after_ids
        tokens += self.local_ids
        start = len(tokens)
        for ids in answer.pieces:
            tokens += ids
        document = Document(np.array(tokens, dtype=np.int64), tokenizer=self.model.tokenizer)
        # The local window is what follows the last source, so that all sources are distant.
        local = start - int(end.max())
        windows = Windows("all", local, len(tokens) - start, tuple(self.prefix_ids))
        windows.check()
        self.model.check_positions(windows.num_positions(len(tokens)), "give fewer sources")
        statements = _statements(document, start, answer)
        return Layout(document, windows, statements, Units(first, end), text_ends)

    def answer_ids(
        self, answer: Any, max_new_tokens: int, quiet: bool = False, reasoning: str | None = None
    ) -> AnswerIds:
        """Return the tokens of an answer. `answer`: a text, a list of statements, or an `Answer`;
        None: it is generated. `reasoning`: what precedes it; None: what a text has up to
        `</think>`."""
        encode = partial(self.model.encode, follow=True)
        reasoning_ids = encode([reasoning or ""])[0]
        if answer is None or isinstance(answer, str):
            if answer is None:
                text_ids = self._generate(reasoning_ids, max_new_tokens, quiet)
            else:
                text_ids = encode([answer])[0]
            if not reasoning_ids:
                num = num_reasoning(text_ids, self.model.tokenizer)
                reasoning_ids = text_ids[:num]
                text_ids = text_ids[num:]
            ids = AnswerIds([text_ids], None, reasoning_ids)
        elif isinstance(answer, Answer):
            pieces = answer.pieces()
            are_statements = [is_statement for _, is_statement in pieces]
            ids = AnswerIds(encode([text for text, _ in pieces]), are_statements, reasoning_ids)
        elif isinstance(answer, Sequence) and all(isinstance(text, str) for text in answer):
            texts = [text.strip() for text in answer]
            # A space between statements belongs to the later one, as in a tokenizer's words.
            texts = [*texts[:1], *(f" {text}" for text in texts[1:])]
            ids = AnswerIds(encode(texts), [True] * len(texts), reasoning_ids)
        else:
            raise ConfigError(
                f"answer={printable(repr(answer))[:60]} must be a text, a list of texts (its "
                "statements) or an Answer; quote a number"
            )
        statements = [answer] if isinstance(answer, str) else answer
        is_blank = isinstance(statements, list) and any(map(_is_blank, statements))
        if not ids.pieces or not all(ids.pieces) or is_blank:
            raise DataError("the answer is empty, or the model ends the text at once; give one")
        return ids

    def _generate(self, reasoning_ids: list[int], max_new_tokens: int, quiet: bool) -> list[int]:
        before = [*self.prefix_ids]
        for piece in self.pieces:
            before += piece.text_ids
            before += piece.after_ids
        before += self.local_ids
        before += reasoning_ids
        with Progress("answering", max_new_tokens, "tokens", enabled=not quiet) as progress:
            return generate(
                self.model,
                before,
                max_new_tokens,
                lambda generated: progress.update(len(generated)),
            )


def _encode_parts(
    model: LoadedModel, parts: Sequence[Segment], control_tokens: bool
) -> list[list[int]]:
    """Return the tokens of each part of a prompt.

    A source is encoded as a text of its own, and may hold no control tokens unless they are wanted.
    A part without a name is encoded as what it is: the beginning of the prompt, or a text that
    follows another, before which a tokenizer puts no space."""
    sources = [number for number, part in enumerate(parts) if part.name]
    in_view = [number for number, part in enumerate(parts) if not part.name]
    begins = [number for number in in_view if number == 0]
    follow = [number for number in in_view if number > 0]
    ids = dict[int, list[int]]()
    for numbers, options in (
        (sources, {"control_tokens": control_tokens}),
        (begins, {}),
        (follow, {"follow": True}),
    ):
        encoded = model.encode([parts[number].text for number in numbers], **options)
        ids.update(zip(numbers, encoded, strict=True))
    return [ids[number] for number in range(len(parts))]


def _through_template(
    model: LoadedModel, turns: Sequence[Turn], question: str | None
) -> tuple[list[tuple[Segment, str]], str]:
    """Return parts with what separates each from the next, and the question, which ends the last
    message of the user, with what follows it. What the template writes stays in view. A line
    reports what it leaves out of a message."""
    turns = [_stripped(turn) for turn in turns]
    if question is not None:
        if not turns or turns[-1].role != "user":
            turns.append(Turn("user", []))
        turns[-1].parts.append(Segment("", question.strip()))
    parts = parts_of(turns)
    texts = [part.text for part in parts]

    def messages(texts: Iterable[str], without: str = "") -> list[dict[str, Any]]:
        """Return the messages with these texts as their parts, and without this key."""
        rest = iter(texts)
        filled = list[dict[str, Any]]()
        for turn in turns:
            message = {key: value for key, value in turn.others.items() if key != without}
            content = AFTER_SOURCE.join(islice(rest, len(turn.parts)))
            filled.append(message | {"role": turn.role, "content": content})
        return filled

    first, *between = split_template(model, messages, texts)
    whole = through_template(model, messages(texts))
    keys = sorted(set(chain(*(turn.others for turn in turns))))
    unseen = [key for key in keys if through_template(model, messages(texts, key)) == whole]
    if unseen:
        say(f"the chat template leaves out what messages say as {', '.join(unseen)}")
    pairs = [(Segment("", first), "")]
    for part, after in zip(parts, between, strict=True):
        # What separates parts of one message moves with the part; the template's own text does not.
        separator = AFTER_SOURCE if after.startswith(AFTER_SOURCE) else ""
        pairs.append((part, separator))
        pairs.append((Segment("", after.removeprefix(separator)), ""))
    if question is None:
        return pairs[:-1], pairs[-1][0].text
    return pairs[:-2], parts[-1].text + between[-1]


def _stripped(turn: Turn) -> Turn:
    """Return the turn without white space around its parts, which templates remove, too."""
    parts = [replace(part, text=part.text.strip()) for part in turn.parts]
    return Turn(turn.role or "user", parts, turn.others)


def _candidate_names(parts: Sequence[Segment], candidates: Sequence[str] | None) -> list[str]:
    """Return the names of the sources that a verdict may name, in the order of the prompt."""
    names = [part.name for part in parts if part.name]
    duplicates = [name for number, name in enumerate(names) if name in names[:number]]
    if duplicates:
        raise ConfigError(f"two sources have one name, '{printable(duplicates[0])}'; rename one")
    if isinstance(candidates, str):
        candidates = [candidates]
    unknown = sorted(set(candidates or ()) - set(names))
    if unknown:
        raise ConfigError(
            f"candidates: no source is named {', '.join(unknown)}; the names are {', '.join(names)}"
        )
    chosen = [name for name in names if candidates is None or name in candidates]
    if not chosen:
        raise ConfigError(
            "sources: none has a name, and a text without one stays in view; give {name: text, …}, "
            "or a list with Segment(name, text)"
        )
    return chosen


def _divided(
    model: LoadedModel, names: list[str], pieces: Sequence[Piece], units: str
) -> tuple[list[str], list[Piece]]:
    """Return names and pieces of the parts of each source: "notes.txt §2" is the second of
    notes.txt."""
    new_names = list[str]()
    new_pieces = list[Piece]()
    for piece in pieces:
        if piece.source is None:
            new_pieces.append(piece)
            continue
        document = Document(np.array(piece.text_ids), tokenizer=model.tokenizer)
        ends = _ends_of_parts(document, units)
        first = 0
        for number, end in enumerate(ends, start=1):
            after_ids = piece.after_ids if end == ends[-1] else []
            ids = piece.text_ids[first:end]
            new_pieces.append(Piece(ids, after_ids, len(new_names), piece.source))
            new_names.append(f"{names[piece.source]} §{number}")
            first = end
    return new_names, new_pieces


def _ends_of_parts(document: Document, units: str) -> list[int]:
    """Return one past the last token of each part of a document."""
    num_tokens = len(document.tokens)
    width = span_width(units)
    if width is None:
        ends: list[int] = document.units(units, 0, num_tokens).end.tolist()
        return ends
    # Side by side; spans of other commands may overlap.
    return [*range(width, num_tokens, width), num_tokens]


def _statements(document: Document, start: int, answer: AnswerIds) -> Spans:
    """Return first and end token of each statement, from the start of the answer."""
    if answer.are_statements is None:
        return _sentence_spans(document.tokens[start:], document)
    statements = list[tuple[int, int]]()
    first = 0
    for ids, is_statement in zip(answer.pieces, answer.are_statements, strict=True):
        end = first + len(ids)
        if is_statement:
            statements.append((first, end))
        first = end
    return statements


def _sentence_spans(tokens: np.ndarray, document: Document) -> Spans:
    """Return first and end of each sentence of these tokens by themselves, so that an open
    quotation or code of a source does not reach into the answer."""
    alone = Document(tokens, tokenizer=document.tokenizer)
    units = alone.units("sentences", 0, len(tokens))
    return list(zip(units.first.tolist(), units.end.tolist(), strict=True))


def _is_blank(text: str) -> bool:
    """Return whether a text has no letter: white space, or the mark of a file's byte order."""
    return not text.replace("\ufeff", "").strip()


def statement_texts(model: LoadedModel, answer: str | Sequence[str] | Answer) -> list[str]:
    """Return the statements of an answer without a prompt, split as in `SourcePrompt.lay_out`."""
    if isinstance(answer, Answer):
        return [text.strip() for text, is_statement in answer.pieces() if is_statement]
    if not isinstance(answer, str):
        return [text.strip() for text in answer]
    ids = model.encode([answer])[0]
    num = num_reasoning(ids, model.tokenizer)
    document = Document(np.array(ids[num:]), tokenizer=model.tokenizer)
    spans = _sentence_spans(document.tokens, document)
    return ["".join(document.texts[first:end]).strip() for first, end in spans]
